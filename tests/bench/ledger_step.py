"""What the ledger costs a step of the loop: ``python -m tests.bench.ledger_step``. Microseconds, median of rounds."""

from __future__ import annotations

import sys
import tempfile
import time
from statistics import median

from ckpt.store import open_store
from elastic.ledger.summary import StepTimes
from elastic.ledger.writer import Writer

ROUNDS, STEPS, BOUND_US = 9, 5_000, 50.0


def main() -> int:
    """Print a line; 1 where a step costs more than ``BOUND_US``."""
    with tempfile.TemporaryDirectory() as url:
        writer = Writer(open_store(url), epoch="e00000001", rank=0, world=1, generation=None)
        times = StepTimes()
        times.begin(writer, url, 0)
        took = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            for n in range(STEPS):
                times.begin_body()
                times.add(body_s=0.1 + n * 1e-6, data_s=0.001)
                times.add_boundary(0.0005)
            took.append((time.perf_counter() - began) / STEPS * 1e6)
            row = times.row()
        times.close()
        writer.close()
    assert row is not None
    assert row.times is not None
    print(f"a step: {median(took):.1f} us (least {min(took):.1f}); a row's distribution: {len(row.times)} bytes")
    return int(min(took) > BOUND_US)


if __name__ == "__main__":
    sys.exit(main())
