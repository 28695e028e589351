"""The streaming example: killed while workers have read ahead, it trains on what it would have trained on."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.dist.launch import ROOT, Job, torchrun
from tests.dist.readback import by_step, differences, step_folder

pytestmark = pytest.mark.dist
STEPS = 30


def start(folder: Path, *more: str) -> Job:
    folder.mkdir(exist_ok=True)
    args = [str(folder / "run"), "--steps", str(STEPS), "--every", "5 steps", "--log-file", str(folder / "log"), *more]
    command = [sys.executable, str(ROOT / "examples/train_stream.py"), *args]
    return Job(command, log=folder / "log", output=folder / "output", env={})


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_killed_stream_goes_on_where_it_was_trained_on(tmp_path: Path, workers: str) -> None:
    if workers != "0":
        pytest.importorskip("torchdata.stateful_dataloader")
    control, drilled = tmp_path / "control", tmp_path / "drilled"
    with start(control, "--workers", workers) as job:
        assert job.wait(180) == 0, job.tail("the control run failed")
    for at in (8, 19):
        with start(drilled, "--workers", workers) as job:
            lines = job.until(lambda ls, at=at: any(x["step"] == at for x in ls), 180)
            os.kill(lines[-1]["pid"], signal.SIGKILL)
    with start(drilled, "--workers", workers) as job:
        assert job.wait(180) == 0, job.tail("the last start failed")
    assert len({x["pid"] for x in job.lines()}) == 3
    assert by_step(job.lines()) == by_step(Job.read(control / "log"))
    unused = (".python[", ".numpy[")  # streams that the example neither seeds nor draws from
    found = differences(step_folder(drilled / "run", STEPS), step_folder(control / "run", STEPS))
    assert [key for key in found if not any(name in key for name in unused)] == []
    if workers != "0":
        return
    log = drilled / "two"
    args = [str(drilled / "run"), "--steps", str(STEPS + 2), "--log-file", str(log)]
    with torchrun(ROOT / "examples/train_stream.py", *args, nproc=2, log=log) as job:
        assert job.wait(180) == 1
    assert "fits no other number of ranks" in job.output.read_text()
    assert "not saved with the State" not in job.output.read_text()
