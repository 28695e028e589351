"""A plain PyTorch script that uses nothing of this project but ``ckpt.open``: its own loop, data, group and stop.

    [torchrun --nproc-per-node N --max-restarts R] plain_ckpt_target.py URL --log-file FILE

It saves while it trains on, resumes by itself, and answers SIGTERM with a last save and status 75.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import signal
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import ckpt

DATA, BATCH, WIDTH = 480, 24, 32


class Position:
    """How many samples were trained on, all ranks together."""

    def __init__(self, seed: int) -> None:
        self.seed, self.taken = seed, 0

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.taken = state["seed"], state["taken"]

    def share(self, rank: int, world: int) -> list[int]:
        """This rank's part of the next global batch; each epoch in an order of its own."""
        each, ids = BATCH // world, []
        for n in range(self.taken + rank * each, self.taken + (rank + 1) * each):
            order = list(range(DATA))
            random.Random(f"{self.seed}/{n // DATA}").shuffle(order)
            ids.append(order[n % DATA])
        return ids


def init_group() -> tuple[int, int]:
    if "RANK" not in os.environ:
        return 0, 1
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # the store of torchrun still holds the addresses of the generation that died: each one gets its own prefix
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    prefix = f"generation-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    dist.init_process_group("gloo", store=dist.PrefixStore(prefix, store), rank=rank, world_size=world)
    return rank, world


def agreed(flag: bool, world: int) -> bool:
    """Whether any rank has been asked to stop: known to all of them after the same step."""
    if world == 1:
        return flag
    t = torch.tensor([int(flag)])
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return bool(t.item())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.03)
    parser.add_argument("--log-file")
    parser.add_argument("--keep", type=int)
    parser.add_argument("--verify-snapshot", action="store_true")
    args = parser.parse_args()
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    torch.set_num_threads(1)
    rank, world = init_group()
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    optim = torch.optim.AdamW(model.parameters(), lr=0.02)
    sched = torch.optim.lr_scheduler.LambdaLR(optim, lambda n: 1 / (1 + 0.05 * n))
    average = copy.deepcopy(model)
    g = torch.Generator().manual_seed(args.seed)
    x, w = torch.randn(DATA, 8, generator=g), torch.randn(8, generator=g)
    y = x @ w
    position = Position(args.seed)
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(args.seed * 1000 + rank)  # dropout and noise differ between ranks

    log = os.open(args.log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if args.log_file else None
    state = ckpt.State(model=model, optim=optim, sched=sched, average=average, data=position)
    keep = ckpt.Latest(args.keep) if args.keep else None
    with ckpt.open(args.url, keep=keep, grace_s=0.0, verify_snapshot=args.verify_snapshot) as store:
        step = store.resume(state).step
        while step < args.steps:
            ids = position.share(rank, world)
            noise = random.random() * 1e-3 + float(np.random.rand()) * 1e-3
            loss = nn.functional.mse_loss(model(x[ids] + noise).squeeze(1), y[ids])
            optim.zero_grad()
            loss.backward()
            if world > 1:
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= world  # type: ignore[operator]
            optim.step()
            sched.step()
            position.taken += BATCH
            step += 1
            with torch.no_grad():
                for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(p, 0.1)
            time.sleep(args.pause)
            line: dict[str, Any] = {"step": step, "rank": rank, "world": world, "loss": loss.item(), "samples": ids,
                                    "pid": os.getpid(), "t": time.time()}  # fmt: skip
            if log is not None:
                os.write(log, (json.dumps(line) + "\n").encode())
            stop = agreed(bool(asked), world)
            if stop or step % args.every == 0 or step == args.steps:
                store.save(step, state)
            if stop:
                store.wait()
                return 75
    if world > 1:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
