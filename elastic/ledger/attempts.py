"""The starts of a run, each with what all its ranks said, in one time. Pure.

Clocks: within a process its own clock without jumps orders events; its wall clock only says where that clock stands.
Where the wall clock jumped, ran away from another rank's, or a start seems to begin before the one before it was over,
this is said in ``notes``, and what follows from order rather than from clocks is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import TypeVar

from elastic.ledger.events import Event, LastSeen, Metric, Resumed, RunStarted, SaveStarted, Steps

_BACKDATED = ("run_started", "stop_requested")  # their time is when it happened, not when it was written
_JUMP_S = 0.25
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Said:
    """An event with its time in seconds since 1970, corrected for what is known of clocks."""

    at: float
    event: Event


@dataclass(slots=True)
class Stay:
    """What one process said, in order."""

    rank: int
    host: str
    pid: int
    said: list[Said]
    born: float | None = None
    """The process began."""
    entered: float | None = None
    resumed: float | None = None
    """State was restored: it trains from here."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of its start, by phase."""

    @property
    def last(self) -> float:
        """Its last word."""
        return self.said[-1].at

    def of(self, kind: type[T]) -> list[tuple[float, int, T]]:
        """(time, step, payload) of its events of a kind."""
        return [(s.at, s.event.step, s.event.data) for s in self.said if isinstance(s.event.data, kind)]

    def first(self, kind: type[T]) -> tuple[float, int, T] | None:
        """The first event of a kind."""
        return next(iter(self.of(kind)), None)


@dataclass(slots=True)
class Attempt:
    """One start of the run on all its ranks."""

    number: int
    """From 1."""
    epoch: str
    world: int
    stays: dict[int, Stay]
    resumed_step: int | None = None
    """The step it went on from; None: its state was never restored."""
    restored: str | None = None
    rolled_back: bool = False
    restart_count: int | None = None
    every: str = ""
    seen: LastSeen | None = None
    """The last sign that a killed process left on its host, the newest of all ranks."""
    seen_by: dict[int, LastSeen] = field(default_factory=dict)

    @property
    def lead(self) -> Stay:
        """The rank whose time line stands for all: the lowest that trained."""
        trained = [s for s in self.stays.values() if s.resumed is not None]
        return min(trained or self.stays.values(), key=lambda s: s.rank)

    @property
    def born(self) -> float:
        """Its first process began, as far as is known."""
        return min(s.born if s.born is not None else s.said[0].at for s in self.stays.values())

    @property
    def last(self) -> float:
        """The last word of any rank."""
        return max(s.last for s in self.stays.values())

    @property
    def steps(self) -> int:
        """Completed steps at its end, as far as is known."""
        told = max(s.event.step for stay in self.stays.values() for s in stay.said)
        return max(told, self.seen.steps if self.seen else 0)


@dataclass(frozen=True, slots=True)
class Story:
    """All starts of a run, oldest first; ``notes`` say where clocks or lines do not fit together."""

    attempts: tuple[Attempt, ...]
    notes: tuple[str, ...] = ()


def story(events: Iterable[Event]) -> Story:
    """Sort the events of a run out, in whatever order they come; the same event twice counts once."""
    notes: list[str] = []
    groups: dict[str, dict[tuple[int, str], dict[tuple[float, str, int, str], Event]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for event in events:
        own = event.data.name if isinstance(event.data, Metric) else ""
        groups[event.epoch][event.rank, event.start].setdefault((event.mono_s, event.kind, event.step, own), event)
    attempts = []
    for number, epoch in enumerate(sorted(groups), 1):
        stays: dict[int, Stay] = {}
        for (rank, _), unique in sorted(groups[epoch].items()):
            stay = _stay(sorted(unique.values(), key=lambda e: e.mono_s), number, notes)
            if rank not in stays or len(stay.said) > len(stays[rank].said):
                stays[rank] = stay
        _align(stays, number, notes)
        attempts.append(_attempt(number, epoch, stays))
    for before, attempt in pairwise(attempts):
        for rank, stay in attempt.stays.items():
            old = before.stays.get(rank)
            same = old is not None and (old.host, old.pid) == (stay.host, stay.pid)
            if old is not None and same and stay.born is not None and stay.born < old.last:  # it entered once more
                stay.born, stay.seconds = stay.entered, {}
    by_epoch = {a.epoch: a for a in attempts}
    for attempt in attempts:
        for stay in attempt.stays.values():
            for _, _, seen in stay.of(LastSeen):
                if (of := by_epoch.get(seen.of_epoch)) is not None:
                    of.seen_by[seen.of_rank] = seen
                    if of.seen is None or (seen.steps, seen.unix_s) > (of.seen.steps, of.seen.unix_s):
                        of.seen = seen
    return Story(tuple(attempts), tuple(notes))


def _stay(events: Sequence[Event], number: int, notes: list[str]) -> Stay:
    first = events[0]
    offsets = [e.unix_s - e.mono_s for e in events if e.kind not in _BACKDATED]
    anchor = median(offsets) if offsets else first.unix_s - first.mono_s
    if offsets and max(offsets) - min(offsets) > _JUMP_S:
        notes.append(f"the clock of {first.host} (rank {first.rank}) jumped by {max(offsets) - min(offsets):.3g} s in "
                     f"start {number}; times there follow the process's own clock")  # fmt: skip
    said = []
    for event in events:
        at = event.mono_s + anchor
        said.append(Said(min(at, event.unix_s) if event.kind in _BACKDATED else at, event))
    stay = Stay(first.rank, first.host, first.pid, said)
    if (resumed := stay.first(Resumed)) is not None:
        stay.resumed, _, data = resumed
        stay.seconds = dict(data.seconds)
        stay.entered = stay.resumed - data.seconds.get("resume", 0.0)
        stay.born = stay.entered - max(0.0, data.seconds.get("start", 0.0))
    elif (started := stay.first(RunStarted)) is not None:
        stay.born = stay.entered = started[0]
    return stay


def _align(stays: dict[int, Stay], number: int, notes: list[str]) -> None:
    """Move ranks whose clock is off onto that of the lowest rank: saves begin together."""
    if len(stays) < 2:
        return
    lead = stays[min(stays)]
    began = {step: at for at, step, _ in lead.of(SaveStarted)}
    longest = max((row.max_s for _, _, row in lead.of(Steps)), default=0.0)
    for stay in stays.values():
        both = [at - began[step] for at, step, _ in stay.of(SaveStarted) if step in began]
        if stay is lead or not both or abs(off := median(both)) <= max(1.0, 2 * longest):
            continue
        side = "ahead" if off > 0 else "behind"
        notes.append(f"the clock of {stay.host} (rank {stay.rank}) is {abs(off):.3g} s {side} in start {number}; its "
                     "times were moved")  # fmt: skip
        stay.said = [Said(s.at - off, s.event) for s in stay.said]
        stay.born, stay.entered, stay.resumed = (
            None if t is None else t - off for t in (stay.born, stay.entered, stay.resumed)
        )


def _attempt(number: int, epoch: str, stays: dict[int, Stay]) -> Attempt:
    attempt = Attempt(number, epoch, max(s.said[0].event.world for s in stays.values()), stays)
    if (resumed := attempt.lead.first(Resumed)) is not None:
        _, attempt.resumed_step, data = resumed
        attempt.restored, attempt.rolled_back = data.attempt, data.rolled_back is not None
    if (started := attempt.lead.first(RunStarted)) is not None:
        attempt.restart_count, attempt.every = started[2].restart_count, started[2].every
    return attempt
