"""A small GPT on the source of Python's standard library, byte by byte. It survives being killed at any moment.

    [torchrun --nproc-per-node N --max-restarts R] examples/train_gpt.py URL --steps 200 --every 20

URL is a folder or an object store (``s3://bucket/run``, with ``--option endpoint_url=...`` where needed). Start the
same command again, on any number of ranks that divides the batch, and it goes on from the newest valid step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

import ckpt
import elastic

CONTEXT, WIDTH, HEADS, LAYERS, DROPOUT = 64, 64, 4, 2, 0.1
BATCH, PEAK_LR, WARM_UP = 24, 3e-3, 20  # sequences in the global batch, learning rate, steps


class Text(Dataset[tuple[int, Tensor]]):
    """Windows of CONTEXT + 1 bytes out of the standard library's files, in order of their names."""

    def __init__(self, limit: int = 2_000_000) -> None:
        text = bytearray()
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            if len(text) < limit:
                text += path.read_bytes()
        self.text = torch.frombuffer(text[:limit], dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, n: int) -> tuple[int, Tensor]:
        return n, self.text[n * CONTEXT : (n + 1) * CONTEXT + 1].long()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, text: Tensor) -> Tensor:
        """The loss of telling each byte from those before it."""
        x = self.drop(self.token(text[:, :-1]) + self.place.weight)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


class Log:
    """One JSON line a completed step and rank, each in a single append: what happened, in this program's own words."""

    def __init__(self, path: str | None, rank: int, world: int) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if path else None
        self.rank, self.world = rank, world
        self.write(event="start")

    def write(self, **fields: Any) -> None:
        if self.file is not None:
            row = {**fields, "rank": self.rank, "world": self.world, "pid": os.getpid(), "t": time.time()}
            os.write(self.file, (json.dumps(row) + "\n").encode())


def build(seed: int, steps: int, device: torch.device) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(seed)  # the same weights on every rank
    model: nn.Module = GPT().to(device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for part in (*model.blocks, model):  # type: ignore[misc]
            fully_shard(part, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=PEAK_LR)

    def rate(step: int) -> float:
        if step < WARM_UP:
            return (step + 1) / WARM_UP
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - WARM_UP) / max(1, steps - WARM_UP))))

    return model, optim, torch.optim.lr_scheduler.LambdaLR(optim, rate)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where checkpoints live")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", default="auto", help="20, '20 steps', '10m' or 'auto'")
    parser.add_argument("--keep", type=int, help="how many steps to keep; all without it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-file", help="file to append JSON lines to (torchrun takes a plain --log for its own)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="storage option, as in fsspec"
    )
    args = parser.parse_args()
    args.every = int(args.every) if args.every.isdigit() else args.every
    args.options = dict(option.split("=", 1) for option in args.option)
    return args


def main() -> None:
    args = parse()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what a GPU needs for the next line but one
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    elastic.init()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    log = Log(args.log_file, rank, world)

    text = Text()
    model, optim, sched = build(args.seed, args.steps, device)
    loader = DataLoader(text, batch_sampler=elastic.ElasticSampler(text, BATCH, seed=args.seed))
    random.seed(args.seed + rank)
    np.random.seed(args.seed + rank)
    torch.manual_seed(args.seed + 1 + rank)  # dropout differs between ranks

    state = ckpt.State(model=model, optim=optim, sched=sched, data=loader)
    keep = ckpt.Latest(args.keep) if args.keep else None
    with elastic.Run(args.url, state, every=args.every, keep=keep, storage_options=args.options) as run:
        for step, (samples, batch) in run.steps(until=args.steps):
            loss = model(batch.to(device))
            loss.backward()
            optim.step()
            sched.step()
            optim.zero_grad()
            run.log(loss=loss)
            log.write(step=step, loss=loss.item(), samples=samples.tolist())


if __name__ == "__main__":
    main()
