"""Paused writers with real processes: ``python -m tests.soak.paused_writer [SEEDS]``; goes on where it stopped.

Appends one line a seed to out/soak/paused_writer.jsonl and ends with a count. Exit status 1 if a stale commit won.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.dist.paused_writer import play

OUT = Path("out/soak/paused_writer.jsonl")


def main(seeds: int) -> int:
    """Play every seed that the file does not hold yet."""
    OUT.parent.mkdir(parents=True, exist_ok=True)
    done = {json.loads(line)["seed"] for line in OUT.read_text().splitlines()} if OUT.exists() else set()
    for seed in sorted(set(range(seeds)) - done):
        with tempfile.TemporaryDirectory() as folder:
            result = play(seed, Path(folder))
        with OUT.open("a") as out:
            out.write(json.dumps(asdict(result)) + "\n")
        print(f"seed {seed}: stopped {result.stopped}, {result.stale or 'good'}", flush=True)
    results = [json.loads(line) for line in OUT.read_text().splitlines()]
    bad = [r for r in results if r["stale"]]
    where = Counter(" ".join(r["stopped"].split()[:2]) for r in results)
    print(f"{len(results)} seeds, {len(bad)} violations; stopped {dict(where)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
