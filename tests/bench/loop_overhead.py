"""What the loop costs between two steps: ``python -m tests.bench.loop_overhead [STEP_MS [STEPS]]``, 1, 2 and 4 ranks.

Beside a bare loop that does the same work, in one run: time from the end of one body to the beginning of the next, on
the thread that trains, as a mean over all steps but the first ten. Agreement of the ranks, timing, heartbeats, ledger,
logging of a loss and the data position are in it; saves are not.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist

import ckpt
import elastic
from tests.ranks import run_ranks

WARM = 10


def between(url: str, step_s: float, steps: int) -> tuple[list[float], list[float]]:
    """Seconds between bodies: of the run's loop, of a bare loop over the same data."""
    logging.getLogger("elastic").setLevel(logging.WARNING)
    sampler = elastic.ElasticSampler(100_000, 48)
    seen: dict[str, list[float]] = {"run": [], "bare": []}

    def body(which: str, mark: float) -> float:
        seen[which].append(time.perf_counter() - mark)
        time.sleep(step_s)
        if dist.is_initialized():
            dist.barrier()  # as the gradients of a step do
        return time.perf_counter()

    loss = torch.tensor(1.0)
    with elastic.Run(url, ckpt.State(data=sampler), every=10**9) as run:
        mark = time.perf_counter()
        for _ in run.steps(until=steps):
            run.log(loss=loss)
            mark = body("run", mark)
    batches = iter(sampler)
    mark = time.perf_counter()
    for _ in range(steps):
        next(batches)
        mark = body("bare", mark)
    return seen["run"][WARM:], seen["bare"][WARM:]


def main() -> None:
    """Print a row for each number of ranks; the slowest rank counts."""
    step_ms = float(sys.argv[1]) if sys.argv[1:] else 50.0
    steps = int(sys.argv[2]) if sys.argv[2:] else 300
    for world in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_ranks(world, between, folder + "/run", step_ms / 1000, steps, timeout_s=600)
        mean = max(statistics.fmean(run) - statistics.fmean(bare) for run, bare in ranks)
        middle = max(statistics.median(run) for run, _ in ranks)
        print(
            f"{world} ranks, {step_ms:g} ms steps: +{mean * 1e6:.0f} us a step = {mean / step_ms * 1e5:.2f} % "
            f"(median {middle * 1e6:.0f} us)"
        )


if __name__ == "__main__":
    main()
