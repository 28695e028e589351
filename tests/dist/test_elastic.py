"""Restarts, stops and agreement with real processes under plain torchrun."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.errors import CkptError, RankFailed, Refused
from ckpt.store import open_store
from elastic import Run
from elastic.agreement import Agreement, Flags
from elastic.ledger.reader import read
from tests.dist.kill_campaign import STEPS, kill_one, start, wrong
from tests.dist.launch import ROOT, Job, by_hand
from tests.dist.readback import by_step, differences, step_folder
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist
HERE = Path(__file__).parent


# --- the process group ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("static", [False, True], ids=["c10d", "static"])
def test_plain_torchrun_recovers_from_a_killed_rank(tmp_path: Path, static: bool) -> None:
    with start("elastic", tmp_path / "job", 4, static=static) as job:
        assert kill_one(job, random.Random(5), 4, budget_s=60) is not None, job.tail("no step after the kill")
        assert job.wait() == 0, job.tail("the job failed")
    tokens = {pid: {x["generation"] for x in job.lines() if x["pid"] == pid and "step" in x} for pid in pids(job)}
    assert all(len(t) <= 1 for t in tokens.values())
    assert len(set().union(*tokens.values())) == 2


def pids(job: Job) -> set[int]:
    return {x["pid"] for x in job.lines()}


def test_ranks_that_nobody_supervises_meet_without_a_warning(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(job) for job in by_hand(HERE / "ring.py", "elastic", "3", str(log), nproc=2, log=log)
        ]
        assert [job.wait() for job in ranks] == [0, 0], ranks[0].tail("") + ranks[1].tail("")
        assert [job.output.read_text() for job in ranks] == ["", ""]


def test_rank_0_keeps_the_store_until_the_others_have_ended(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        "import elastic, time, torch.distributed as dist\n"
        "elastic.init()\n"
        "if dist.get_rank() == 1:\n"
        "    time.sleep(2)\n"
        "    print(dist.group.WORLD.get_group_store().check(['key']))\n"
    )
    with ExitStack() as stack:
        ranks = [stack.enter_context(job) for job in by_hand(script, nproc=2, log=tmp_path / "log")]
        assert [job.wait() for job in ranks] == [0, 0], ranks[0].tail("rank 0") + ranks[1].tail("rank 1")


def test_a_rank_that_does_not_come_is_named_in_time(tmp_path: Path) -> None:
    log, code = tmp_path / "log", "import elastic; elastic.init(timeout_s=2)"
    (tmp_path / "alone.py").write_text(code)
    with by_hand(tmp_path / "alone.py", nproc=1, log=log, env={"WORLD_SIZE": "3"})[0] as job:
        assert job.wait(60) == 1
        assert "[C-R] rank 1, 2 of 3 did not come to the process group in time" in job.output.read_text()


# --- agreement --------------------------------------------------------------------------------------------------------


def agree() -> list[tuple[Flags, ...]]:
    rank, seen = dist.get_rank(), []
    agreement = Agreement()
    for boundary in range(4):
        agreement.post(Flags(stop=int(boundary == 1 and rank == 2), stall_us=10 * rank))
        time.sleep(0.02 * rank)
        seen.append(agreement.take(Flags()))
    agreement.close()
    return seen


def test_what_one_rank_says_all_hear_at_the_same_boundary() -> None:
    assert run_ranks(3, agree) == [[Flags(stop=int(n == 1), stall_us=20) for n in range(4)]] * 3


def disagree() -> str:
    agreement = Agreement()
    with pytest.raises(Refused) as caught:
        agreement.check_same("until", 10 + dist.get_rank())
    agreement.close()
    return caught.value.message


def test_different_ends_of_the_loop_are_refused_on_all_ranks() -> None:
    assert run_ranks(3, disagree) == ["until is 10 on one rank and 12 on another"] * 3


def lose_a_rank() -> str | None:
    agreement = Agreement()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    agreement.post(Flags())
    with pytest.raises(RankFailed) as caught:
        agreement.take(Flags())
    return caught.value.message


def test_a_rank_that_dies_is_an_error_at_the_boundary() -> None:
    assert run_ranks(2, lose_a_rank)[0] == "a rank did not come to the end of this step"


def test_a_failed_rank_ends_even_while_another_hangs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ExitStack() as stack:
        jobs = by_hand(HERE / "stuck.py", str(tmp_path / "run"), nproc=2, log=log)
        failed, frozen = (stack.enter_context(job) for job in jobs)
        assert failed.wait(60) == 1
        assert "ZeroDivisionError" in failed.output.read_text()
        assert frozen.process.poll() is None


# --- the run ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the example leaves behind on two ranks when nothing happens."""
    folder = tmp_path_factory.mktemp("control") / "job"
    with start("gpt", folder, 2, restarts=0) as job:
        assert job.wait(180) == 0, job.tail("the control run failed")
    return folder


