"""``loaders.py KIND WORKERS URL LOG STEPS [APPROXIMATE]``: trains on what a loader gives, and logs every sample.

``elastic``: an ``ElasticSampler`` over samples that augment themselves in the workers. ``map`` and ``stream``:
torchdata's loader over a list that is shuffled anew each epoch, and over a stream that says where it is.
"""

from __future__ import annotations

import os
import random
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import ckpt
import elastic
from examples.train_gpt import Log

SIZE, BATCH = 48, 4


class Augmented(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, n: int) -> torch.Tensor:
        return torch.tensor([n, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


class Stream(IterableDataset[torch.Tensor]):
    """Numbers up to SIZE, this rank's and worker's share of them, through a shuffle buffer; all of it can be stated."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.buffer: list[int] = []
        self.at, self.rng, self.resumed = 0, random.Random(rank), False

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (self.rank * info.num_workers + info.id, self.world * info.num_workers) if info else (
            self.rank, self.world)  # fmt: skip
        if not self.resumed:
            self.at, self.buffer = 0, []
        self.resumed = False
        while True:
            while len(self.buffer) < 5 and first + self.at * step < SIZE:
                self.buffer.append(first + self.at * step)
                self.at += 1
            if not self.buffer:
                return
            n = self.buffer.pop(self.rng.randrange(len(self.buffer)))
            yield torch.tensor([n, self.rng.random()], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "buffer": list(self.buffer), "rng": self.rng.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.buffer, self.resumed = state["at"], list(state["buffer"]), True
        self.rng.setstate(state["rng"])


def make(kind: str, workers: int, rank: int, world: int) -> Any:
    if kind == "elastic":
        data = elastic.SeededSamples(Augmented(), seed=1)
        return DataLoader(data, batch_sampler=elastic.ElasticSampler(data, BATCH * 2, seed=1), num_workers=workers)
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        if kind == "stream":
            return StatefulDataLoader(Stream(rank, world), batch_size=BATCH, num_workers=workers)
        numbers = [torch.tensor([n], dtype=torch.float64) for n in range(rank, SIZE, world)]
        return StatefulDataLoader(numbers, batch_size=BATCH, num_workers=workers, shuffle=True)


def main() -> None:
    kind, workers, url, log_file, steps, *approximate = sys.argv[1:]
    torch.set_num_threads(1)
    elastic.init()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    log = Log(log_file, rank, world)
    torch.manual_seed(1)
    model = nn.Linear(1, 1, dtype=torch.float64)
    optim = torch.optim.SGD(model.parameters(), lr=1e-3)
    random.seed(2 + rank)
    np.random.seed(2 + rank)
    torch.manual_seed(2 + rank)
    loader = make(kind, int(workers), rank, world)
    state = ckpt.State(model=model, optim=optim, data=ckpt.PerRank(loader, approximate=True) if approximate else loader)
    with elastic.Run(url, state, every=3) as run:
        log.write(event="resumed", at=run.step, inexact=list(run.resumed.inexact))
        for step, batch in run.steps(until=int(steps)):
            noise = torch.rand(()).item()
            loss = (model(batch.mean(0, keepdim=True)[:, :1]) * noise).sum()
            loss.backward()
            for p in model.parameters():
                if world > 1:
                    dist.all_reduce(p.grad)
            optim.step()
            optim.zero_grad()
            time.sleep(float(os.environ.get("STEP_S", "0.02")))
            log.write(step=step, loss=loss.item(), samples=batch.flatten().tolist())


if __name__ == "__main__":
    main()
