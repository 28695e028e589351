"""Time and memory of ``elastic goodput`` on the ledger of a long run; ``python -m tests.bench.ledger_report``.

10,000 steps on 4 ranks with 20 restarts, in the objects that the writer makes: a row at each save and each sign of
life; and again with the worst that can be, a row a step and rank. Prints seconds and peak memory of the whole command,
Python's own start included, and what the ledger takes a step and rank. Ends with 1 where a bound is missed.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from elastic.ledger.events import Event, Metric, SaveCommitted, Steps, encode
from tests.unit.elastic.ledgers import Job, Written

STEPS, RANKS, RESTARTS = 10_000, 4, 20
BOUND_S, BOUND_BYTES = 2.0, 200 << 20


def write(folder: Path, events: Iterable[Event]) -> tuple[int, int]:
    """The ledger in whole objects, as flushes make them; (objects, bytes)."""
    home = folder / "ledger"
    home.mkdir(parents=True)
    by_rank: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in events:
        by_rank[event.epoch, event.rank].append(event)
    objects = size = 0
    for (epoch, rank), said in by_rank.items():
        lines: list[str] = []
        number = 0
        for n, event in enumerate(said):
            lines.append(encode(event) + "\n")
            pulse = rank == 0 and isinstance(event.data, Metric)
            if pulse or isinstance(event.data, SaveCommitted) or n + 1 == len(said) or len(lines) > 2000:
                (home / f"{epoch}-r{rank:05d}-{number:06d}.jsonl").write_text("".join(lines))
                number, objects, size = number + 1, objects + 1, size + sum(map(len, lines))
                lines = []
    return objects, size


def job(*, every_step: bool) -> Job:
    """The run; ``every_step``: a row a step on every rank."""
    kills = [(n * STEPS // (RESTARTS + 1) + 37, n % RANKS) for n in range(1, RESTARTS + 1)]
    return Job(world=RANKS, steps=STEPS, every=50, pulse=1 if every_step else 25, kills=kills, jitter=0.2,
               cpu=(0.3, 0.31, 0.3, 0.42), all_rows=every_step)  # fmt: skip


def report(folder: Path, *more: str) -> tuple[float, int, str]:
    """Seconds and peak bytes of the command, and its output."""
    before = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "elastic.cli", "goodput", str(folder), *more],
                               stdout=subprocess.PIPE, env={**os.environ, "COLUMNS": "80"})  # fmt: skip
    assert process.stdout is not None
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, process.returncode
    scale = 1 if sys.platform == "darwin" else 1024
    return time.monotonic() - before, usage.ru_maxrss * scale, text.decode()


def main() -> int:
    """Print a line a case."""
    missed = 0
    resource.getrusage(resource.RUSAGE_SELF)
    for every_step in (False, True):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            written = Written(job(every_step=every_step))
            trained = sum(e.data.n for e in written.events if isinstance(e.data, Steps))
            objects, size = write(folder, written.events)
            best = min(report(folder) for _ in range(3))
            pages = report(folder, "--json", "--html", str(folder / "page.html"))
            what = "a row a step" if every_step else "rows as written"
            print(f"{what}: {len(written.events):,} lines, {objects:,} objects, {size / 1e6:.1f} MB, "
                  f"{size / trained:.0f} bytes a step and rank; text {best[0]:.2f} s, {best[1] / 2**20:.0f} MiB; "
                  f"JSON and page {pages[0]:.2f} s, {pages[1] / 2**20:.0f} MiB", flush=True)  # fmt: skip
            if not every_step:
                missed += best[0] > BOUND_S or best[1] > BOUND_BYTES
            missed += size / trained > 1000
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
