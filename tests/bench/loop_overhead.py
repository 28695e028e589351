"""What the loop costs between two steps: ``python -m tests.bench.loop_overhead [STEPS]``, on 1, 2 and 4 ranks.

The body is a real step of training of about 50 ms (a transformer under DDP, AdamW, one thread). Beside a bare loop that
does the same, in one run: time from the end of one body to the beginning of the next, on the thread that trains, as a
mean over all steps but the first ten. Agreement of the ranks, timing, heartbeats, ledger, logging of a loss and the
data position are in it; saves are not.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt
import elastic
from tests.ranks import run_ranks

WARM = 10


def between(url: str, steps: int) -> tuple[list[float], list[float], float]:
    """Seconds between bodies, of the run's loop and of a bare loop over the same data; mean seconds of a body."""
    logging.getLogger("elastic").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    model: nn.Module = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optim = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 64, 128)
    sampler = elastic.ElasticSampler(100_000, 48)
    seen: dict[str, list[float]] = {"run": [], "bare": []}
    bodies: list[float] = []

    def body(which: str, mark: float) -> tuple[float, torch.Tensor]:
        began = time.perf_counter()
        seen[which].append(began - mark)
        loss = model(x).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        end = time.perf_counter()
        bodies.append(end - began)
        return end, loss

    with elastic.Run(url, ckpt.State(model=model, optim=optim, data=sampler), every=10**9) as run:
        mark = time.perf_counter()
        for _ in run.steps(until=steps):
            mark, loss = body("run", mark)
            run.log(loss=loss)
    batches = iter(sampler)
    mark = time.perf_counter()
    for _ in range(steps):
        next(batches)
        mark, loss = body("bare", mark)
        loss.item()
    return seen["run"][WARM:], seen["bare"][WARM:], statistics.fmean(bodies[WARM:])


def main() -> None:
    """Print a row for each number of ranks; the slowest rank counts."""
    steps = int(sys.argv[1]) if sys.argv[1:] else 300
    for world in (1, 2, 4):
        if world > (os.cpu_count() or 1):
            print(f"{world} ranks: not measured, this machine has {os.cpu_count()} cores")
            continue
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_ranks(world, between, folder + "/run", steps, timeout_s=600)
        mean = max(statistics.fmean(run) - statistics.fmean(bare) for run, bare, _ in ranks)
        middle = max(statistics.median(run) - statistics.median(bare) for run, bare, _ in ranks)
        step_s = statistics.fmean(s for _, _, s in ranks)
        print(
            f"{world} ranks, steps of {step_s * 1e3:.0f} ms: +{mean * 1e6:.0f} us a step (median {middle * 1e6:.0f} us)"
            f" = {mean / step_s * 100:.2f} % of it, {mean / 0.05 * 100:.2f} % of 50 ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
