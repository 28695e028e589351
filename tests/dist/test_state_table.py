"""The rows of what a bitwise resume needs that only several ranks show; the others: ``tests/unit/elastic``."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ckpt
from ckpt.values import value_digest
from elastic.audit import unregistered
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist
STEPS = 3


class Block(nn.Module):
    """Dropout on activations that are sharded under tensor parallelism, whole otherwise; recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.dropout(self.up(x), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) + x


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def fsdp() -> nn.Module:
    model = nn.Sequential(Block(), Block())
    for part in (*model, model):
        fully_shard(part, mesh=mesh())
    return model


def tensor_parallel() -> nn.Module:
    """Each rank drops out its own part of the activations, a plain tensor there."""
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    return parallelize_module(nn.Sequential(Block(), Block()), mesh(), plan)


def sharded_activations() -> nn.Module:
    """The activations in between are DTensors: their dropout draws from the streams of each rank's CPU."""
    plan = {"*.up": ColwiseParallel(use_local_output=False), "*.down": RowwiseParallel()}
    return parallelize_module(nn.Sequential(Block(), Block()), mesh(), plan)


def ddp() -> nn.Module:
    """With statistics of batches, which every rank has of its own batch until the next forward."""
    return DistributedDataParallel(nn.Sequential(Block(), nn.BatchNorm1d(8), nn.Dropout(0.5)))


def build(kind: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, torch.optim.Optimizer, ckpt.State]:
    torch.manual_seed(seed)
    model = kind()
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    for n, seed_all in enumerate((random.seed, np.random.seed, torch.manual_seed)):
        seed_all(100 * seed + 10 * n + dist.get_rank())
    return model, optim, ckpt.State(model=model, optim=optim)


def train(model: nn.Module, optim: torch.optim.Optimizer, same_input: bool) -> list[str]:
    """Digests, a step, of this rank's part of everything after it and of what its streams give next."""
    out = []
    for step in range(STEPS):
        x = torch.rand(4, 8, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank() * (not same_input)))
        model(x).square().mean().backward()
        optim.step()
        optim.zero_grad()
        parts = dict(model.state_dict()) | {
            f"{n} {k}": t for n, s in enumerate(optim.state.values()) for k, t in s.items()
        }
        local = {k: (t.to_local() if isinstance(t, DTensor) else t).detach().clone() for k, t in parts.items()}
        out.append(value_digest({**local, "drawn": [torch.rand(2), random.random(), np.random.rand()]}))
    return out


def saved(url: str, kind: Callable[[], nn.Module]) -> list[str]:
    model, optim, state = build(kind, 1)
    with warnings.catch_warnings():  # that DTensor draws on a CPU without a tracker of its own, which is what is tested
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support", UserWarning)
        train(model, optim, kind is not ddp)
        with ckpt.open(url) as store:
            store.resume(state)
            store.save(STEPS, state).wait()
        return train(model, optim, kind is not ddp)


def resumed(url: str, kind: Callable[[], nn.Module]) -> list[str]:
    model, optim, state = build(kind, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support", UserWarning)
        assert ckpt.open(url).load(state).rng == "restored"
        return train(model, optim, kind is not ddp)


@pytest.mark.parametrize("kind", [fsdp, tensor_parallel, sharded_activations, ddp], ids=lambda f: f.__name__)
def test_dropout_goes_on_at_every_place_of_a_mesh(tmp_path: Path, kind: Callable[[], nn.Module]) -> None:
    want = run_ranks(2, saved, str(tmp_path), kind)
    assert want[0] != want[1]
    assert run_ranks(2, resumed, str(tmp_path), kind) == want


def statistics_of_each_rank() -> list[str]:
    plain = nn.Sequential(Block(), nn.BatchNorm1d(8))
    state = ckpt.State(model=DistributedDataParallel(plain, broadcast_buffers=False))
    return [w for w in unregistered(state, sys._getframe(), log=False) if w.startswith("model")]


def test_buffers_that_stay_different_are_named() -> None:
    text = "model (DistributedDataParallel(broadcast_buffers=False)): of its buffers rank 0's alone are saved"
    assert run_ranks(2, statistics_of_each_rank) == [[text]] * 2


def draw() -> tuple[Any, ...]:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist()


def save_streams(url: str) -> tuple[Any, ...]:
    with ckpt.open(url) as store:
        state = ckpt.State(n=1)
        store.resume(state)
        store.save(7, state).wait()
    return draw()


def load_streams(url: str) -> tuple[str, tuple[Any, ...]]:
    return ckpt.open(url).load(ckpt.State(n=0)).rng, draw()


@pytest.mark.parametrize("now", [1, 2, 3])
def test_every_rank_has_streams_of_its_own_on_any_number_of_ranks(tmp_path: Path, now: int) -> None:
    meant = run_ranks(2, save_streams, str(tmp_path))
    first, second = (run_ranks(now, load_streams, str(tmp_path)) for _ in range(2))
    assert first == second  # no clock, no chance
    if now == 2:
        assert first == [("restored", m) for m in meant]
        return
    assert {how for how, _ in first} == {"derived"}
    for n in range(5):  # python's, numpy's and torch's
        assert len({str(x[n]) for _, x in first} | {str(m[n]) for m in meant}) == now + 2
