"""DDP's buckets are the same in every start, so a restart changes no bit; and its private parts are still there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt
from elastic import Run, buckets
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist


class Net(nn.Module):
    """Used in another order than it is built in, as DDP's first lay-out expects it."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.mid = nn.Linear(97, 1), nn.Linear(16, 61), nn.Linear(61, 97)
        self.norm = nn.BatchNorm1d(61)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.tanh(self.mid(self.norm(torch.tanh(self.first(x))))))
        return result


def train(folder: str, stops: list[int], pinned: bool = True, bare: bool = False) -> list[bytes]:
    """A process's worth of starts: each begins with a DDP of its own; the weights in the end."""
    if not pinned:
        buckets.pin.__code__ = (lambda state: []).__code__
    for stop in stops:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Net())
        optim = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        with Run(folder, ckpt.State(model=ddp.module if bare else ddp, optim=optim), every=100) as run:
            for step, _ in run.steps(until=stop):
                g = torch.Generator().manual_seed(1000 * step + dist.get_rank())
                ddp(torch.randn(5, 16, generator=g)).square().mean().backward()
                optim.step()
                optim.zero_grad()
    return [p.detach().numpy().tobytes() for p in ddp.parameters()]


@pytest.mark.parametrize("bare", [False, True])  # State(model=ddp.module) is common, too
def test_a_restart_of_four_ddp_ranks_changes_no_bit(tmp_path: Path, bare: bool) -> None:
    whole = run_ranks(4, train, str(tmp_path / "whole"), [10], bare=bare)
    parts = run_ranks(4, train, str(tmp_path / "parts"), [4, 7, 10], bare=bare)
    assert parts == whole
    assert len({tuple(r) for r in whole}) == 1


def test_without_pinned_buckets_it_would(tmp_path: Path) -> None:
    whole = run_ranks(4, train, str(tmp_path / "whole"), [10], pinned=False)
    parts = run_ranks(4, train, str(tmp_path / "parts"), [4, 7, 10], pinned=False)
    assert parts != whole


def left_alone(kind: str) -> tuple[bool, bool, list[str]]:
    """Whether the lay-out was made, and whether weights, buffers and gradients are as before."""
    torch.manual_seed(0)
    how: dict[str, Any] = {"find_unused_parameters": True} if kind == "unused" else {}
    net = Net()
    optim = torch.optim.AdamW(net.parameters(), lr=0.1)
    if kind == "step in backward":
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(lambda p: optim.step())
    ddp = DistributedDataParallel(net, static_graph=kind == "static", **how)
    if kind == "hook":
        ddp.register_comm_hook(None, lambda state, bucket: torch.futures.Future())  # would never end
    next(net.parameters()).grad = torch.ones_like(next(net.parameters()))
    before = [t.clone() for t in (*net.parameters(), *net.buffers())]
    said = buckets.pin(ckpt.State(model=ddp))
    same = all(torch.equal(a, b) for a, b in zip(before, (*net.parameters(), *net.buffers()), strict=True))
    grads = [p.grad for p in net.parameters()]
    same = same and grads[0] is not None and bool((grads[0] == 1).all()) and grads[1:] == [None] * (len(grads) - 1)
    return ddp._has_rebuilt_buckets, same and ddp.module is net, said


@pytest.mark.parametrize("kind", ["plain", "unused", "static", "hook", "step in backward"])
def test_it_touches_nothing_and_nobody_who_would_remember(kind: str) -> None:
    for laid_out, same, said in run_ranks(2, left_alone, kind):
        assert (laid_out, same) == (kind == "plain", True)
        assert [text.split(": ")[0].partition(" with ")[2] for text in said] == {
            "static": ["a static graph"], "hook": ["a communication hook"], "step in backward": ["hooks on gradients"],
        }.get(kind, [])  # fmt: skip
