"""Two jobs on one run under torchrun: the older one ends with status 6, and its restarts do not take the run back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import ckpt
from tests.dist.launch import torchrun

pytestmark = pytest.mark.dist
WORKER = Path(__file__).with_name("one_of_two.py")


def test_the_older_job_gives_up_for_good(tmp_path: Path) -> None:
    url = tmp_path / "run"

    def start(name: str, steps: int) -> object:
        log = tmp_path / name
        return torchrun(WORKER, str(url), str(steps), str(log), nproc=2, log=log, max_restarts=3)

    with start("old", 5000) as old:
        seen = old.until(lambda lines: any(x.get("step", 0) >= 8 for x in lines))
        with start("new", max(x["step"] for x in seen) + 600) as new:
            assert new.wait(120) == 0, new.tail("the newer job did not end well")
        began = time.monotonic()
        assert old.wait(60) != 0
        assert time.monotonic() - began < 60
        text = old.output.read_text()
    assert "a newer start of this run has taken over" in text
    assert "exitcode  : 6" in text or "exitcode: 6" in text
    epochs = [p.name for p in (url / "epochs").iterdir() if not p.name.endswith(".base.json")]
    assert len(epochs) == 2, f"the older job took the run back: {sorted(epochs)}"
    newest = ckpt.open(str(url)).newest_valid()
    assert newest is not None
    assert "-e00000002-" in newest
