"""What bits that do not depend on the number of ranks cost: a step beside DDP's, two ranks, ABAB, medians of five.

``python -m tests.bench.logical_shards`` prints milliseconds a step and ratios; the model's gradients are 13 MiB.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elastic
from tests.ranks import run_ranks

STEPS, ROUNDS, BATCH = 6, 5, 32


def build() -> nn.Module:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Linear(64, 256), nn.TransformerEncoder(layer, 4), nn.Linear(256, 64))


def measure() -> dict[str, list[float]]:
    """Seconds a step of each way and round; on every rank."""
    torch.set_num_threads(1)
    data = torch.randn(BATCH // 2, 8, 64)
    model = build()
    ddp = DistributedDataParallel(build())
    ways = {"DDP": 0, "2 shards": 2, "4 shards": 4, "8 shards": 8}
    bits = {k: elastic.LogicalShards(model, shards=n) for k, n in ways.items() if n}
    optims = {k: torch.optim.AdamW((ddp if k == "DDP" else model).parameters()) for k in ways}
    seconds: dict[str, list[float]] = {k: [] for k in ways}
    for round_ in range(ROUNDS + 1):
        for way in ways:
            began = time.perf_counter()
            for step in range(STEPS):
                if way == "DDP":
                    optims[way].zero_grad()
                    ddp(data).square().mean().backward()
                else:
                    for part in bits[way].parts(step, data):
                        bits[way].backward(model(part).square().mean())
                    bits[way].reduce()
                optims[way].step()
            if round_:  # the first one warms up
                seconds[way].append((time.perf_counter() - began) / STEPS)
    return seconds


def main() -> None:
    """Print the table; a step is as slow as its slowest rank."""
    ranks = run_ranks(2, measure)
    base = statistics.median(max(r["DDP"][n] for r in ranks) for n in range(ROUNDS))
    for way in ranks[0]:
        each = [max(r[way][n] for r in ranks) for n in range(ROUNDS)]
        mid = statistics.median(each)
        print(
            f"{way:<10} {mid * 1e3:7.1f} ms a step ({min(each) * 1e3:.1f}–{max(each) * 1e3:.1f}), {mid / base:.2f}x DDP"
        )


if __name__ == "__main__":
    main()
