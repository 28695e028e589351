"""Kills at random instants: ``python -m tests.soak.restarts [RUNS] [KIND…]``; goes on where it stopped.

For DDP on three ranks, FSDP2 on two and a single process, each seed trains ``tests/dist/loop.py`` under plain torchrun
and kills one rank: while training, in a save, in an evaluation, or in the load of a restart (then that is the second
kill). What is left behind is compared with an undisturbed run, bit for bit. Appends a line a run to
out/soak/restarts.jsonl. Exit status 1 if any run did not come back, or came back different.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.dist.kill_campaign import wrong
from tests.dist.launch import Job, Line, torchrun

OUT = Path("out/soak/restarts.jsonl")
SCRIPT = Path(__file__).parents[1] / "dist" / "loop.py"
KINDS = {"ddp": 3, "fsdp": 2, "single": 1}
PHASES = ("training", "save", "evaluation", "load")
STEPS = 30


def start(kind: str, folder: Path, *, restarts: int = 3, slow_s: float = 0.0) -> Job:
    folder.mkdir(exist_ok=True)
    args = [kind, str(folder), str(STEPS), str(slow_s)]
    return torchrun(SCRIPT, *args, nproc=KINDS[kind], log=folder / "log", max_restarts=restarts)


def saving(run: Path) -> bool:
    """Whether an attempt is on the disk that is not committed."""
    begun = {f"{a.parent.name}-{a.name}" for a in run.glob("steps/*/*")}
    return bool(begun - {c.stem for c in run.glob("commits/*.json")})


def wait_for(phase: str, job: Job, folder: Path, rng: random.Random) -> None:
    """Until the job is in that phase, in its first generation."""
    at = rng.randrange(4, STEPS - 6)

    def there(lines: list[Line]) -> bool:
        far = any(x.get("step", -1) >= at for x in lines)
        if phase == "save":
            return far and saving(folder / "run")
        if phase == "evaluation":
            return far and lines[-1].get("event") == "evaluating"
        return far

    job.until(there)
    time.sleep(rng.random() * {"training": 0.1, "save": 0.004, "evaluation": 0.09}[phase])


def kill(job: Job, rng: random.Random) -> set[int]:
    """Kill one rank of the newest generation; the pids of all that were there."""
    lines = job.lines()
    newest: dict[int, int] = {x["rank"]: x["pid"] for x in lines}
    os.kill(newest[rng.choice(sorted(newest))], signal.SIGKILL)
    return {x["pid"] for x in lines}


def play(kind: str, phase: str, seed: int, folder: Path, control: Path) -> str:
    """What went wrong; empty for nothing."""
    rng = random.Random(f"{kind} {phase} {seed}")
    with start(kind, folder) as job:
        wait_for("training" if phase == "load" else phase, job, folder, rng)
        old = kill(job, rng)
        if phase == "load":
            job.until(lambda lines: len({x["rank"] for x in lines if x["pid"] not in old}) == KINDS[kind])
            time.sleep(rng.random() * 0.06)
            kill(job, rng)
        if status := job.wait(120):
            return job.tail(f"status {status}")
    return wrong(folder, control, STEPS)


def results(out: Path = OUT) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def controlled(kind: str, root: Path, begin: Callable[..., Job] = start) -> Path:
    """What the job leaves behind when nothing happens."""
    with begin(kind, root / "control", restarts=0) as job:
        assert job.wait(120) == 0, job.tail("the control run failed")
    return root / "control"


def main(runs: int, kinds: list[str]) -> int:
    """Play every seed that the file does not hold yet."""
    OUT.parent.mkdir(parents=True, exist_ok=True)
    done = {(r["kind"], r["seed"]) for r in results()}
    for kind in kinds:
        todo = [s for s in range(runs) if (kind, s) not in done]
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            control = controlled(kind, root) if todo else root
            for seed in todo:
                phase = PHASES[seed % len(PHASES)]
                bad = play(kind, phase, seed, root / str(seed), control)
                with OUT.open("a") as out:
                    out.write(json.dumps({"kind": kind, "phase": phase, "seed": seed, "bad": bad}) + "\n")
                print(f"{kind}, killed in {phase}, seed {seed}: {bad or 'same bits'}", flush=True)
    for kind in KINDS:
        mine = [r for r in results() if r["kind"] == kind]
        print(f"{kind}: {sum(not r['bad'] for r in mine)} of {len(mine)} came back bit for bit")
    return 1 if any(r["bad"] for r in results()) else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, sys.argv[2:] or list(KINDS)))
