"""The loops in examples/: each is killed once under plain torchrun, and ends as if it had not been, bit for bit."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from ckpt.store import open_store
from elastic.ledger.events import Metric
from elastic.ledger.reader import read
from tests.dist.launch import ROOT, Job, torchrun
from tests.dist.readback import by_step, content, differences, step_folder

pytestmark = pytest.mark.dist
STEPS = 24
UNUSED = r"\.rng\.rank\d+\.(numpy|python)"  # streams that these loops neither seed nor draw from
LOOPS = {
    "train_accumulate": ["--every", "5 steps"],
    "train_evaluate": ["--every", "5 steps", "--evaluate", "7"],
    "train_compiled": ["--every", "5 steps", "--backend", "aot_eager"],  # a compiler of its own would take minutes
}


def start(loop: str, folder: Path, restarts: int) -> Job:
    folder.mkdir()
    log = folder / "log"
    args = [str(folder / "run"), "--steps", str(STEPS), "--log-file", str(log), *LOOPS[loop]]
    return torchrun(ROOT / "examples" / f"{loop}.py", *args, nproc=2, log=log, max_restarts=restarts)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_killed_rank_changes_nothing(loop: str, tmp_path: Path) -> None:
    control, killed = tmp_path / "control", tmp_path / "killed"
    with start(loop, control, 0) as job:
        assert job.wait(240) == 0, job.tail("the control run failed")
    with start(loop, killed, 2) as job:
        lines = job.until(lambda lines: any(x["step"] == 12 for x in lines), 240)
        os.kill(next(x["pid"] for x in lines if x["rank"] == 1), signal.SIGKILL)
        assert job.wait(240) == 0, job.tail("the job failed")
    unequal = differences(step_folder(killed / "run", STEPS), step_folder(control / "run", STEPS))
    assert [k for k in unequal if not re.match(UNUSED, k)] == []
    once, meant = by_step(Job.read(killed / "log")), by_step(Job.read(control / "log"))
    assert once == meant
    assert len({x["pid"] for x in Job.read(killed / "log")}) == 4
    first, last = (sum(min(meant[n, 0])[0] for n in range(at, at + 4)) for at in (0, STEPS - 4))
    assert last < 0.9 * first  # it learns
    if loop == "train_evaluate":
        told = {}
        for folder in (control, killed):
            rows = [e for e in read(open_store(str(folder / "run"))).events if isinstance(e.data, Metric)]
            told[folder] = {(e.step, e.data.last) for e in rows if e.data.name == "val_loss"}  # type: ignore[union-attr]
        assert {step for step, _ in told[control]} == {7, 14, 21}
        assert told[killed] == told[control]  # an evaluation that was repeated found the same
    if loop == "train_accumulate":
        assert sum(len(s) for r in (0, 1) for _, s in meant[3, r]) == 48
    if loop == "train_compiled":
        assert not any("scale" in key for key in content(step_folder(control / "run", STEPS)))
