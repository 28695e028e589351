"""What agreeing at every step boundary costs: ``agreement.py [STEP_MS]``; prints a row for 2 and for 4 ranks.

``call`` is the time of take + post on the training thread, ``thread`` the CPU time of it, ``process`` what the whole
process spends more for it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist

from elastic.agreement import Agreement, Flags
from tests.ranks import run_ranks

STEPS = 100


def measure(step_s: float) -> tuple[list[tuple[float, float]], float, float]:
    """Times of the calls, CPU seconds a step with and without them; rank by rank."""
    agreement, calls, cpu = Agreement(), [], []
    for agreed in (False, True):
        dist.barrier()
        began = time.process_time()
        if agreed:
            agreement.post(Flags())
        for _ in range(STEPS):
            time.sleep(step_s)
            if agreed:
                wall, own = time.perf_counter(), time.thread_time()
                agreement.take(Flags())
                agreement.post(Flags())
                calls.append((time.perf_counter() - wall, time.thread_time() - own))
        cpu.append((time.process_time() - began) / STEPS)
    agreement.take(Flags())
    agreement.close()
    return calls, cpu[0], cpu[1]


def main() -> None:
    """Print the table."""
    step_ms = float(sys.argv[1]) if sys.argv[1:] else 50.0
    for world in (2, 4):
        ranks = run_ranks(world, measure, step_ms / 1000)
        wall, own = (sorted(1e6 * call[n] for r in ranks for call in r[0]) for n in (0, 1))
        extra = max(with_ - without for _, without, with_ in ranks) * 1e6
        print(
            f"{world} ranks, {step_ms:g} ms steps: "
            f"call {wall[len(wall) // 2]:.0f} us (p99 {wall[len(wall) * 99 // 100]:.0f}), "
            f"thread {own[len(own) // 2]:.0f} us, process +{extra:.0f} us a step"
        )


if __name__ == "__main__":
    main()
