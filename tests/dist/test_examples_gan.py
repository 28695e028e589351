"""The GAN example: both models, both optimizers and the average come back together, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.dist.launch import ROOT, Job, torchrun
from tests.dist.readback import by_step, content, differences, step_folder

pytestmark = pytest.mark.dist
STEPS = 24


def start(folder: Path, restarts: int) -> Job:
    folder.mkdir()
    args = [str(folder / "run"), "--steps", str(STEPS), "--every", "5 steps", "--log-file", str(folder / "log")]
    return torchrun(ROOT / "examples/train_gan.py", *args, nproc=2, log=folder / "log", max_restarts=restarts)


def test_a_killed_gan_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    control, drilled, rng = tmp_path / "control", tmp_path / "drilled", random.Random(3)
    with start(control, 0) as job:
        assert job.wait(180) == 0, job.tail("the control run failed")
    with start(drilled, 2) as job:
        for at in (8, 17):
            victim = rng.randrange(2)
            lines = job.until(lambda ls, at=at, v=victim: any(x["step"] == at and x["rank"] == v for x in ls), 180)
            time.sleep(rng.random() * 0.02)
            os.kill(next(x["pid"] for x in reversed(lines) if x["rank"] == victim), signal.SIGKILL)
        assert job.wait(180) == 0, job.tail("the job failed")
    assert len({x["pid"] for x in job.lines()}) > 2
    assert by_step(job.lines()) == by_step(Job.read(control / "log"))
    ends = [step_folder(folder / "run", STEPS) for folder in (drilled, control)]
    unused = (".python[", ".numpy[")  # streams that the example neither seeds nor draws from
    assert [key for key in differences(*ends) if not any(name in key for name in unused)] == []
    kept = content(ends[0])
    for part in (".G.0.weight", ".D.0.weight", ".opt_g.state.0.weight.exp_avg", ".opt_d.state.0.weight.exp_avg",
                 ".ema.module.0.weight", ".ema.n_averaged"):  # fmt: skip
        assert part in kept
    assert kept[".G.0.weight"] != kept[".ema.module.0.weight"]
    assert "not saved with the State" not in job.output.read_text()
