"""Micro-batches on real ranks under DDP: the gradient is the mean over the global batch, whoever holds what of it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ckpt
import elastic
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist
SIZE, BATCH, STEPS = 24, 8, 9  # three epochs


def train(folder: str, micro: int, until: int) -> tuple[list[float], list[list[int]]]:
    """Weights in the end, and the samples of each step of this rank that counted."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    data = TensorDataset(torch.arange(SIZE), torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(1)).double())
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, batch_sampler=elastic.ElasticSampler(data, BATCH, micro=micro, seed=2))
    state = ckpt.State(model=model, optim=optim, data=loader)
    ddp = DistributedDataParallel(model) if dist.is_initialized() and dist.get_world_size() > 1 else None
    seen: list[list[int]] = []
    with elastic.Run(folder, state, every=100) as run:
        for step in run.steps(until=until):
            seen.append([])
            for m in step.micros:
                ids, x = m.batch
                seen[-1] += ids.tolist() if m.weight else []
                with ddp.no_sync() if ddp is not None and not m.last else contextlib.nullcontext():
                    ((ddp or model)(x).square().mean() * m.weight).backward()
            optim.step()
            optim.zero_grad()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist(), seen


def test_the_gradient_is_exact_and_each_sample_comes_once_at_any_world_size(tmp_path: Path) -> None:
    ((alone, order),) = run_ranks(1, train, str(tmp_path / "1"), BATCH, STEPS)
    for ranks, micro in ((1, 3), (2, 2), (3, 2), (4, 1)):
        results = run_ranks(ranks, train, str(tmp_path / f"{ranks} {micro}"), micro, STEPS)
        for weights, _ in results:
            assert torch.allclose(torch.tensor(weights), torch.tensor(alone), rtol=1e-12, atol=1e-13), (ranks, micro)
        steps = [[i for r in results for i in r[1][n]] for n in range(STEPS)]
        assert steps == order, (ranks, micro)
    for epoch in range(STEPS * BATCH // SIZE):
        per = SIZE // BATCH
        assert sorted(i for s in order[epoch * per : (epoch + 1) * per] for i in s) == list(range(SIZE))


def test_a_run_that_changes_its_size_trains_on_each_sample_once(tmp_path: Path) -> None:
    ((alone, order),) = run_ranks(1, train, str(tmp_path / "control"), BATCH, STEPS)
    steps: list[list[int]] = []
    for ranks, until in ((3, 2), (1, 4), (4, 7), (2, STEPS)):
        results = run_ranks(ranks, train, str(tmp_path / "run"), 2, until)
        steps += [[i for r in results for i in r[1][n]] for n in range(until - len(steps))]
    assert steps == order
    assert torch.allclose(torch.tensor(results[0][0]), torch.tensor(alone), rtol=1e-11, atol=1e-12)
