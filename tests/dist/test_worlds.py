"""Four ranks, two, one, three, four, killed in between, over three epochs: whoever trains, it is the same training."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from tests.dist.launch import Job, Line, torchrun
from tests.dist.readback import content, differences, step_folder
from tests.dist.worlds import BATCH, SIZE

pytestmark = pytest.mark.dist
STEPS = 3 * SIZE // BATCH  # 25 steps of 12 are three epochs of 100
WORLDS = {"shards": [4, 2, 1, 3, 4], "micro": [4, 2, 1, 4]}
TOLERANCE = 2e-5  # of the loss, relative: what the order of float32 sums does to 25 steps of AdamW


def start(mode: str, folder: Path, world: int, restarts: int = 0) -> Job:
    folder.mkdir(exist_ok=True)
    script = Path(__file__).with_name("worlds.py")
    return torchrun(script, mode, str(folder), str(STEPS), nproc=world, log=folder / "log", max_restarts=restarts)


def train(mode: str, folder: Path, worlds: list[int], rng: random.Random) -> None:
    """On each number of ranks in turn; one rank of each is killed, and then, but for the last, the whole job."""
    for n, world in enumerate(worlds):
        with start(mode, folder, world, restarts=1) as job:
            before = len(job.lines())
            goal = STEPS * (n + 1) // len(worlds)
            lines = job.until(lambda lines: reached(lines[before:], goal - 4))  # noqa: B023
            victims = sorted({x["pid"] for x in lines[before:]})
            with suppress(ProcessLookupError):
                os.kill(rng.choice(victims), signal.SIGKILL)
            if n + 1 == len(worlds):
                assert job.wait(120) == 0, job.tail("the last start failed")
            else:
                job.until(lambda lines: reached(lines[before:], goal))  # noqa: B023
            # leaving the block kills what is left, the agent first or last


def reached(lines: list[Line], step: int) -> bool:
    return any(x["step"] >= step for x in lines)


def by_step(lines: list[Line]) -> dict[int, list[int]]:
    """The samples of each global batch in the order of ranks, each time it was trained; all times must be equal."""
    parts: dict[tuple[int, int, int], list[int]] = {}
    for x in lines:  # a generation of processes may have been killed when only some had written
        parts[x["step"], x["world"], x["rank"]] = x["samples"]
    out: dict[int, list[int]] = {}
    for step in range(STEPS):
        whole = []
        for world in sorted({w for s, w, _ in parts if s == step}):
            ranks = [parts.get((step, world, r)) for r in range(world)]
            if None not in ranks:
                whole.append([i for r in ranks for i in r or []])
        assert whole, f"step {step} was never trained as a whole"
        assert all(w == whole[0] for w in whole), f"step {step} was trained on different samples"
        out[step] = whole[0]
    return out


def losses(lines: list[Line]) -> dict[int, float]:
    """The mean over ranks, as trained last."""
    seen: dict[tuple[int, int], dict[int, float]] = {}
    for x in lines:
        seen.setdefault((x["step"], x["world"]), {})[x["rank"]] = x["loss"]
    return {step: sum(v.values()) for (step, world), v in seen.items() if len(v) == world}


@pytest.fixture(scope="module", params=["shards", "micro"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """An undisturbed run on one rank, and one that went through five worlds."""
    mode, root = str(request.param), tmp_path_factory.mktemp(str(request.param))
    with start(mode, root / "control", 1) as job:
        assert job.wait(120) == 0, job.tail("the control run failed")
    train(mode, root / "drilled", WORLDS[mode], random.Random(5))
    return mode, root / "control", root / "drilled"


def test_each_sample_comes_once_an_epoch_and_in_the_same_order(both: tuple[str, Path, Path]) -> None:
    mode, control, drilled = both
    meant, seen = (by_step(Job.read(f / "log")) for f in (control, drilled))
    assert seen == meant
    stream = [i for step in range(STEPS) for i in seen[step]]
    for epoch in range(3):
        assert Counter(stream[epoch * SIZE : (epoch + 1) * SIZE]) == Counter(range(SIZE))
    assert {x["world"] for x in Job.read(drilled / "log")} == set(WORLDS[mode])
    assert len({x["pid"] for x in Job.read(drilled / "log")}) > sum(WORLDS[mode])


def test_the_losses_are_those_of_the_undisturbed_run(both: tuple[str, Path, Path]) -> None:
    mode, control, drilled = both
    meant, seen = (losses(Job.read(f / "log")) for f in (control, drilled))
    assert seen.keys() == meant.keys()
    if mode == "micro":
        assert seen == pytest.approx(meant, rel=TOLERANCE)
    else:  # each rank has the mean over all shards
        assert {(x["step"], x["loss"]) for x in Job.read(drilled / "log")} == set(meant.items())


def test_with_logical_shards_the_weights_are_the_same_to_the_last_bit(both: tuple[str, Path, Path]) -> None:
    mode, control, drilled = both
    ends = step_folder(drilled / "run", STEPS), step_folder(control / "run", STEPS)
    keys = [k for k in content(ends[0]) if not k.startswith(".rng")]
    assert any("model" in k for k in keys)
    unequal = {k for k in differences(*ends) if not k.startswith(".rng")}  # streams are derived where ranks changed
    assert (unequal == set()) == (mode == "shards"), sorted(unequal)
