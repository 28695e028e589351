"""Sources of batches that keep their own place: what is saved is what was trained on, also after a step was left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import Refused
from elastic import ElasticSampler, Run
from elastic.batches import Batches


class Walk:
    """A plain iterable that ends, and can say where it is: after what it has handed out."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 5:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def stateful(data: Any, **more: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(data, **{"batch_size": None, **more})


SOURCES = {"iterable": Walk, "torchdata": lambda: stateful([1, 2, 3, 4, 5])}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("kind", SOURCES)
def test_a_step_that_was_left_gets_its_batches_again(tmp_path: Path, kind: str) -> None:
    seen: list[list[int]] = []
    with Run(str(tmp_path), ckpt.State(data=SOURCES[kind]()), every=1) as run:
        for leave_at in (1, 3, 3, 99):
            for step in run.steps(until=5):
                two = [int(step.batch), int(step.next_batch())]
                if step.number == leave_at:
                    break
                seen.append(two)
    assert seen == [[1, 2], [3, 4], [5, 1], [2, 3], [4, 5]]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("kind", SOURCES)
def test_a_source_that_keeps_its_place_goes_on_in_another_process(tmp_path: Path, kind: str) -> None:
    seen: list[int] = []
    for until in (3, 4, 9, 12):  # over the end of an epoch, and from within the next
        with Run(str(tmp_path), ckpt.State(data=SOURCES[kind]()), every=100) as run:
            seen += [int(batch) for _, batch in run.steps(until=until)]
    assert seen == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_sampler_that_counts_trained_steps_is_asked_before_a_loader_that_counts_fetched_ones(tmp_path: Path) -> None:
    data = torch.arange(12)

    def loader() -> Any:
        return stateful(data, batch_size=1, batch_sampler=ElasticSampler(data, 4, seed=1), num_workers=1)

    meant, seen = ElasticSampler(data, 4, seed=1).share(0, 1), list[list[int]]()
    for until in (2, 4):
        source = loader()
        with Run(str(tmp_path), ckpt.State(data=source), every=100) as run:
            seen += [batch.tolist() for _, batch in run.steps(until=until)]
        source._iterator._shutdown_workers()
    assert seen == [next(meant) for _ in range(4)]


def test_a_step_in_place_of_one_that_was_left_takes_all_its_batches(tmp_path: Path) -> None:
    def train() -> None:
        with Run(str(tmp_path), ckpt.State(data=Walk()), every=1) as run:
            for step in run.steps(until=2):
                assert [step.batch, step.next_batch(), step.next_batch()] == [1, 2, 3]
                break
            for step in run.steps(until=2):
                assert step.batch == 1

    with pytest.raises(Refused, match=r"had taken 3 batches, and the one in its place took 1: .* lose 2") as caught:
        train()
    assert caught.value.hint == "take all 3 in that step: step.batch and 2 x step.next_batch()"
    assert not list(tmp_path.glob("commits/*"))


def test_batches_of_a_finished_step_do_not_come_again() -> None:
    batches = Batches(Walk())
    batches.begin()
    assert [batches.next(), batches.next()] == [1, 2]
    batches.advance(2)
    assert batches.next() == 3
    batches.begin()
    assert [batches.next(), batches.next()] == [3, 4]
    batches.begin()
    assert batches.next() == 3
    batches.begin()
    assert [batches.next() for _ in range(3)] == [3, 4, 5]
