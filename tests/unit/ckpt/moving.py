"""A small job, what it leaves behind with plain DCP, and whether two states are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpt


class Job:
    """A model, optimizer and scheduler that have trained one step."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 4))
        self.model[2].weight = torch.nn.Parameter(self.model[2].weight.detach().t().contiguous().t())
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.sched = torch.optim.lr_scheduler.StepLR(self.optim, 2)
        self.step()

    def step(self) -> None:
        self.model(torch.ones(2, 4)).square().sum().backward()
        self.optim.step()
        self.optim.zero_grad()
        self.sched.step()

    def save_plain(self, folder: Path) -> Path:
        """As such jobs do it, with DCP's own helpers."""
        model, optim = get_state_dict(self.model, self.optim)
        state = {"model": model, "optim": optim, "sched": self.sched.state_dict(), "step": 7}
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        return folder

    def state(self, **more: Any) -> ckpt.State:
        return ckpt.State(model=self.model, optim=self.optim, sched=self.sched, **more)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
