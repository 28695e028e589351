"""The small parts of the loop: cadence, stop signals, sums, sources of batches."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from ckpt.errors import Refused
from elastic import ElasticSampler
from elastic.batches import Batches
from elastic.cadence import Auto, EverySeconds, EverySteps, parse_every
from elastic.ledger.events import Metric
from elastic.ledger.summary import Metrics, StepTimes, one
from elastic.stop import StopRequests


@pytest.mark.parametrize(
    ("every", "text"), [(500, "500 steps"), ("500 steps", "500 steps"), ("500", "500 steps"), ("1 step", "1 steps")]
)
def test_cadence_in_steps(every: int | str, text: str) -> None:
    cadence = parse_every(every)
    assert isinstance(cadence, EverySteps)
    assert str(cadence) == text
    assert [n for n in range(1, 1501) if cadence.at(n)] == list(range(cadence.n, 1501, cadence.n))
    assert not cadence.due()


def test_cadence_in_seconds() -> None:
    assert str(parse_every("1h30m")) == "5400 s"
    cadence = parse_every("50ms")
    assert isinstance(cadence, EverySeconds)
    assert not cadence.due()
    time.sleep(0.06)
    assert cadence.due()
    assert not cadence.at(50)
    cadence.began(0.0)
    assert not cadence.due()


def test_what_another_release_has_learned_is_left(caplog: pytest.LogCaptureFixture) -> None:
    cadence = parse_every("auto")
    assert isinstance(cadence, Auto)
    before = cadence.state_dict()
    cadence.load_state_dict({"version": 9, "a": 1e9})
    assert cadence.state_dict() == before
    assert "pacer state of version 9" in caplog.text


def test_automatic_cadence_follows_what_saves_cost() -> None:
    def settled(stall_s: float) -> tuple[float, int]:
        cadence = parse_every("auto", nodes=100)
        assert isinstance(cadence, Auto)
        changes = cadence.changes()
        for _ in range(30):
            cadence.step(60.0)
            cadence.began(stall_s)
            cadence.saved(stall_s, 5.0)
            changes += cadence.changes()
        steps = 0
        while not cadence.due():
            cadence.step(60.0)
            steps += 1
        assert changes[0].was_s is None
        assert all(c.interval_s > 0 and c.inputs["stall_s"] > 0 for c in changes)
        return changes[-1].interval_s, steps

    (short, few), (long, many) = settled(0.5), settled(50.0)
    assert 5 < long / short < 15  # about the root of 100
    assert few < many


@pytest.mark.parametrize("bad", [0, -5, "0 steps", "ten", "0", "-10", "1.5", "0s", True, None, 2.5, ""])
def test_what_is_no_cadence_is_refused(bad: Any) -> None:
    with pytest.raises(Refused, match="every="):
        parse_every(bad)


def test_the_first_signal_is_noted_and_handlers_come_back() -> None:
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)}
    with StopRequests() as stop:
        assert stop.name is None
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.name == "SIGUSR1"
        assert abs(stop.unix_s - time.time()) < 5
    assert {s: signal.getsignal(s) for s in before} == before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before, inside = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with StopRequests():
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [before]


def test_step_times_are_summed_and_start_again() -> None:
    times = StepTimes()
    assert times.row() is None
    for body in (0.5, 0.25, 1.0):
        times.add(body_s=body, data_s=0.125)
        times.add_boundary(0.25)
    row = times.row()
    assert row is not None
    assert (row.n, row.seconds, row.min_s, row.max_s, row.data_s, row.boundary_s) == (3, 1.75, 0.25, 1.0, 0.375, 0.75)
    assert times.row() is None


def test_a_logged_tensor_is_read_a_step_later_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    metrics, loss = Metrics(level=logging.INFO), torch.tensor(2.0)
    with caplog.at_level(logging.INFO, "elastic"):
        metrics.add(0, {"loss": loss, "lr": 0.5})
        loss.zero_()  # reused in place by the training code
        metrics.settle(0)
        assert metrics.rows() == []
        metrics.add(1, {"loss": torch.tensor([4.0], requires_grad=True)})
        metrics.settle(1)
        assert [m.last for m in metrics.rows()] == [2.0, 0.5]
        metrics.add(2, {"loss": 6})
        metrics.settle(3)
    assert metrics.rows() == [Metric(name="loss", last=6.0, n=2, mean=5.0, min=4.0, max=6.0)]
    assert [r.getMessage() for r in caplog.records] == ["step 0  loss=2  lr=0.5", "step 1  loss=4", "step 2  loss=6"]


@pytest.mark.parametrize("bad", [torch.zeros(2), "1.5", None, [1.0]])
def test_only_numbers_are_logged(bad: Any) -> None:
    with pytest.raises(Refused, match="loss"):
        one("loss", bad)


class Walk:
    """An iterable that ends, and can be taken up where it was."""

    def __init__(self, n: int) -> None:
        self.n, self.at = n, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.n:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_source_that_ends_is_begun_again_and_an_empty_one_is_refused() -> None:
    batches = Batches(Walk(3))
    batches.begin()
    assert [batches.next() for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    empty = Batches(Walk(0))
    empty.begin()
    with pytest.raises(Refused, match="data, a Walk, is empty"):
        empty.next()


def test_no_source_gives_no_batch() -> None:
    batches = Batches(None)
    batches.begin()
    batches.advance(1)
    assert batches.next() is None


class Counting(RandomSampler):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_sources_that_would_lose_their_place_are_refused() -> None:
    data = TensorDataset(torch.arange(10))
    with pytest.raises(Refused, match="data is a list whose position cannot be saved") as caught:
        Batches([1, 2])
    assert caught.value.hint is not None
    assert "ElasticSampler" in caught.value.hint
    with pytest.raises(Refused, match="data is a DataLoader whose position cannot be saved"):
        Batches(DataLoader(data, batch_size=2))
    with pytest.raises(Refused, match="Counting counts batches when workers fetch them"):
        Batches(DataLoader(data, batch_size=2, sampler=Counting(data), num_workers=1))
    Batches(DataLoader(data, batch_size=2, sampler=Counting(data)))
    with pytest.raises(Refused, match="data is a int"):
        Batches(5)


def test_a_batch_sampler_passed_as_a_sampler_is_refused() -> None:
    data = TensorDataset(torch.arange(40))
    wrong = DataLoader(data, sampler=ElasticSampler(data, 10), batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="data: ElasticSampler is a batch sampler, but was passed as sampler=") as caught:
        Batches(wrong)
    assert caught.value.hint == "DataLoader(dataset, batch_sampler=elastic.ElasticSampler(dataset, batch))"
    whole = DataLoader(torch.arange(40), sampler=ElasticSampler(data, 10), batch_size=None)  # type: ignore[arg-type,var-annotated]
    batches = Batches(whole)  # a dataset that takes a list of indices: nothing batches the batches again
    batches.begin()
    assert len(batches.next()) == 10


def test_completed_steps_move_the_sampler() -> None:
    sampler = ElasticSampler(10, 2)
    batches = Batches(DataLoader(TensorDataset(torch.arange(10)), batch_sampler=sampler))
    batches.begin()
    batches.next()
    assert sampler.position == 0
    batches.advance(1)
    assert sampler.position == 2
