"""Kills of a random rank under plain torchrun: ``python -m tests.soak.kills [RUNS]``; goes on where it stopped.

At 2 and at 4 ranks, each seed trains the example, kills one rank at a random instant, and compares what is left
behind with an undisturbed run, bit for bit. Appends a line a run to out/soak/kills.jsonl and ends with a count.
Exit status 1 if any run did not come back, or came back different.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

from tests.dist.kill_campaign import kill_one, start, wrong
from tests.soak.restarts import results

OUT = Path("out/soak/kills.jsonl")


def play(nproc: int, seeds: list[int]) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        with start("gpt", root / "control", nproc, restarts=0) as job:
            assert job.wait(300) == 0, job.tail("the control run failed")
        for seed in seeds:
            folder = root / str(seed)
            with start("gpt", folder, nproc, static=seed % 4 == 3) as job:
                seconds = kill_one(job, random.Random(seed), nproc, budget_s=60)
                status = job.wait(120) if seconds is not None else None
            bad = (
                "never came back"
                if seconds is None
                else f"status {status}"
                if status
                else wrong(folder, root / "control")
            )
            with OUT.open("a") as out:
                out.write(json.dumps({"nproc": nproc, "seed": seed, "first_step_s": seconds, "bad": bad}) + "\n")
            print(
                f"{nproc} ranks, seed {seed}: {bad or f'same bits, first new step after {seconds:.2f} s'}", flush=True
            )


def main(runs: int) -> int:
    """Play every seed that the file does not hold yet."""
    OUT.parent.mkdir(parents=True, exist_ok=True)
    done = {(r["nproc"], r["seed"]) for r in results(OUT)}
    for nproc in (2, 4):
        if todo := [s for s in range(runs) if (nproc, s) not in done]:
            play(nproc, todo)
    for nproc in (2, 4):
        mine = [r for r in results(OUT) if r["nproc"] == nproc]
        times = sorted(r["first_step_s"] for r in mine if r["first_step_s"] is not None)
        good = sum(not r["bad"] for r in mine)
        print(f"{nproc} ranks: {good} of {len(mine)} came back bit for bit; median {times[len(times) // 2]:.2f} s")
    return 1 if any(r["bad"] for r in results(OUT)) else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
