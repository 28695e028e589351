"""Incremental steps on several ranks: each refers to what any rank wrote, and any number of ranks reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist


def build(seed: int, *, shard: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(12)), nn.Linear(128, 20, bias=False))
    for layer in model[:-1]:
        layer.requires_grad_(False)
    if shard and dist.is_initialized() and dist.get_world_size() > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def train(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    torch.manual_seed(3)
    model(torch.randn(4, 128)).square().mean().backward()
    optim.step()
    optim.zero_grad()


def full(model: nn.Module) -> list[np.ndarray]:
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone().numpy() for p in model.parameters()]


def save_two(url: str) -> tuple[list[int], list[np.ndarray]]:
    model, optim = build(1)
    state = ckpt.State(model=model, optim=optim)
    written = []
    with ckpt.open(url, incremental=True, keep=ckpt.Latest(1), grace_s=0.0) as store:
        store.resume(state)
        for step in (1, 2):
            train(model, optim)
            written.append(store.save(step, state).wait().bytes)
    return written, full(model)


def load_and_go_on(url: str, step: int) -> tuple[str, list[np.ndarray], int]:
    model, optim = build(7)
    state = ckpt.State(model=model, optim=optim)
    with ckpt.open(url, incremental=True) as store:
        proof, found = store.resume(state).proof, full(model)
        train(model, optim)
        return proof, found, store.save(step, state).wait().bytes


def test_saved_on_two_ranks_and_loaded_on_others_after_the_first_step_was_deleted(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    (written, want), _ = run_ranks(2, save_two, url)
    assert written[1] < 0.1 * written[0]
    assert len(list((tmp_path / "run/commits").iterdir())) == 1
    for ranks, step in ((1, 3), (3, 4), (3, 5)):
        results = run_ranks(ranks, load_and_go_on, url, step)
        for proof, found, _ in results:
            assert proof == "16 tensors proven"
            assert all(np.array_equal(a, b) for a, b in zip(want[:-1], found[:-1], strict=True))
        # on another number of ranks the chunks are others, and are written; on as many they are referred to
        again = results[0][2] < 0.15 * written[0]
        assert again == (step == 5), (step, results[0][2], written)
