"""What happened in a drill: an append-only file of events, and the record that checks and reports are made from.

``history.jsonl`` lies in the run folder beside the logs of the runs; nothing else is needed to judge again.
"""

from __future__ import annotations

import bisect
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from drills.errors import Usage
from drills.scenario import Plan, plan_from_json, plan_to_json
from drills.timeline import Line, Log, Proc, parse_log

FILE = "history.jsonl"
SCHEMA = "drills.history/1"
CONTROL, DRILLED = "control", "drilled"

Listener = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A commit record by its name: step, folder below the run, and when the drill first saw it."""

    step: int
    name: str
    folder: str
    seen: float | None = None


@dataclass(slots=True, kw_only=True)
class Run:
    """One run of the target: what was seen of it from outside. ``status`` is the exit status, None while running.

    ``reads``: how many lines of the log had come by when; ``overtaken``: processes beside which the drill started the
    command again, and ``late`` the lines that they wrote after that start had done a step.
    """

    name: str
    url: str = ""
    argv: list[str] = field(default_factory=list)
    started: float = 0.0
    starts: int = 0
    ended: float | None = None
    status: int | None = None
    stopped: str | None = None
    procs: list[Proc] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    left: list[str] | None = None
    storage: dict[str, Any] | None = None
    said: str = ""
    log: Log = field(default_factory=Log)
    counts_from: int = 1
    reads: list[tuple[int, float]] = field(default_factory=list)
    overtaken: set[int] = field(default_factory=set)
    late: tuple[Line, ...] = ()

    @property
    def seconds(self) -> float | None:
        """From start to end."""
        return None if self.ended is None else self.ended - self.started

    def first_commit(self) -> int | None:
        """The lowest step that was ever committed."""
        return min((c.step for c in self.commits), default=None)

    def newest_commit(self, by: float) -> int | None:
        """The highest step that was committed, as seen up to ``by`` (seconds since 1970)."""
        return max((c.step for c in self.commits if c.seen is not None and c.seen <= by), default=None)


@dataclass(slots=True, kw_only=True)
class Record:
    """A whole drill, replayed from its history."""

    folder: Path
    plan: Plan
    started: float = 0.0
    ended: float | None = None
    environment: dict[str, str] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    moment: dict[str, Any] | None = None
    evidence: dict[str, dict[str, Any]] = field(default_factory=dict)
    healed: dict[str, str] = field(default_factory=dict)
    healed_t: dict[str, float] = field(default_factory=dict)
    held: list[dict[str, Any]] = field(default_factory=list)
    scenario: dict[str, Any] | None = None
    cached_control: str | None = None
    compared: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    broke: list[str] = field(default_factory=list)
    ended_early: str | None = None
    advice: str | None = None

    @property
    def control(self) -> Run | None:
        """The first undisturbed run."""
        return self.runs.get(CONTROL)

    @property
    def drilled(self) -> Run | None:
        """The run in which the faults struck."""
        return self.runs.get(DRILLED)

    def strikes(self) -> list[dict[str, Any]]:
        """Evidence of every strike of the drill itself, in the order of time."""
        return sorted((e for e in self.evidence.values() if "rank" in e), key=lambda e: float(e["t"]))

    def strike(self) -> dict[str, Any] | None:
        """The strike from which the recovery counts: the last that ended processes, else the last of all."""
        found = self.strikes()
        return next((e for e in reversed(found) if "gone_t" in e), found[-1] if found else None)

    def first_strike_t(self) -> float | None:
        """When anything was first done to the run."""
        found = self.strikes()
        return float(found[0]["t"]) if found else None

    def undone_t(self) -> float | None:
        """When the last fault had been healed that a job has to endure."""
        return max(self.healed_t.values(), default=None)


class History:
    """Writes events; a context manager. One writer, one line an event, flushed at once, and told to ``listener``."""

    def __init__(self, folder: Path, listener: Listener = lambda event: None) -> None:
        self._file = (folder / FILE).open("a", encoding="utf-8")
        self._listener = listener

    def __enter__(self) -> History:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    def begin(self, plan: Plan, environment: dict[str, str], scenario: dict[str, Any] | None = None) -> None:
        """The first event: what was asked for, and where; ``scenario`` in the form of its TOML."""
        self.add("drill", schema=SCHEMA, plan=plan_to_json(plan), environment=environment, scenario=scenario)

    def add(self, event: str, /, **facts: Any) -> None:
        """Append one event; ``t`` is now unless given."""
        whole = {"event": event, "t": time.time(), **facts}
        self._file.write(json.dumps(whole) + "\n")
        self._file.flush()
        self._listener(whole)


def load(folder: Path) -> Record:
    """Replay the history of a run folder, logs included. Raises ``Usage`` for a folder that is none."""
    try:
        texts = (folder / FILE).read_text(encoding="utf-8").splitlines()
        events = [json.loads(t) for t in texts]
        first = events[0]
        if first.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {first.get('schema')!r}, this version reads {SCHEMA!r}")
        record = Record(folder=folder, plan=plan_from_json(first["plan"]))
    except (OSError, ValueError, KeyError, IndexError, TypeError) as e:
        raise Usage(f"{folder} is not the folder of a drill: {e}",
                    hint="give the folder that `drills run ... --out DIR` wrote") from None  # fmt: skip
    for event in events:
        _replay(record, event)
    wrong_clock = any("offset_s" in e for e in record.evidence.values())
    for run in record.runs.values():
        reads = run.reads if wrong_clock and run.name == DRILLED else ()
        whole = read_log(folder / run.name / "log.jsonl", reads)
        run.log, run.late = overtaken_dropped(whole, run.overtaken)
        run.counts_from = 1 - run.log.offset
        run.said = _tail(folder / run.name / "stderr.txt")
    offset = record.control.log.offset if record.control else 0
    for run in record.runs.values():  # the drilled run may have lost its first lines: the control says how it counts
        run.log = run.log.shifted(offset)
    return record


def read_log(path: Path, reads: Sequence[tuple[int, float]] = ()) -> Log:
    """The target's log; empty when the target wrote none.

    ``reads``: how many lines had come by when; where given, that is the time of a line, as the target's own clock was
    wrong.
    """
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return Log()
    log = parse_log(texts)
    if not reads:
        return log
    counts = [n for n, _ in reads]
    times = [reads[min(bisect.bisect_left(counts, n), len(reads) - 1)][1] for n in log.numbers]
    return replace(log, lines=tuple(replace(n, t=t) for n, t in zip(log.lines, times, strict=True)))


def overtaken_dropped(log: Log, pids: set[int]) -> tuple[Log, tuple[Line, ...]]:
    """The log without what processes wrote that another start had overtaken, and that: theirs after its first line."""
    began = next((i for i, n in enumerate(log.lines) if n.pid in pids), None)
    if began is None:
        return log, ()
    first = next((i for i, n in enumerate(log.lines) if i > began and n.pid not in pids), len(log.lines))
    kept = [n for i, n in enumerate(log.lines) if i < first or n.pid not in pids]
    late = tuple(n for i, n in enumerate(log.lines) if i >= first and n.pid in pids)
    return replace(log, lines=tuple(kept), numbers=()), late


def _tail(path: Path, lines: int = 200) -> str:
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def _replay(record: Record, e: dict[str, Any]) -> None:
    match e["event"]:
        case "drill":
            record.started, record.environment, record.scenario = e["t"], e["environment"], e.get("scenario")
        case "control.cached":
            record.cached_control = e["said"]
        case "held":
            record.held.append(e)
        case "moment":
            record.moment = e
        case "fault.proved":
            record.evidence[e["fault"]] = e["evidence"]
        case "fault.healed":
            record.healed[e["fault"]], record.healed_t[e["fault"]] = e["said"], e["t"]
        case "compared":
            record.compared[e["left"], e["right"]] = e
        case "broke":
            record.broke.append(e["said"])
        case "ended.early":
            record.ended_early, record.advice = e["said"], e["advice"]
        case "ended":
            record.ended = e["t"]
        case _ if "run" in e:
            _replay_run(record.runs.setdefault(e["run"], Run(name=e["run"])), e)


def _replay_run(run: Run, e: dict[str, Any]) -> None:
    match e["event"]:
        case "run.started":
            run.starts += 1
            run.started = run.started or e["t"]
            run.url, run.argv = e["url"], e["argv"]
        case "process.seen":
            run.procs.append(Proc(pid=e["pid"], rank=e["rank"], born=e["born"], started=e["started"]))
        case "process.ended":
            n = max(n for n, p in enumerate(run.procs) if p.pid == e["pid"])
            run.procs[n] = replace(run.procs[n], ended=e["t"])
        case "commit.seen":
            run.commits.append(Commit(step=e["step"], name=e["name"], folder=e["folder"], seen=e["t"]))
        case "run.ended":
            run.ended, run.status, run.stopped = e["t"], e["status"], e["stopped"]
        case "log.read":
            run.reads.append((e["lines"], e["t"]))
        case "overtaken":
            run.overtaken |= set(e["pids"])
        case "left.running":
            run.left = e["processes"]
        case "storage":
            run.storage = e
