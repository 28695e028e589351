"""What an augmentation draws depends on seed, epoch and sample: not on ranks, micro-batches, workers or the past."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from ckpt.errors import Refused
from elastic import ElasticSampler, SeededSamples, sample_rng

SIZE, BATCH, STEPS = 10, 6, 5  # three epochs


class Noisy(Dataset[torch.Tensor]):
    """Every sample draws from all three streams."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, n: int) -> torch.Tensor:
        return torch.tensor([n, random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(()).item()])


def drawn(world: int, micro: int | None = None, *, at: int = 0, seed: int = 1) -> list[Any]:
    """What the ranks of a world see from a step on, put together by global batch."""
    data, out = SeededSamples(Noisy(), seed), []
    sampler = ElasticSampler(data, BATCH, seed=3, micro=micro)
    sampler.advance(at)
    ranks = [sampler.share(r, world) for r in range(world)]
    weights = [sampler.weights(r, world) for r in range(world)]
    for _ in range(at, STEPS):
        parts = [(next(shares), weight) for shares, ws in zip(ranks, weights, strict=True) for weight in ws]
        rows = [data.__getitems__(part) for part, weight in parts if weight]
        out.append([row.tolist() for part in rows for row in part])
    return out


def test_augmentations_are_the_same_on_any_number_of_ranks() -> None:
    control = drawn(1)
    assert [sorted({int(row[0]) for step in control for row in step})] == [list(range(SIZE))]
    for world, micro in [(2, None), (3, None), (6, None), (4, 1), (5, 2), (1, 4)]:
        random.seed(world), np.random.seed(world), torch.manual_seed(world)
        assert drawn(world, micro) == control


def test_augmentations_after_a_restart_are_those_of_the_undisturbed_run() -> None:
    assert drawn(2, at=2) == drawn(1)[2:]


def test_augmentations_differ_by_sample_epoch_and_seed() -> None:
    rows = [tuple(row) for step in drawn(1) for row in step]
    assert len({row[1] for row in rows}) == BATCH * STEPS == 3 * SIZE
    assert not {row[1] for row in rows} & {row[1] for step in drawn(1, seed=2) for row in step}


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_augmentations_are_the_same_with_any_number_of_workers(workers: int) -> None:
    data = SeededSamples(Noisy(), 1)
    torch.manual_seed(workers)
    batches = iter(DataLoader(data, batch_sampler=ElasticSampler(data, BATCH, seed=3), num_workers=workers))
    assert [next(batches).tolist() for _ in range(STEPS)] == [
        default_collate([torch.tensor(row) for row in step]).tolist() for step in drawn(1)
    ]


def streams() -> tuple[Any, ...]:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


def test_the_streams_of_the_process_are_left_as_they_are() -> None:
    data = SeededSamples(Noisy(), 1)
    shares = ElasticSampler(data, BATCH).share(0, 1)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    random.gauss(0, 1), np.random.randn()  # half of a pair is left over
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    want = streams()
    random.setstate(before[0]), np.random.set_state(before[1]), torch.set_rng_state(before[2])
    data.__getitems__(next(shares))
    data[3]
    with pytest.raises(ZeroDivisionError), sample_rng(1, 2, 3):
        raise ZeroDivisionError
    assert streams() == want


def test_by_hand_a_sample_is_that_of_epoch_0() -> None:
    first = [row for step in drawn(1) for row in step][:SIZE]
    assert SeededSamples(Noisy(), 1)[7].tolist() in first
    with sample_rng(1, 0, 7):
        assert Noisy()[7].tolist() in first


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_does_not_know_the_epoch_is_refused(workers: int) -> None:
    with pytest.raises(Refused, match=r"only elastic\.ElasticSampler says in which epoch"):
        next(iter(DataLoader(SeededSamples(Noisy()), batch_size=2, num_workers=workers)))


def test_what_cannot_be_indexed_is_refused() -> None:
    with pytest.raises(Refused, match="a generator has no length"):
        SeededSamples(x for x in range(3))
