"""Micro-batches: exact means on any number of ranks, each sample once, the same global batches everywhere."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from ckpt.errors import Refused
from elastic import ElasticSampler, Run


@settings(deadline=None, max_examples=60)
@given(batch=st.integers(1, 40), world=st.integers(1, 9), micro=st.integers(1, 12), size=st.integers(1, 50))
def test_parts_add_up_to_the_global_batch_on_any_world(batch: int, world: int, micro: int, size: int) -> None:
    sampler = ElasticSampler(size, batch, seed=3, micro=micro)
    whole = list(islice(ElasticSampler(size, batch, seed=3).share(0, 1), 3))
    weights = [sampler.weights(r, world) for r in range(world)]
    count = len(weights[0])
    assert all(len(w) == count for w in weights)
    assert sum(map(sum, weights)) / world == pytest.approx(1)
    shares = [list(islice(sampler.share(r, world), 3 * count)) for r in range(world)]
    assert all(1 <= len(part) <= micro for share in shares for part in share)
    for n, meant in enumerate(whole):
        parts = [(p, w) for r in range(world) for p, w in zip(shares[r][n * count :], weights[r], strict=False)]
        assert [i for p, w in parts if w for i in p] == meant
        assert all(w == pytest.approx(len(p) * world / batch) for p, w in parts if w)


def test_the_mean_over_ranks_is_the_mean_over_the_batch() -> None:
    data = torch.randn(30, 4, dtype=torch.float64)
    model = nn.Linear(4, 1).double()
    sampler = ElasticSampler(30, 8, micro=2)

    def gradient(parts: list[tuple[list[int], float]]) -> torch.Tensor:
        model.zero_grad()
        for ids, weight in parts:
            (model(data[ids]).square().mean() * weight).backward()
        assert model.weight.grad is not None
        return model.weight.grad.clone()

    meant = gradient([(next(ElasticSampler(30, 8).share(0, 1)), 1.0)])
    by_rank = [gradient(list(zip(sampler.share(r, 3), sampler.weights(r, 3), strict=False))) for r in range(3)]
    assert torch.allclose(sum(by_rank) / 3, meant, rtol=1e-12)  # type: ignore[arg-type]


def job(folder: Path) -> tuple[Run, ElasticSampler]:
    data = TensorDataset(torch.arange(20))
    sampler = ElasticSampler(data, 8, micro=3)
    return Run(str(folder), ckpt.State(data=DataLoader(data, batch_sampler=sampler)), every=2), sampler


def test_the_loop_hands_out_micro_batches(tmp_path: Path) -> None:
    run, sampler = job(tmp_path)
    seen: list[int] = []
    with run:
        for step in run.steps(until=5):
            parts = list(step.micros)
            assert [m.last for m in parts] == [False, False, True]
            assert sum(weight for _, weight in parts) == pytest.approx(1)
            seen += [int(i) for (ids,), _ in parts for i in ids]
    assert sampler.position == 40
    assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20))


def test_micro_batches_that_are_left_or_taken_for_a_batch_are_refused(tmp_path: Path) -> None:
    def left() -> None:
        with job(tmp_path)[0] as run:
            for step in run.steps(until=5):
                next(step.micros)

    def unpacked() -> None:
        with job(tmp_path)[0] as run:
            for _, _ in run.steps(until=5):
                pass

    with pytest.raises(Refused, match="step 0 took 1 of 3 micro-batches"):
        left()
    with pytest.raises(Refused, match="gives micro-batches, which have weights"):
        unpacked()
    assert not (tmp_path / "commits").exists()
