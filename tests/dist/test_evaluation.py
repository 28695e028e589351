"""Evaluation, several batches a step, and stops in long steps, on ranks that differ in how much they have to do."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from ckpt.errors import CkptError, RankFailed, Refused, StorageError
from ckpt.store import open_store
from ckpt.store.local import LocalStore
from elastic import Cadence, ElasticSampler, Run, saves
from elastic.ledger.reader import read
from tests.dist.readback import differences, step_folder
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist


def train(folder: str, *, evaluated: bool) -> list[float]:
    """DDP with dropout; rank r evaluates on r + 1 batches, and reduces the result."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(60, 4, generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(data, batch_sampler=ElasticSampler(data, 6, seed=3))
    torch.manual_seed(dist.get_rank())
    found = []
    with Run(folder, ckpt.State(model=model, optim=optim, data=loader), every=100) as run:
        for step, (x,) in run.steps(until=12):
            model(x).square().mean().backward()
            optim.step()
            optim.zero_grad()
            if evaluated and step % 4 == 3:
                total = torch.zeros(2)
                with run.evaluation() as ev:
                    for _ in ev.batches(range(dist.get_rank() + 1)):
                        total += torch.tensor([float(model.module(torch.rand(4)).square()), 1.0])
                    dist.all_reduce(total)
                found.append(float(total[1]))
    return found


def test_ranks_may_have_different_numbers_of_batches(tmp_path: Path) -> None:
    assert run_ranks(3, train, str(tmp_path / "evaluated"), evaluated=True) == [[6.0, 6.0, 6.0]] * 3
    run_ranks(3, train, str(tmp_path / "plain"), evaluated=False)
    assert differences(step_folder(tmp_path / "evaluated", 12), step_folder(tmp_path / "plain", 12)) == []


