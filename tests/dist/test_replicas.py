"""Replicas that differ: refused where they are parameters, rank 0's as a whole where they are buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.errors import Refused

pytestmark = pytest.mark.dist


def diverged(url: str) -> str:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, dist.get_rank() + 1)
    nn.init.constant_(model.bias, 0)
    state = ckpt.State(model=model)
    store = ckpt.open(url)
    store.resume(state)
    with pytest.raises(Refused) as caught:
        store.save(1, state).wait()
    return str(caught.value)


def test_a_diverged_parameter_is_named_and_not_saved(tmp_path: Path) -> None:
    for text in run_ranks(3, diverged, str(tmp_path / "run")):
        assert "model.weight  differs from rank 0 on rank 1, 2" in text
        assert "model.bias" not in text
    assert ckpt.open(str(tmp_path / "run")).newest_valid() is None


def norms(url: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    ddp = DistributedDataParallel(model)
    torch.manual_seed(dist.get_rank())
    ddp(torch.randn(8, 4)).sum().backward()  # running statistics differ between ranks from here on
    own = [b.clone() for b in model.buffers()]
    state = ckpt.State(model=ddp)
    store = ckpt.open(url)
    store.resume(state)
    store.save(1, state).wait()
    ckpt.open(url).load(state)
    return own, [b.clone() for b in model.buffers()]


def test_buffers_come_back_as_rank_0_had_them(tmp_path: Path) -> None:
    results = run_ranks(2, norms, str(tmp_path / "run"))
    (first, _), (second, _) = results
    assert not torch.equal(first[0], second[0])
    for _, restored in results:
        assert all(torch.equal(a, b) for a, b in zip(first, restored, strict=True))


def ranked_names(url: str) -> str:
    state = ckpt.State(rank_offset=dist.get_rank())
    store = ckpt.open(url)
    store.resume(state)
    with pytest.raises(Refused) as caught:
        store.save(1, state).wait()
    return str(caught.value)


def test_a_name_that_begins_with_rank_makes_nothing_per_rank(tmp_path: Path) -> None:
    for text in run_ranks(2, ranked_names, str(tmp_path / "run")):
        assert "rank_offset" in text
