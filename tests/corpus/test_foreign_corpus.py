"""Every foreign checkpoint is judged as its recipe says: no execution, no traceback, no allocation beyond its size."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

import ckpt.foreign.adopt  # imports count as allocations
import ckpt.foreign.export  # noqa: F401
from ckpt import cli
from tests.corpus.foreign import CANARY, DCP, SAFETENSORS, Recipe

PARSED_PER_BYTE = 60
FIXED_BYTES = 8 << 20


@pytest.mark.parametrize("recipe", [*DCP, *SAFETENSORS], ids=lambda r: r.name)
def test_foreign_checkpoint(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, run, out = tmp_path / "source", tmp_path / "run", tmp_path / "out"
    recipe.build(source)
    size = sum(p.stat().st_size for p in source.iterdir())
    before = sorted(p.name for p in tmp_path.iterdir())
    calls = (["inspect"], ["validate", "--level", "full"], ["adopt"], ["export", "--to", "torch"])
    for command, status in zip(calls, recipe.statuses, strict=True):
        target = {"adopt": [str(run)], "export": [str(out)]}.get(command[0], [])
        tracemalloc.start()
        got = cli.run([*command, str(source), *target])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        said = capsys.readouterr()
        assert got == status, (command, said.out, said.err)
        assert "Traceback" not in said.err
        assert peak < size * PARSED_PER_BYTE + FIXED_BYTES, f"{command}: {peak} bytes for {size} bytes of files"
        assert (said.out + said.err).replace("\n", "").isprintable()
        if command[0] == "validate":
            assert recipe.says in said.out
    assert not Path(CANARY).exists()
    if 0 not in recipe.statuses[2:]:  # nothing was claimed, nothing is left lying about
        assert sorted(p.name for p in tmp_path.iterdir()) == before
