"""From the death of a rank to the first new step: ``elastic launch`` against torchrun, in turn, on this machine.

    python -m tests.bench.recovery_time --ranks 2 --rounds 10 --out out/launch/recovery.jsonl
    python -m tests.bench.recovery_time --show out/launch/recovery.jsonl

Contenders: ``ours``: elastic launch; ``init``: torchrun with elastic.init and elastic.Run; ``workaround``: torchrun,
``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` and plain DCP; ``stock``: torchrun and plain DCP as they come. A line for each
run is appended at once, so a campaign may be stopped and taken up again.

Phases, in seconds: detect (fault to the launcher's word; only ours tells), stop (until no old rank lives), rendezvous
(until the first new rank is a process), spawn (until all new ranks run their first line), import, meet (process group),
load, step (until every rank has done a step; for ``first`` until one has).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.dist.launch import ROOT, Job, torchrun

WORKER = ROOT / "tests" / "bench" / "recovery_worker.py"
CONTENDERS = ("ours", "init", "workaround", "stock")
PHASES = ("detect", "stop", "rendezvous", "spawn", "import", "meet", "load", "step")
STEPS = 100_000


def ours(script: Path, *args: str, nproc: int, log: Path, restarts: int = 3, more: tuple[str, ...] = ()) -> Job:
    """A job under ``elastic launch``, its events beside ``log``."""
    command = [sys.executable, "-m", "elastic.cli", "launch", "--nproc-per-node", str(nproc), "--max-restarts",
               str(restarts), "--events", str(log.with_suffix(".events")), *more, str(script), *args]  # fmt: skip
    return Job(command, log=log, output=log.with_suffix(".out"), env={})


def start(contender: str, folder: Path, ranks: int) -> Job:
    """One contender's job."""
    log = folder / "log"
    mode = "elastic" if contender in ("ours", "init") else "dcp"
    args = (mode, str(folder / "run"), str(STEPS), str(log))
    if contender == "ours":
        return ours(WORKER, *args, nproc=ranks, log=log)
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if contender == "workaround" else {}
    return torchrun(WORKER, *args, nproc=ranks, log=log, max_restarts=3, env=env)


def measure(contender: str, ranks: int, seed: int, number: int, patience_s: float) -> dict[str, Any]:
    """One kill, or stop (``number``) of a random rank after a save; seconds by phase."""
    with tempfile.TemporaryDirectory() as name, start(contender, Path(name), ranks) as job:
        lines = job.until(lambda ls: min(_steps(ls, ranks)) >= 110, 90)
        pids = {x["rank"]: x["pid"] for x in lines}
        victim = random.Random(seed).randrange(ranks)
        struck = time.monotonic()
        os.kill(pids[victim], number)
        result: dict[str, Any] = {"contender": contender, "ranks": ranks, "victim": victim, "signal": number}
        old = set(pids.values())
        gone = born = None
        news: list[dict[str, Any]] = []
        while time.monotonic() - struck < patience_s and job.process.poll() is None:
            alive = {p for p in old if psutil.pid_exists(p) and _alive(p)}
            if gone is None and not alive:
                gone = time.monotonic() - struck
            news = [x for x in job.lines() if x["pid"] not in old]
            if {x["rank"] for x in news if x["event"] == "step"} == set(range(ranks)):
                break
            time.sleep(0.002)
        marks = {event: _last_first(news, event, ranks) for event in ("start", "imported", "met", "loaded", "step")}
        if marks["step"] is None:
            return {**result, "recovered": False, "waited_s": time.monotonic() - struck}
        events = job.log.with_suffix(".events")
        told = [json.loads(x) for x in events.read_text().splitlines()] if events.exists() else []
        at = {x["event"]: x["mono"] - struck for x in told if x["mono"] > struck and x["event"] != "failure"}
        detect = min((x["mono"] - struck for x in told if x["mono"] > struck and x["event"] == "failure"), default=None)
        stopped = at.get("stopped", gone or 0.0)
        generation = {x["pid"]: psutil.Process(x["pid"]).create_time() for x in news if psutil.pid_exists(x["pid"])}
        born = min(generation.values()) - time.time() + time.monotonic() - struck
        rendezvous = at.get("rendezvous", born)
        times = [detect, stopped, rendezvous, *(m - struck for m in marks.values() if m is not None)]
        spans = dict(zip(PHASES, _differences(times), strict=True))
        first = min(x["mono"] for x in news if x["event"] == "step") - struck
        return {**result, "recovered": True, "first_s": first, "all_s": times[-1], **spans}


def _differences(times: list[float | None]) -> list[float | None]:
    out, last = [], 0.0
    for t in times:
        out.append(None if t is None else t - last)
        last = last if t is None else t
    return out


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _steps(lines: list[dict[str, Any]], ranks: int) -> list[int]:
    done = dict.fromkeys(range(ranks), -1)
    for x in lines:
        if x["event"] == "step":
            done[x["rank"]] = x["step"]
    return list(done.values())


def _last_first(lines: list[dict[str, Any]], event: str, ranks: int) -> float | None:
    """When the last rank came to an event for the first time; None when one did not."""
    first: dict[int, float] = {}
    for x in lines:
        if x["event"] == event:
            first.setdefault(x["rank"], x["mono"])
    return max(first.values()) if len(first) == ranks else None


def show(path: Path) -> str:
    """Medians by contender, ranks and fault."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    said = [f"{'contender':<11}{'ranks':>6}{'fault':>9}{'recovered':>11}{'first':>8}{'worst':>8}"
            + "".join(f"{p:>11}" for p in PHASES)]  # fmt: skip
    groups = sorted({(r["ranks"], r["signal"], CONTENDERS.index(r["contender"])) for r in rows})
    for ranks, number, index in groups:
        mine = [r for r in rows if (r["ranks"], r["signal"], r["contender"]) == (ranks, number, CONTENDERS[index])]
        good = [r for r in mine if r["recovered"]]
        firsts = [r["first_s"] for r in good]
        medians = [[r[p] for r in good if r[p] is not None] for p in PHASES]
        said.append(
            f"{CONTENDERS[index]:<11}{ranks:>6}{signal.Signals(number).name[3:]:>9}{f'{len(good)}/{len(mine)}':>11}"
            + (f"{statistics.median(firsts):>8.2f}{max(firsts):>8.2f}" if good else f"{'-':>8}{'-':>8}")
            + "".join(f"{statistics.median(m):>11.3f}" if m else f"{'-':>11}" for m in medians)
        )
    return "\n".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--signal", default="SIGKILL")
    parser.add_argument("--patience", type=float, default=45.0, help="seconds after which a run counts as lost")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "launch" / "recovery.jsonl")
    parser.add_argument("--show", type=Path)
    args = parser.parse_args()
    if args.show is None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        done = len(args.out.read_text().splitlines()) if args.out.exists() else 0
        for n in range(args.rounds):
            for contender in args.contenders.split(","):
                number = signal.Signals[args.signal].value
                result = measure(contender, args.ranks, done + n, number, args.patience)
                with args.out.open("a") as file:
                    file.write(json.dumps({**result, "t": time.time(), "loadavg": os.getloadavg()[0]}) + "\n")
                print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}))
    print(show(args.show or args.out))


if __name__ == "__main__":
    main()
