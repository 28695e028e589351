"""Loaders with workers through real kills: no sample is missed or repeated, and what workers draw comes again."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.dist.launch import Job, torchrun
from tests.dist.loaders import BATCH, SIZE
from tests.dist.readback import by_step, differences, step_folder

pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.dist
HERE = Path(__file__).parent
EPOCH = SIZE // BATCH // 2  # steps on two ranks
STEPS = 3 * EPOCH


def start(
    folder: Path, kind: str, workers: int, *, nproc: int = 2, restarts: int = 0, more: tuple[str, ...] = ()
) -> Job:
    folder.mkdir(exist_ok=True)
    log = folder / "log"
    args = [kind, str(workers), str(folder / "run"), str(log), str(STEPS), *more]
    return torchrun(HERE / "loaders.py", *args, nproc=nproc, log=log, max_restarts=restarts)


@pytest.mark.parametrize(("kind", "workers"), [("elastic", 2), ("map", 2), ("stream", 2), ("stream", 0)])
def test_killed_and_restarted_nothing_is_missed_or_repeated(tmp_path: Path, kind: str, workers: int) -> None:
    control, drilled, rng = tmp_path / "control", tmp_path / "drilled", random.Random(f"{kind} {workers}")
    with start(control, kind, workers) as job:
        assert job.wait(180) == 0, job.tail("the control run failed")
    with start(drilled, kind, workers, restarts=2) as job:
        for at in (rng.randrange(4, EPOCH + 2), rng.randrange(EPOCH + 4, STEPS - 2)):  # in the first epoch, and later
            victim = rng.randrange(2)
            lines = job.until(lambda ls, at=at, v=victim: any(x.get("step") == at and x["rank"] == v for x in ls), 180)
            time.sleep(rng.random() * 0.03)
            os.kill(next(x["pid"] for x in reversed(lines) if x["rank"] == victim), signal.SIGKILL)
        assert job.wait(180) == 0, job.tail("the job failed")
    assert len({x["pid"] for x in job.lines()}) == 6
    meant, seen = by_step(Job.read(control / "log")), by_step(job.lines())
    assert seen == meant  # a step that was trained on twice got the same both times
    assert differences(step_folder(drilled / "run", STEPS), step_folder(control / "run", STEPS)) == []
    for epoch in range(3):
        got = Counter(int(n) for (s, _), ((_, row),) in seen.items() if s // EPOCH == epoch for n in numbers(row, kind))
        assert got == dict.fromkeys(range(SIZE), 1)


def numbers(row: tuple[float, ...], kind: str) -> tuple[float, ...]:
    """The numbers of the samples in a batch: the first column."""
    return row[:: {"elastic": 4, "map": 1, "stream": 2}[kind]]


def test_on_other_ranks_a_loader_refuses_or_goes_on_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    with start(folder, "stream", 0) as job:
        job.until(lambda ls: any(x.get("step") == 5 for x in ls))
    with start(folder, "stream", 0, nproc=1) as job:
        assert job.wait(90) == 1
    text = job.output.read_text()
    assert "[C-M] data: every rank has its own position in it" in text
    with start(folder, "stream", 0, nproc=1, more=("approximate",)) as job:
        assert job.wait(90) == 0, job.tail("approximate did not go on")
    (last,) = [x for x in job.lines() if x.get("event") == "resumed" and x["world"] == 1]
    assert last["at"] >= 3
    assert last["inexact"] == [
        "data: saved on 2 ranks, here 1: 1 rank goes on where it was; samples may be missed or repeated"
    ]
