"""SIGTERMs at random instants: ``python -m tests.soak.stops [RUNS]``; goes on where it stopped.

Each seed trains ``tests/dist/loop.py`` (DDP, FSDP2, a single process in turn) and sends SIGTERM to one rank, to all, or
to torchrun: while training, in a save, in an evaluation, in a step of two seconds. The state has to be saved within the
notice, on all ranks at one step, and the next start has to end like an undisturbed run, bit for bit. Every fifth gets a
notice that is too short (SIGKILL after a tenth of a second, in the long step): the next start has to say that it was
missed. Appends a line a run to out/soak/stops.jsonl.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from ckpt.store import open_store
from elastic.ledger.events import Stopped
from elastic.ledger.reader import read
from tests.dist.kill_campaign import wrong
from tests.dist.launch import Job, Line
from tests.soak.restarts import KINDS, STEPS, controlled, results, start, wait_for

OUT = Path("out/soak/stops.jsonl")
PHASES = ("training", "save", "evaluation", "long")
GRACE_S, LONG_S = 20.0, 2.0


def begin(kind: str, folder: Path, *, restarts: int = 0) -> Job:
    return start(kind, folder, restarts=restarts, slow_s=LONG_S)


def reach(phase: str, job: Job, folder: Path, rng: random.Random) -> None:
    if phase != "long":
        return wait_for(phase, job, folder, rng)
    job.until(lambda lines: lines != [] and lines[-1].get("event") == "long")
    return time.sleep(rng.random())


def ask(job: Job, who: str, lines: list[Line], number: int = signal.SIGTERM) -> None:
    pids = sorted({x["pid"] for x in lines})
    for pid in {"one": pids[-1:], "all": pids, "torchrun": [job.process.pid]}[who]:
        os.kill(pid, number)


def play(kind: str, phase: str, who: str, seed: int, folder: Path, control: Path) -> tuple[str, float]:
    """What went wrong, empty for nothing; seconds from the signal to the end of the job."""
    rng = random.Random(f"{kind} {phase} {seed}")
    with begin(kind, folder) as job:
        reach(phase, job, folder, rng)
        asked = time.monotonic()
        ask(job, who, job.lines())
        job.wait(60)
        took_s = time.monotonic() - asked
        output = job.output.read_text()
    events = read(open_store(str(folder / "run"))).events
    if any(e.kind == "finished" for e in events):  # the signal came after the last step: nothing was left to stop
        return play(kind, phase, who, seed, folder.with_name(folder.name + "-again"), control)
    said = [e for e in events if isinstance(e.data, Stopped)]
    bad = []
    if len({e.rank for e in said}) != KINDS[kind] or len({e.step for e in said}) != 1:
        bad.append(f"stopped: {[(e.rank, e.step) for e in said]}")
    # a rank that somebody else stopped had no notice of its own
    if not any(e.data.in_time for e in said) or any(e.data.in_time is False for e in said):  # type: ignore[union-attr]
        bad.append(f"in time: {[(e.rank, e.data) for e in said]}")
    if who != "torchrun" and output.count("exitcode  : 75") != KINDS[kind]:
        bad.append(f"statuses: {output[-1500:]}")
    if took_s > GRACE_S:
        bad.append(f"took {took_s:.1f} s")
    with begin(kind, folder) as job:
        if status := job.wait(120):
            bad.append(job.tail(f"the next start ended with {status}"))
    return ", ".join([*bad, wrong(folder, control, STEPS)]).strip(", "), took_s


def miss(kind: str, seed: int, folder: Path, control: Path) -> tuple[str, float]:
    """A notice of a tenth of a second in a step of two."""
    with begin(kind, folder) as job:
        reach("long", job, folder, random.Random(seed))
        lines = job.lines()
        ask(job, "all", lines)
        time.sleep(0.1)
        ask(job, "all", lines, signal.SIGKILL)
        job.wait(60)
    with begin(kind, folder) as job:
        status = job.wait(120)
        output = job.output.read_text()
    bad = [] if status == 0 else [f"the next start ended with {status}"]
    if "stop notices missed after step 6: 1" not in output:
        bad.append(f"not reported as missed: {output[-1500:]}")
    return ", ".join([*bad, wrong(folder, control, STEPS)]).strip(", "), 0.1


def main(runs: int) -> int:
    """Play every seed that the file does not hold yet."""
    OUT.parent.mkdir(parents=True, exist_ok=True)
    done = {r["seed"] for r in results(OUT)}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        controls: dict[str, Path] = {}
        for seed in (s for s in range(runs) if s not in done):
            rng = random.Random(seed)
            kind = sorted(KINDS)[seed % 3]
            if kind not in controls:
                (root / kind).mkdir()
                controls[kind] = controlled(kind, root / kind, begin)
            short = seed % 5 == 4
            phase, who = ("long", "all") if short else (rng.choice(PHASES), rng.choice(("one", "all", "torchrun")))
            one = (kind, seed, root / str(seed), controls[kind])
            bad, took_s = miss(*one) if short else play(kind, phase, who, *one[1:])
            row = {"seed": seed, "kind": kind, "phase": phase, "who": who, "short": short, "took_s": took_s, "bad": bad}
            with OUT.open("a") as out:
                out.write(json.dumps(row) + "\n")
            what = "too short a notice" if short else f"SIGTERM to {who}"
            print(f"{kind}, {what} in {phase}, seed {seed}: {bad or f'as it should be, {took_s:.1f} s'}", flush=True)
    for short in (False, True):
        mine = [r for r in results(OUT) if r["short"] is short]
        good = sum(not r["bad"] for r in mine)
        print(f"{good} of {len(mine)} {'missed and said so' if short else 'saved in time'}; "
              f"longest {max((r['took_s'] for r in mine), default=0.0):.1f} s")  # fmt: skip
    return 1 if any(r["bad"] for r in results(OUT)) else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 63))
