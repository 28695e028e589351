"""Hangs without end: a random rank hangs in a random way; the right one has to be named, and all have to come back.

nice python -m tests.soak.launch_hangs --hangs 50 --out out/launch/hangs.jsonl
python -m tests.soak.launch_hangs --show out/launch/hangs.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.dist.launch import ROOT
from tests.dist.launch_elastic import elastic_launch, events, left_behind
from tests.soak.launch_kills import append

HOW = ("stop", "gil", "lock", "skip")


def one(rng: random.Random, ranks: int) -> dict[str, Any]:
    """One job with one hang."""
    how, loop = rng.choice(HOW), rng.random() < 0.5
    victim = rng.randrange(1 if how == "skip" else 0, ranks)  # the source of a broadcast waits for nobody
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log"
        args = [how, str(victim), str(log), *([str(Path(name) / "run")] if loop else [])]
        with elastic_launch(ROOT / "tests" / "dist" / "hanging.py", *args, nproc=ranks, log=log) as job:
            status = job.wait(120)
            left = left_behind(job)
        struck = next(x["mono"] for x in job.lines() if x["event"] == "hang")
        hangs = [e for e in events(job) if e["event"] == "hang"]
        after = [x["mono"] for x in job.lines() if hangs and x["mono"] > hangs[0]["mono"] and x["event"] == "step"]
        return {
            "how": how, "loop": loop, "victim": victim, "ranks": ranks, "status": status, "left": left,
            "named": [e["ranks"] for e in hangs], "why": hangs[0]["why"] if hangs else None,
            "right": [e["ranks"] for e in hangs] == [[victim]],
            "found_s": hangs[0]["mono"] - struck if hangs else None, "first_s": min(after) - struck if after else None,
            "output": None if status == 0 and hangs else job.tail("")[-2000:],
        }  # fmt: skip


def show(path: Path) -> str:
    """What has accumulated."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    said = []
    for how in HOW:
        mine = [r for r in rows if r["how"] == how]
        if mine:
            found, first = ([r[k] for r in mine if r[k] is not None] for k in ("found_s", "first_s"))
            said.append(f"{how:<5} {sum(r['right'] for r in mine)} of {len(mine)} named right, "
                        f"{sum(r['status'] == 0 for r in mine)} healed; found after {statistics.median(found):.1f} s "
                        f"(worst {max(found):.1f}), first step after {statistics.median(first):.1f} s "
                        f"(worst {max(first):.1f})")  # fmt: skip
    return "\n".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hangs", type=int, default=5, help="in this call; they add up in the file")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "launch" / "hangs.jsonl")
    parser.add_argument("--show", type=Path)
    args = parser.parse_args()
    if args.show is None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(args.hangs):
            seed = len(args.out.read_text().splitlines()) if args.out.exists() else 0
            result = one(random.Random(seed), args.ranks)
            append(args.out, {**result, "seed": seed, "t": time.time(), "loadavg": os.getloadavg()[0]})
    print(show(args.show or args.out))


if __name__ == "__main__":
    main()
