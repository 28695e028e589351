"""Three epochs on whatever ranks are there: ``worlds.py MODE FOLDER STEPS``; MODE is shards or micro.

``micro`` keeps the global batch by weighted micro-batches under DDP; ``shards`` keeps every bit by logical shards.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ckpt
import elastic

SIZE, BATCH, SHARDS = 100, 12, 12  # an epoch ends in the middle of a batch


def main(mode: str, folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    elastic.init()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.2 if mode == "shards" else 0.0), nn.Linear(64, 1))
    model = DistributedDataParallel(net) if world > 1 else net
    optim = torch.optim.AdamW(net.parameters(), lr=0.01)
    x = torch.randn(SIZE, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(torch.arange(SIZE), x, x.sin().sum(1, keepdim=True))
    micro = None if mode == "shards" else 3
    loader = DataLoader(data, batch_sampler=elastic.ElasticSampler(data, BATCH, seed=2, micro=micro))
    entries = {"model": net, "optim": optim, "data": loader}
    bits = elastic.LogicalShards(model, shards=SHARDS, seed=4) if mode == "shards" else None
    state = ckpt.State(**entries, **({"bits": bits} if bits else {}))
    with elastic.Run(str(folder / "run"), state, every=3) as run:
        for step in run.steps(until=steps):
            samples, loss = [], 0.0
            if bits:
                for ids, inputs, targets in bits.parts(step.number, step.batch):
                    bits.backward((model(inputs) - targets).square().mean())
                    samples += ids.tolist()
                loss = bits.reduce()
            else:
                for part in step.micros:
                    ids, inputs, targets = part.batch
                    with nullcontext() if part.last or world == 1 else model.no_sync():  # type: ignore[operator]
                        one = (model(inputs) - targets).square().mean() * part.weight
                        one.backward()  # type: ignore[no-untyped-call]
                    loss += one.item() / world
                    samples += ids.tolist() if part.weight else []
            optim.step()
            optim.zero_grad()
            time.sleep(0.02)
            row = {"step": step.number, "rank": rank, "world": world, "loss": loss, "samples": samples}
            os.write(log, (json.dumps({**row, "pid": os.getpid(), "t": time.time()}) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
