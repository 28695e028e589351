"""Gradient accumulation under DDP: the global batch stays what it is, on any number of ranks.

    [torchrun --nproc-per-node N --max-restarts R] examples/train_accumulate.py URL --steps 60

48 samples make a step, at most 8 at a time on a rank: 6 micro-batches on one rank, 3 on two, 2 on three or four. Start
it on another number of ranks and it goes on with the same samples in the same order.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ckpt
import elastic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where checkpoints live")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", default="10 steps", help="when to save: '10 steps', '10m' or 'auto'")
    parser.add_argument("--log-file", help="file to append a JSON line a step to")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    elastic.init()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    x = torch.randn(1000, 16)
    data = TensorDataset(torch.arange(1000), x, x.sin().sum(1, keepdim=True))
    model: nn.Module = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    if world > 1:
        model = DistributedDataParallel(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_sampler=elastic.ElasticSampler(data, 48, micro=8, seed=1))

    state = ckpt.State(model=model, optim=optim, data=loader)
    with elastic.Run(args.url, state, every=args.every) as run:
        for step in run.steps(until=args.steps):
            total, samples = 0.0, []
            for micro in step.micros:
                ids, inputs, targets = micro.batch
                exchange = nullcontext() if micro.last or world == 1 else model.no_sync()
                with exchange:
                    loss = (model(inputs) - targets).square().mean() * micro.weight
                    loss.backward()
                total += loss.item()
                samples += ids.tolist() if micro.weight else []
            optim.step()
            optim.zero_grad()
            run.log(loss=total)
            if args.log_file:
                row = {"step": step.number, "rank": rank, "loss": total, "samples": samples, "pid": os.getpid()}
                with open(args.log_file, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
