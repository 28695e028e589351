"""A writer stopped in mid-save never gets its late commit chosen; tests.soak.paused_writer plays more seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.paused_writer import play

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 5, 8])
def test_a_stale_commit_is_never_chosen(seed: int, tmp_path: Path) -> None:
    result = play(seed, tmp_path)
    print(f"seed {seed}, {result.ranks} ranks, stopped {result.stopped}: {result.old}")
    assert not result.stopped.startswith("never")
    assert result.stale == ""
    assert result.old is not None
    assert result.old["error"] == "Superseded"
