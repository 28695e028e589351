"""A planted mistake that a drill has to fail; ``python -m tests.soak.drills_mutations`` holds them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.drills_mutations import DEFECTS, hold

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("name", ["the oldest step is restored"])
def test_a_planted_mistake_is_failed_in_words_that_point_at_it(name: str, tmp_path: Path) -> None:
    row = hold(next(d for d in DEFECTS if d.name == name), tmp_path)
    assert row["found"], row
