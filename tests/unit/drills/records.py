"""A drill that went well, as a record; tests break one thing of it and look for the check that says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from drills.history import Commit, Record, Run
from drills.scenario import Plan
from drills.timeline import Line, Log, Proc

STEPS, EVERY, KILLED_AFTER, RANKS = 20, 5, 12, 2
KILLED = 1000.0 + KILLED_AFTER + 0.5


def plan(**changes: Any) -> Plan:
    command = ("torchrun", "train.py", "{url}", "--log-file", "{log}")
    return replace(Plan(drill="kill-any-rank", command=command, seed=7, url_base="file:///tmp/x"), **changes)


def line(step: int, rank: int, *, t: float, pid: int = 0) -> Line:
    return Line(
        step=step, rank=rank, world=RANKS, pid=pid or 100 + rank, t=t,
        loss=1 / (step + rank / 10), samples=(step * 10 + rank, step * 10 + rank + 5),
    )  # fmt: skip


def control() -> Run:
    lines = [line(s, r, t=500.0 + s) for s in range(1, STEPS + 1) for r in range(RANKS)]
    return Run(
        name="control", url="file:///tmp/x/control", argv=["train.py"], started=500.0, starts=1, ended=525.0, status=0,
        procs=[Proc(pid=100 + r, rank=r, born=1, started=500.0, ended=524.0) for r in range(RANKS)],
        commits=commits(500.0, range(EVERY, STEPS + 1, EVERY)), left=[], log=Log(tuple(lines)), storage=storage(),
    )  # fmt: skip


def drilled() -> Run:
    """Killed after step 12, back from step 10 with new processes (pids 200, 201)."""
    before = [line(s, r, t=1000.0 + s) for s in range(1, KILLED_AFTER + 1) for r in range(RANKS)]
    after = [line(s, r, t=1010.0 + s, pid=200 + r) for s in range(11, STEPS + 1) for r in range(RANKS)]
    procs = [Proc(pid=100 + r, rank=r, born=1, started=1000.0, ended=KILLED + 0.1 * r) for r in range(RANKS)]
    procs += [Proc(pid=200 + r, rank=r, born=2, started=KILLED + 1 + r, ended=1031.0) for r in range(RANKS)]
    return Run(
        name="drilled", url="file:///tmp/x/drilled", argv=["train.py"], started=1000.0, starts=1, ended=1032.0,
        status=0, procs=procs, commits=[*commits(1000.0, (5, 10)), *commits(1010.0, (15, 20), epoch=2)], left=[],
        log=Log(tuple(before + after)), storage=storage(),
    )  # fmt: skip


def commits(begin: float, steps: Any, epoch: int = 1) -> list[Commit]:
    return [
        Commit(
            step=s, name=f"{s:012d}-e{epoch:08d}-0.json", folder=f"steps/{s:012d}/e{epoch:08d}-0", seen=begin + s + 0.2
        )
        for s in steps
    ]


def storage(**changes: Any) -> dict[str, Any]:
    return {"commits": ["x"], "unnamed": [], "hollow": [], "bytes": 4096, "ledger": [], **changes}


def pair(step: int, *differences: dict[str, Any], epoch: int = 1) -> dict[str, Any]:
    groups = {"model": [4, 0], "optim": [8, 0], "rng": [2, 0], "data": [1, 0]}
    for d in differences:
        groups[d["key"].split(".")[0]][1] += 1
    folder = f"steps/{step:012d}/e{epoch:08d}-0"
    return {
        "step": step, "left": f"file:///tmp/x/control/{folder}", "right": f"file:///tmp/x/drilled/{folder}",
        "error": None, "tensors": 12, "values": 3, "bytes": 2048, "groups": groups,
        "differences": list(differences), "different_keys": [d["key"] for d in differences],
    }  # fmt: skip


def element(key: str) -> dict[str, Any]:
    return {"key": key, "what": "element", "index": [3, 1], "elements": 1, "of": 64, "left": "0.5", "right": "0.25"}


def compared(*pairs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"final": [STEPS, STEPS], "reason": None, "pairs": list(pairs), **changes}


def good(**changes: Any) -> Record:
    """Everything passes."""
    pairs = [pair(5), pair(10), pair(15, epoch=2), pair(20, epoch=2)]
    evidence = {"t": KILLED, "gone_t": KILLED + 0.01, "rank": 0, "pid": 100, "said": "SIGKILL to rank 0 (pid 100)"}
    record = Record(
        folder=Path("/tmp/x"), plan=plan(), started=499.0, ended=1040.0, environment={"python": "3.11"},
        runs={"control": control(), "drilled": drilled()},
        moment={"step": 12, "rank": 0, "lowest": 6, "highest": 18, "last_step": STEPS, "world": RANKS},
        evidence={"kill": evidence}, healed={"kill": "nothing to undo"},
        compared={("control", "drilled"): compared(*pairs)},
    )  # fmt: skip
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def with_lines(record: Record, run: str, change: Any) -> Record:
    """The record with every log line of a run put through ``change``; a line for which it returns None is dropped."""
    r = record.runs[run]
    kept = [new for n in r.log.lines if (new := change(n)) is not None]
    r.log = Log(tuple(kept), r.log.problems)
    return record
