"""Evaluation every n steps, which changes nothing in training and ends early when the job is to stop.

    [torchrun --nproc-per-node N --max-restarts R] examples/train_evaluate.py URL --steps 60 --evaluate 10

``elastic compare`` reads the validation loss from the run's ledger.
"""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

import ckpt
import elastic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where checkpoints live")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--evaluate", type=int, default=10, help="after every so many steps")
    parser.add_argument("--every", default="15 steps", help="when to save: '15 steps', '10m' or 'auto'")
    parser.add_argument("--log-file", help="file to append a JSON line a step to")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    elastic.init()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    x = torch.randn(1200, 16)
    data = TensorDataset(torch.arange(1200), x, x.sin().sum(1, keepdim=True))
    train, held_out = Subset(data, range(1000)), Subset(data, range(1000 + rank, 1200, world))
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
    model: nn.Module = DistributedDataParallel(net) if world > 1 else net
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(train, batch_sampler=elastic.ElasticSampler(train, 24, seed=1))
    torch.manual_seed(1 + rank)  # dropout differs between ranks

    state = ckpt.State(model=model, optim=optim, data=loader)
    with elastic.Run(args.url, state, every=args.every) as run:
        for step, (ids, inputs, targets) in run.steps(until=args.steps):
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            run.log(loss=loss)
            if (step + 1) % args.evaluate == 0:
                total = torch.zeros(2)
                with run.evaluation() as ev:
                    for _, x, y in ev.batches(DataLoader(held_out, batch_size=16)):
                        total += torch.tensor([float((net(x) - y).square().sum()), len(x)])
                    if world > 1:
                        dist.all_reduce(total)
                if not ev.stopped:
                    run.metric(val_loss=total[0] / total[1])
            if args.log_file:
                row = {"step": step, "rank": rank, "loss": loss.item(), "samples": ids.tolist(), "pid": os.getpid()}
                with open(args.log_file, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
