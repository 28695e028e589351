from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from ckpt.errors import Mismatch, Refused
from elastic.data import ElasticSampler, sample_at

sizes = st.integers(1, 300) | st.sampled_from([2**k + d for k in range(2, 13) for d in (-1, 0, 1)])
seeds = st.integers(-(2**63), 2**64 - 1)


def epoch(seed: int, size: int, n: int) -> list[int]:
    return [int(x) for x in sample_at(seed, size, np.arange(n * size, (n + 1) * size))]


@given(seed=seeds, size=sizes, n=st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(seed: int, size: int, n: int) -> None:
    assert sorted(epoch(seed, size, n)) == list(range(size))


@given(seed=seeds, size=st.integers(30, 300), n=st.integers(0, 10**6))
def test_epochs_and_seeds_are_shuffled_differently(seed: int, size: int, n: int) -> None:
    orders = [epoch(seed, size, n), epoch(seed, size, n + 1), epoch(seed + 1, size, n), list(range(size))]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert sum(x == y for x, y in zip(a, b, strict=True)) < size / 3


def test_the_order_never_changes() -> None:
    """Checkpoints hold a position in this order: other numbers here would repeat and skip samples after a resume."""
    assert epoch(0, 10, 0) == [0, 2, 7, 1, 4, 5, 6, 3, 9, 8]
    assert epoch(0, 10, 1) == [0, 5, 6, 9, 1, 7, 2, 3, 4, 8]
    assert epoch(-1, 10, 0) == epoch(2**64 - 1, 10, 0)
    far = np.arange(10**15, 10**15 + 5)
    assert sample_at(7, 10**12, far).tolist() == [43389341315, 928154982644, 5854975434, 361619731567, 465960227917]
    assert sample_at(123, 1000, np.arange(6)).tolist() == [655, 705, 760, 744, 484, 774]


@pytest.mark.parametrize("size", [5, 8, 17, 64])
def test_every_sample_is_as_likely_in_every_place(size: int) -> None:
    epochs = 4000
    orders = sample_at(1, size, np.arange(size * epochs)).reshape(epochs, size)
    seen = np.stack([np.bincount(orders[:, place], minlength=size) for place in range(size)])
    chi2 = float(((seen - epochs / size) ** 2 / (epochs / size)).sum())
    freedom = (size - 1) ** 2
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


@settings(deadline=None)
@given(data=st.data(), size=st.integers(1, 60), batch=st.sampled_from([4, 12, 60]), seed=st.integers(0, 99))
def test_each_sample_comes_once_an_epoch_whatever_the_ranks_do(data: Any, size: int, batch: int, seed: int) -> None:
    """A run of several starts, each on another number of ranks, taken up from the saved state each time."""
    saved = ElasticSampler(size, batch, seed=seed).state_dict()
    trained: list[int] = []
    for _ in range(data.draw(st.integers(1, 4))):
        world, steps = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(0, 5))
        ranks = [ElasticSampler(size, batch) for _ in range(world)]
        for sampler in ranks:
            sampler.load_state_dict(saved)
        streams = [sampler.share(rank, world) for rank, sampler in enumerate(ranks)]
        for _ in range(steps):
            trained += [sample for stream in streams for sample in next(stream)]
            for sampler in ranks:
                sampler.advance()
        for stream in streams:  # fetched ahead, but never trained on
            list(islice(stream, 3))
        saved = ranks[0].state_dict()
        assert all(sampler.state_dict() == saved for sampler in ranks)
    assert saved["position"] == len(trained)
    whole = len(trained) // size
    assert ElasticSampler(size, batch).epoch == 0
    assert Counter(trained[: whole * size]) == dict.fromkeys(range(size), whole) if whole else True
    assert max(Counter(trained[whole * size :]).values(), default=0) <= 1
    assert trained == sample_at(seed, size, np.arange(len(trained))).tolist()


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, n: int) -> int:
        return n


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetching_does_not_move_the_position(workers: int) -> None:
    sampler = ElasticSampler(Numbers(), 8, seed=3)
    loader: DataLoader[int] = DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers)
    got = [batch.tolist() for batch in islice(iter(loader), 5)]
    assert sampler.position == 0
    assert got == sample_at(3, 100, np.arange(40).reshape(5, 8)).tolist()
    sampler.advance(2)
    assert next(iter(loader)).tolist() == got[2]


def test_iterating_never_moves_the_position() -> None:
    sampler = ElasticSampler(100, 8)
    for _ in islice(sampler, 2000):
        assert sampler.position == 0


def test_position_and_epoch() -> None:
    sampler = ElasticSampler(10, 4)
    assert (sampler.position, sampler.epoch) == (0, 0)
    sampler.advance(5)
    assert (sampler.position, sampler.epoch) == (20, 2)


def test_a_batch_that_ranks_cannot_share_is_refused_with_what_works() -> None:
    with pytest.raises(Refused, match="a batch of 12 samples cannot be shared evenly by 5 ranks") as caught:
        next(ElasticSampler(100, 12).share(0, 5))
    assert caught.value.hint == (
        "use 1, 2, 3, 4, 6 or 12 ranks, or a batch of 10 or 15, or micro=…, which weighs uneven shares"
    )
    with pytest.raises(Refused) as caught:
        next(ElasticSampler(100, 3).share(0, 4))
    assert caught.value.hint == "use 1 or 3 ranks, or a batch of 4, or micro=…, which weighs uneven shares"
    with pytest.raises(Refused, match="0 samples"):
        ElasticSampler(0, 1)


def test_a_position_counted_on_other_data_is_refused() -> None:
    state = ElasticSampler(100, 10, seed=5).state_dict()
    assert state == {"seed": 5, "size": 100, "batch": 10, "position": 0}
    for other, saved, here in ((ElasticSampler(101, 10), "100", "101"), (ElasticSampler(100, 20), "10", "20")):
        with pytest.raises(Mismatch) as caught:
            other.load_state_dict(state)
        assert caught.value.facts == [("saved", f"{saved} samples"), ("here", f"{here} samples")]
        assert other.state_dict()["position"] == 0


def test_state_is_plain_data_that_a_step_can_hold() -> None:
    sampler = ElasticSampler(torch.zeros(7), 2)
    assert {type(v) for v in sampler.state_dict().values()} == {int}


def test_a_batch_of_each_rank_scales_with_the_ranks_and_loses_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = ElasticSampler(60, 5, seed=3, per_rank=True)
    seen: list[int] = []
    for world, steps in ((4, 3), (2, 4), (1, 5), (3, 4)):
        monkeypatch.setattr("elastic.data.rank_and_world", lambda world=world: (0, world))
        assert sampler.global_batch == 5 * world
        again = ElasticSampler(60, 5, per_rank=True)
        again.load_state_dict(sampler.state_dict())
        sampler = again
        for _ in range(steps):
            seen += [i for rank in range(world) for i in next(sampler.share(rank, world))]
            sampler.advance()
    assert sampler.position == len(seen) == 60 + 40 + 25 + 60
    assert seen == sample_at(3, 60, np.arange(len(seen))).tolist()
    assert sorted(seen[:60]) == sorted(seen[60:120]) == list(range(60))


def test_a_batch_of_each_rank_is_no_batch_of_all() -> None:
    saved = ElasticSampler(60, 5, per_rank=True).state_dict()
    with pytest.raises(Mismatch, match="one of each rank here, or the other way"):
        ElasticSampler(60, 5).load_state_dict(saved)
    with pytest.raises(Mismatch, match="one of each rank"):
        ElasticSampler(60, 5, per_rank=True).load_state_dict(ElasticSampler(60, 5).state_dict())
