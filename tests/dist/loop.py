"""A job for campaigns of kills and stops: ``loop.py KIND FOLDER STEPS [SLOW_S]``, KIND one of ddp, fsdp, single.

Dropout, BatchNorm-free, AdamW; a save every third step; an evaluation of a tenth of a second every fifth. Step 7 takes
SLOW_S longer, as a first compilation would. Its log says when a process starts, restores, evaluates, completes a step.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ckpt
import elastic

WIDTH, BATCH, EVERY, EVALUATE, LONG = 48, 12, 3, 5, 7


class Net(nn.Module):
    """Used in another order than it is built in, so that DDP lays its buckets out anew."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(WIDTH, 1), nn.Linear(16, WIDTH)
        self.mid = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.mid(torch.tanh(self.first(x)))))
        return result


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    if kind == "ddp":
        return DistributedDataParallel(net)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (net.mid, net):
            fully_shard(part, mesh=mesh)
    return net


def main(kind: str, folder: Path, steps: int, slow_s: float) -> None:
    rank = int(os.environ.get("RANK", "0"))
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(**fields: Any) -> None:
        os.write(log, (json.dumps({**fields, "rank": rank, "pid": os.getpid(), "t": time.time()}) + "\n").encode())

    torch.set_num_threads(1)
    elastic.init()
    tell(event="start")
    model = build(kind)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.arange(100), torch.randn(100, 16, generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(data, batch_sampler=elastic.ElasticSampler(data, BATCH, seed=2))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(rank)
    state = ckpt.State(model=model, optim=optim, data=loader)
    with elastic.Run(str(folder / "run"), state, every=EVERY, grace="20s") as run:
        tell(event="restored", at=run.step)
        for step, (ids, x) in run.steps(until=steps):
            noise = 0.01 * (random.random() + np.random.rand())
            loss = (model(x + noise) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            time.sleep(0.015)
            if step == LONG:
                tell(event="long")
                time.sleep(slow_s)
            if step % EVALUATE == EVALUATE - 1:
                tell(event="evaluating")
                total = torch.zeros(1)
                with run.evaluation() as ev:
                    for n in ev.batches(range(5 + rank)):
                        time.sleep(0.02)
                        total += random.random() + n + torch.rand(1)
                    if dist.is_initialized():
                        dist.all_reduce(total)
            tell(step=step, loss=loss.item(), samples=ids.tolist())
    tell(event="end")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]) if len(sys.argv) > 4 else 0.0)