def stopped_in_evaluation(folder: str) -> tuple[int, int, object]:
    """Rank 1 gets the signal at its item 5; each item holds a collective, so the ranks must end at the same one."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    items = 0
    try:
        with Run(folder, ckpt.State(n=1), every=100) as run:
            for step, _ in run.steps(until=10):
                if step == 3:
                    with run.evaluation() as ev:
                        for n in ev.batches(range(1000)):
                            items += 1
                            dist.all_reduce(torch.ones(1))
                            if n == 5 and dist.get_rank() == 1:
                                os.kill(os.getpid(), signal.SIGTERM)
                        dist.all_reduce(torch.ones(1))
    except SystemExit as left:
        return items, run.step, left.code
    return items, run.step, None


def test_a_stop_ends_an_evaluation_on_all_ranks_at_the_same_item(tmp_path: Path) -> None:
    results = run_ranks(3, stopped_in_evaluation, str(tmp_path))
    assert results == [(6, 4, 75)] * 3
    assert [p.name[:12] for p in (tmp_path / "commits").iterdir()] == [f"{4:012d}"]


def evaluated_by_rank_0_alone(folder: str, polls: int) -> str:
    try:
        with Run(folder, ckpt.State(n=1), every=100) as run:
            for step, _ in run.steps(until=1000):
                if step == 3 and dist.get_rank() == 0:
                    with run.evaluation() as ev:
                        for _ in ev.batches(range(polls)):
                            pass
    except CkptError as error:
        return type(error).__name__ + ": " + error.message
    return "no error"


@pytest.mark.parametrize("polls", [0, 5])
def test_an_evaluation_that_only_one_rank_enters_is_named_and_no_hang(tmp_path: Path, polls: int) -> None:
    first, second = run_ranks(2, evaluated_by_rank_0_alone, str(tmp_path), polls)
    assert first.startswith("Refused: ranks do not keep step: one has taken")
    assert second.split(":")[0] in ("Refused", "RankFailed")


def takes_more(folder: str) -> tuple[str, int]:
    data = TensorDataset(torch.arange(64))
    loader = DataLoader(data, batch_sampler=ElasticSampler(data, 2))
    run = Run(folder, ckpt.State(data=loader), every=100)
    try:
        with run:
            for step in run.steps(until=10):
                if step.number == 4 and dist.get_rank() == 1:
                    step.next_batch()
    except (Refused, RankFailed) as error:
        return error.message, run.step
    return "no error", run.step


def test_a_rank_that_takes_more_batches_than_another_is_named(tmp_path: Path) -> None:
    for message, step in run_ranks(2, takes_more, str(tmp_path)):
        taken = re.search(r"one has taken (\d+) batches and evaluations, another (\d+)", message)
        assert taken, message
        assert int(taken[1]) == int(taken[2]) + 1
        assert 5 <= step <= 10
    assert not tmp_path.joinpath("commits").exists()


def stopped_in_a_long_step(folder: str) -> tuple[int, object]:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with Run(folder, ckpt.State(n=1), every=100) as run:
            for step, _ in run.steps(until=10):
                if step == 2 and dist.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1.05)
    except SystemExit as left:
        return run.step, left.code
    return run.step, None


def test_in_long_steps_a_stop_comes_through_at_the_end_of_the_very_step(tmp_path: Path) -> None:
    assert run_ranks(2, stopped_in_a_long_step, str(tmp_path)) == [(3, 75)] * 2


def leaves_early(folder: str, how: str) -> tuple[str, float]:
    """At most 10 items; one rank has 10, the other 11: the one is at its end, the other breaks."""
    total = torch.zeros(1)
    try:
        with Run(folder, ckpt.State(n=1), every=100) as run:
            for step, _ in run.steps(until=8):
                if step in (2, 3):
                    items = range(10 + dist.get_rank())
                    with run.evaluation() as ev:
                        if how == "break":
                            for n, _ in enumerate(ev.batches(items)):
                                if n == 10:
                                    break
                        elif how == "zip":
                            for _ in zip(range(10), ev.batches(items), strict=False):
                                pass
                        else:  # two sets, the first of them left early
                            for n in ev.batches(items):
                                if n == 4:
                                    break
                            for _ in ev.batches(items):
                                pass
                        dist.all_reduce(total.add_(1))
    except CkptError as error:
        return error.message, 0.0
    return "ok", float(total)


@pytest.mark.parametrize("how", ["break", "zip", "two sets"])
def test_leaving_early_is_no_offence(tmp_path: Path, how: str) -> None:
    assert run_ranks(2, leaves_early, str(tmp_path), how) == [("ok", 6.0)] * 2


def catches(folder: str) -> str:
    """Rank 1 goes on after an error of its own within the evaluation, as if nothing had been."""
    try:
        with Run(folder, ckpt.State(n=1), every=100) as run:
            for step, _ in run.steps(until=1000):
                if step == 3:
                    with contextlib.suppress(ZeroDivisionError), run.evaluation() as ev:
                        for n in ev.batches(range(5)):
                            if n == 2 and dist.get_rank() == 1:
                                raise ZeroDivisionError
    except CkptError as error:
        return error.message
    return "no error"


def test_a_rank_that_goes_on_after_an_error_in_it_is_named_and_no_hang(tmp_path: Path) -> None:
    said = run_ranks(2, catches, str(tmp_path))
    assert any("ranks do not keep step" in text for text in said)
    assert "no error" not in said


def saves_after(folder: str) -> None:
    with Run(folder, ckpt.State(n=1), every=1000) as run:
        for step, _ in run.steps(until=30):
            time.sleep(0.005)
            if step % 7 == 6:
                with run.evaluation() as ev:
                    list(ev.batches(range(3)))
                run.metric(val_loss=1.0 / step)
                run.save()


def test_a_save_asked_for_after_an_evaluation_is_of_that_very_step(tmp_path: Path) -> None:
    run_ranks(2, saves_after, str(tmp_path))
    assert sorted(int(p.name[:12]) for p in (tmp_path / "commits").iterdir()) == [7, 14, 21, 28, 30]


def becomes_long(folder: str, first: int) -> int:
    """Steps of 2 ms, then of 1.1 s, in the first of which the signal comes: how many more there are."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with Run(folder, ckpt.State(n=1), every=10_000) as run:
            for step, _ in run.steps(until=100):
                if step == first and dist.get_rank() == 0:
                    os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.002 if step < first else 1.1)
                dist.barrier()
    except SystemExit:
        pass
    return run.step - first


@pytest.mark.parametrize("first", [20, 21, 22, 23])
def test_steps_that_become_long_do_not_hold_a_stop_up_for_many(tmp_path: Path, first: int) -> None:
    assert all(n <= 5 for n in run_ranks(2, becomes_long, str(tmp_path), first))


def one_bad_save(folder: str) -> list[str]:
    """The save of step 3 fails; that of step 12 is good, and takes longer than a moment's patience."""
    put, patience = LocalStore.put, saves.GRACE_S

    def bad(self: LocalStore, key: str, *rest: object) -> object:
        if key.startswith("steps/000000000003"):
            raise StorageError("503 slow down")
        if key.startswith("steps/") and "manifest" in key:
            time.sleep(1.0)
        return put(self, key, *rest)  # type: ignore[arg-type]

    LocalStore.put, saves.GRACE_S = bad, 0.3  # type: ignore[assignment]
    told = []
    try:
        with Run(folder, ckpt.State(n=1), every=At3And12()) as run:
            for _ in run.steps(until=26):
                time.sleep(0.012)
    finally:
        LocalStore.put, saves.GRACE_S = put, patience  # type: ignore[method-assign]
    for event in read(open_store(folder)).events:
        if event.kind in ("save_failed", "save_committed") and event.rank == dist.get_rank():
            told.append(f"{event.kind} {event.step}")
    return told


class At3And12(Cadence):
    def at(self, step: int) -> bool:
        return step in (3, 12)


def test_a_failed_save_is_no_failure_of_the_next(tmp_path: Path) -> None:
    for told in run_ranks(2, one_bad_save, str(tmp_path)):
        assert told == ["save_failed 3", "save_committed 12", "save_committed 26"]
