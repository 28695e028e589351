"""What a run says about itself: one JSON line an event, schema ``elastic.ledger/1``. Pure.

An event is an envelope (who, when, where in the run) around one of the payloads below. Readers are tolerant:
an unknown field is ignored, an unknown kind is kept as :class:`Unknown`; only another major schema is
refused. So fields and kinds may be added; none may change its meaning or be taken away.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, ClassVar

SCHEMA = "elastic.ledger/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """The run was entered. ``restart_count`` is the agent's own; None where there is no agent."""

    kind: ClassVar[str] = "run_started"
    url: str
    every: str
    restart_count: int | None = None
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """State is restored, or a fresh run begun (``attempt`` None).

    ``skipped``: (attempt, reason), newest first; ``rng`` is "restored", "derived" or "fresh"; ``seconds`` are
    by phase, on this rank. ``rolled_back``: the newest step before this start went back to an older one as asked;
    ``skip``: global batches left out then; ``warm``: the checkpoint that a fresh run took its weights from;
    ``inexact``: what could not be restored exactly.
    """

    kind: ClassVar[str] = "resumed"
    attempt: str | None
    skipped: tuple[tuple[str, str], ...] = ()
    world_then: int | None = None
    rng: str
    seconds: dict[str, float] = field(default_factory=dict)
    rolled_back: int | None = None
    skip: int = 0
    warm: str | None = None
    inexact: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStarted:
    """A save begins. ``reason`` is "steps", "clock", "asked", "stop" or "end"."""

    kind: ClassVar[str] = "save_started"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCommitted:
    """The step is durable.

    ``stall_s``: training stood still on this rank; ``persist_s``: from then to the commit. ``bytes`` are
    those of the whole step; ``stall_max_s`` is that of the slowest rank, where it is known.
    """

    kind: ClassVar[str] = "save_committed"
    attempt: str
    bytes: int
    stall_s: float
    persist_s: float
    stall_max_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """The save of this step came to nothing; older steps are untouched."""

    kind: ClassVar[str] = "save_failed"
    error: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalChanged:
    """The automatic interval was worked out anew; ``inputs`` are what it was worked out from."""

    kind: ClassVar[str] = "interval_changed"
    interval_s: float
    was_s: float | None = None
    inputs: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashLoop:
    """So many starts in a row ended before their first step: no interval helps, something ends the job at its start."""

    kind: ClassVar[str] = "crash_loop"
    starts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The ``n`` steps since the last such row, up to the envelope's: time of the loop body and of its parts.

    ``seconds`` is the sum, ``min_s`` and ``max_s`` of one step; ``data_s`` was spent waiting for batches,
    ``boundary_s`` between steps (agreement, copies of saves); neither is part of ``seconds``. ``save_s`` is the part
    of ``boundary_s`` in which training stood still for a save, ``cpu_s`` the CPU time of the training thread within
    ``seconds`` (evaluations included, which ``seconds`` leaves out). ``times`` holds the distribution of whole steps
    without save stalls, data wait and boundary included (:class:`elastic.ledger.quantiles.Quantiles`). None: not
    measured.
    """

    kind: ClassVar[str] = "steps"
    n: int
    seconds: float
    min_s: float
    max_s: float
    data_s: float = 0.0
    boundary_s: float = 0.0
    save_s: float | None = None
    cpu_s: float | None = None
    times: str | None = None
    peak_bytes: int | None = None
    """Largest memory in use so far: of the accelerator where there is one."""
    peak_rss_bytes: int | None = None
    """Largest resident memory of this process so far."""
    energy_j: float | None = None
    """Energy that this rank answers for, from a counter of the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSeen:
    """What a process that was killed had left on its host, told by its successor there.

    ``of_epoch``, ``of_start`` and ``of_rank`` name it; ``unix_s`` is when its last step, after which it had completed
    ``steps``, or the pause after it, was over. The other fields are those of the :class:`Steps` row that it did not
    live to write.
    """

    kind: ClassVar[str] = "last_seen"
    of_epoch: str
    of_start: str
    of_rank: int
    unix_s: float
    steps: int
    n: int = 0
    seconds: float = 0.0
    data_s: float = 0.0
    boundary_s: float = 0.0
    save_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A named number: ``n`` values since the last row (``run.log``), or one (``run.metric``)."""

    kind: ClassVar[str] = "metric"
    name: str
    last: float
    n: int = 1
    mean: float
    min: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluation (``run.evaluation``) took so long, within a step; ``stopped``: it was cut short by a stop."""

    kind: ClassVar[str] = "evaluated"
    seconds: float
    stopped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """This process was asked to stop; ``source`` is a signal's name, a notice or "run.stop".

    ``within_s``: how many seconds were left then, where that is known.
    """

    kind: ClassVar[str] = "stop_requested"
    source: str
    within_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """All ranks left the loop at this step on request, its state saved; ``status`` is the exit status.

    ``took_s``: from the request on this rank to the end of the save; ``in_time``: whether that was within what the
    request gave, None where that is not known.
    """

    kind: ClassVar[str] = "stopped"
    status: int
    took_s: float | None = None
    in_time: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The loop came to its end (``until``), its state saved."""

    kind: ClassVar[str] = "finished"
    until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """The run was left by an exception."""

    kind: ClassVar[str] = "error"
    error: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """An event of a kind that this reader does not know, as it was written."""

    kind: str
    fields: dict[str, Any]


Payload = (
    RunStarted
    | Resumed
    | SaveStarted
    | SaveCommitted
    | SaveFailed
    | IntervalChanged
    | CrashLoop
    | Steps
    | LastSeen
    | Metric
    | Evaluated
    | StopRequested
    | Stopped
    | Finished
    | Error
    | Unknown
)
KINDS: Mapping[str, Callable[..., Payload]] = {
    cls.kind: cls
    for cls in (
        *(RunStarted, Resumed, SaveStarted, SaveCommitted, SaveFailed, IntervalChanged, CrashLoop),
        *(Steps, LastSeen, Metric, Evaluated, StopRequested, Stopped, Finished, Error),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the ledger.

    ``epoch`` is the start of the run on the store, ``generation`` that of the process group (None alone),
    ``start`` a random id of this process's stay in the run; ``step`` counts completed steps. ``time`` is UTC,
    ISO 8601 with microseconds and "Z"; ``mono_s`` is a clock without jumps, comparable within one ``start``.
    """

    epoch: str
    generation: str | None
    start: str
    rank: int
    world: int
    step: int
    time: str
    mono_s: float
    host: str
    pid: int
    data: Payload

    @property
    def kind(self) -> str:
        """The payload's kind."""
        return self.data.kind

    @property
    def unix_s(self) -> float:
        """``time`` as seconds since 1970."""
        return datetime.fromisoformat(self.time).timestamp()