def test_the_example_converges(control: Path) -> None:
    losses = {x["step"]: x["loss"] for x in Job.read(control / "log") if x.get("rank") == 0 and "step" in x}
    assert losses[0] > 5.3  # more than log(256): it knows nothing
    assert sum(losses[n] for n in range(STEPS - 5, STEPS)) / 5 < 3.3


def test_the_example_is_small_and_the_toolkit_a_small_part_of_it() -> None:
    lines = (ROOT / "examples" / "train_gpt.py").read_text().splitlines()
    assert len(lines) < 200
    assert len([line for line in lines if re.search(r"import (ckpt|elastic)\b|\b(ckpt|elastic|run)\.\w", line)]) <= 10


def test_a_killed_rank_changes_nothing(control: Path, tmp_path: Path) -> None:
    with start("gpt", tmp_path / "job", 2) as job:
        assert kill_one(job, random.Random(11), 2, budget_s=120) is not None, job.tail("no step after the kill")
        assert job.wait(180) == 0, job.tail("the job failed")
    assert wrong(tmp_path / "job", control) == ""
    story = read(open_store(str(tmp_path / "job" / "run"))).events
    assert {e.rank for e in story if e.kind == "finished"} == {0, 1}
    assert len({(e.epoch, e.generation) for e in story}) == 2


def test_sigterm_to_one_rank_stops_all_at_one_step(control: Path, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    with start("gpt", folder, 2, restarts=0) as job:
        lines = job.until(lambda ls: any(x.get("step") == 9 and x["rank"] == 1 for x in ls))
        os.kill(next(x["pid"] for x in lines if x["rank"] == 1), signal.SIGTERM)
        assert job.wait() == 1  # torchrun's own word for workers that did not end with 0
    output = job.output.read_text()
    assert output.count("exitcode  : 75") == 2, output
    ends = [max(x["step"] for x in job.lines() if x["rank"] == r and "step" in x) for r in (0, 1)]
    assert ends[0] == ends[1] < STEPS - 1
    assert step_folder(folder / "run", ends[0] + 1).is_dir()
    with start("gpt", folder, 2, restarts=0) as job:
        assert job.wait(180) == 0, job.tail("the second start failed")
    once, meant = by_step(job.lines()), by_step(Job.read(control / "log"))
    assert sum("step" in x for x in job.lines()) == len(once) == 2 * STEPS  # nothing twice, nothing missing
    assert once == meant
    assert differences(step_folder(folder / "run", STEPS), step_folder(control / "run", STEPS)) == []


def broken_on_one_rank(folder: str, policy: str) -> tuple[str, int]:
    """The only save, of step 3, fails on rank 1 alone: where its object should go, there is a folder."""
    if dist.get_rank() == 1:
        (Path(folder) / "steps" / f"{3:012d}" / "e00000001-0" / "__1_0.distcp").mkdir(parents=True)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    try:
        with Run(folder, ckpt.State(model=model), every=1000, save_failures=policy) as run:
            for step, _ in run.steps(until=200):
                if step == 1 and dist.get_rank() == 0:
                    run.save()  # which rank 1 hears of a step later
                total = torch.ones(1)
                dist.all_reduce(total)
                time.sleep(0.41 if step < 6 else 0.01)  # long enough for the ranks to agree after each
    except CkptError as error:
        return error.code, run.step
    return "no error", run.step


def test_a_save_that_fails_on_one_rank_is_raised_on_all_at_the_same_step(tmp_path: Path) -> None:
    first, second = run_ranks(2, broken_on_one_rank, str(tmp_path), "raise")
    assert first == second
    assert first[0] in ("C-E", "C-R")
    assert first[1] < 190


def test_a_save_that_fails_on_one_rank_lets_all_train_on(tmp_path: Path) -> None:
    assert run_ranks(2, broken_on_one_rank, str(tmp_path), "warn") == [("no error", 200)] * 2
    assert [p.name[:12] for p in (tmp_path / "commits").iterdir()] == [f"{200:012d}"]


def unprepared(folder: str) -> None:
    os.environ.update(TORCHELASTIC_MAX_RESTARTS="3", TORCHELASTIC_USE_AGENT_STORE="True")
    with pytest.warns(RuntimeWarning, match="will not survive a restart"), Run(folder, ckpt.State(n=1)):
        pass


def test_a_process_group_that_cannot_be_restarted_is_warned_about(tmp_path: Path) -> None:
    run_ranks(2, unprepared, str(tmp_path))
