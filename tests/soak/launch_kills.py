"""Kills without end: ranks of one ``elastic launch`` job die at random moments, and each time all have to come back.

    nice python -m tests.soak.launch_kills --kills 100 --ranks 2 --out out/launch/kills.jsonl
    python -m tests.soak.launch_kills --show out/launch/kills.jsonl

Every kill (of one rank, of two at once, of the process that starts them) is a line, appended at once: stop it and start
it again, the kills add up. When a job has ended, nothing of it may be left: processes, shared memory, temporary files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.recovery_time import WORKER, ours
from tests.dist.launch import ROOT, Job
from tests.dist.launch_elastic import left_behind, shared_memory

KINDS = ("rank", "rank", "rank", "two ranks", "fork server")
PER_JOB = 10
CACHES = ("torchinductor_", "torchrelay-")  # one a user, kept from job to job on purpose


def leftovers(folder: Path, pids: set[int]) -> list[str]:
    """Temporary files and shared memory of a job whose TMPDIR was ``folder``; those of other jobs do not count."""
    segments = [name for name in shared_memory() if any(str(pid) in name for pid in pids)]
    return sorted([p.name for p in folder.iterdir() if not p.name.startswith(CACHES)] + segments)


def campaign(kills: int, ranks: int, seed: int, out: Path) -> int:
    """One job with up to ``PER_JOB`` kills; how many there were."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        log, temporary = Path(name) / "log", Path(name) / "tmp"
        temporary.mkdir()
        os.environ["TMPDIR"] = str(temporary)  # of the job
        args = ("elastic", str(Path(name) / "run"), "1000000", str(log))
        with ours(WORKER, *args, nproc=ranks, log=log, restarts=1000) as job:
            done = 0
            stepping(job, ranks, set(), 90)
            while done < min(kills, PER_JOB):
                time.sleep(rng.random() * 1.5)
                result = strike(job, ranks, rng)
                done += 1
                if done == min(kills, PER_JOB):
                    job.process.kill() if rng.random() < 0.5 else job.process.terminate()
                    status = job.wait(60)
                    result |= {"ended": status, "left": left_behind(job),
                               "files": leftovers(temporary, {x["pid"] for x in job.lines()})}  # fmt: skip
                append(out, {**result, "ranks": ranks, "seed": seed, "loadavg": os.getloadavg()[0]})
                if not result["recovered"]:
                    append(out, {"output": job.tail("not back")[-3000:]})
                    break
    return done


def strike(job: Job, ranks: int, rng: random.Random) -> dict[str, Any]:
    """One kill, and the way back."""
    lines = job.lines()
    current = {line["rank"]: line["pid"] for line in lines}
    kind = rng.choice(KINDS if ranks > 2 else [k for k in KINDS if k != "two ranks"])
    victims = rng.sample(sorted(current), 2 if kind == "two ranks" else 1)
    began = time.monotonic()
    for rank in victims:
        pid = current[rank]
        if kind == "fork server":
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        with contextlib.suppress(ProcessLookupError):  # the other victim's end has taken it along
            os.kill(pid, signal.SIGKILL)
    first = stepping(job, ranks, {line["pid"] for line in lines}, 60)
    return {"kind": kind, "victims": victims, "recovered": first is not None,
            "first_s": None if first is None else first - began, "t": time.time()}  # fmt: skip


def stepping(job: Job, ranks: int, old: set[int], patience_s: float) -> float | None:
    """When the first of the new ranks did a step, once all have; None when that does not happen in time."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end and job.process.poll() is None:
        new = {x["rank"]: x["mono"] for x in reversed(job.lines()) if x["event"] == "step" and x["pid"] not in old}
        if len(new) == ranks:
            return min(new.values())
        time.sleep(0.01)
    return None


def append(out: Path, line: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


def show(path: Path) -> str:
    """What has accumulated."""
    rows = [r for r in map(json.loads, path.read_text().splitlines()) if "kind" in r]
    said = []
    for ranks, kind in sorted({(r["ranks"], r["kind"]) for r in rows}):
        mine = [r for r in rows if (r["ranks"], r["kind"]) == (ranks, kind)]
        back = sorted(r["first_s"] for r in mine if r["recovered"])
        times = f"median {statistics.median(back):.2f} s, worst {back[-1]:.2f} s" if back else ""
        said.append(f"{ranks} ranks, {kind:<12} {len(back)} of {len(mine)} recovered  {times}")
    ends = [r for r in rows if "left" in r]
    dirty = [r for r in ends if r["left"] or r["files"]]
    said.append(f"{len(ends)} jobs ended, {len(dirty)} left something behind")
    return "\n".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=PER_JOB, help="in this call; they add up in the file")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "launch" / "kills.jsonl")
    parser.add_argument("--show", type=Path)
    args = parser.parse_args()
    if args.show is None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        left = args.kills
        while left > 0:
            seed = len(args.out.read_text().splitlines()) if args.out.exists() else 0
            left -= campaign(left, args.ranks, seed, args.out)
    print(show(args.show or args.out))


if __name__ == "__main__":
    main()