def utc(unix_s: float) -> str:
    """A time as events carry it."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def encode(event: Event) -> str:
    """One line, without the line's end; numbers that are not finite become strings, as JSON has none."""
    data = event.data.fields if isinstance(event.data, Unknown) else asdict(event.data)
    row = {"schema": SCHEMA, "kind": event.kind}
    row |= {name: getattr(event, name) for name in _ENVELOPE}
    return json.dumps(_finite(row | {"data": data}), separators=(",", ":"), allow_nan=False)


def decode(line: str) -> Event:
    """The event of a line; ``ValueError`` says what is wrong with one that is none."""
    try:
        row = json.loads(line)
    except RecursionError:
        raise ValueError(f"nested too deeply: {line[:80]}") from None
    if not isinstance(row, dict) or row.get("schema") != SCHEMA:
        raise ValueError(f"not a line of {SCHEMA}: {line[:80]}")
    kind, data = row.get("kind"), row.get("data")
    if not isinstance(kind, str) or not isinstance(data, dict):
        raise ValueError(f"an event without kind or data: {line[:80]}")
    known = KINDS.get(kind)
    payload = _made(known, data) if known else Unknown(kind=kind, fields=data)
    event: Event = _made(Event, row, data=payload)
    if datetime.fromisoformat(event.time).tzinfo is None:
        raise ValueError(f"a time without its zone: {event.time}")
    return event


def _made(cls: Any, row: dict[str, Any], **more: Payload) -> Any:
    """An instance of ``cls`` from the fields that ``row`` has, each read as what it is declared to be."""
    try:
        known = {name: read(row[name]) for name, read in _readers(cls) if name in row}
        return cls(**known, **more)
    except (TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"no {cls.__name__}: {error}") from None


@lru_cache
def _readers(cls: Any) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    return tuple((f.name, _READ[f.type]) for f in fields(cls) if f.type in _READ)


def _optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


_READ: Mapping[Any, Callable[[Any], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "bool | None": _optional(bool),
    "int | None": _optional(int),
    "float | None": _optional(float),
    "str | None": _optional(str),
    "dict[str, float]": lambda v: {str(k): float(x) for k, x in v.items()},
    "dict[str, str]": lambda v: {str(k): str(x) for k, x in v.items()},
    "tuple[str, ...]": lambda v: tuple(str(x) for x in v),
    "tuple[tuple[str, str], ...]": lambda v: tuple((str(a), str(b)) for a, b in v),
}
_ENVELOPE = [f.name for f in fields(Event) if f.name != "data"]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
