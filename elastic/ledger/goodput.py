"""Where the hours of a run went: its wall time cut into slices without gaps, each shared out among causes. Pure.

The time line of the lowest rank stands for all, as steps keep ranks together; what the others said tells when a
failure was noticed. Slices lie end to end, and what no measurement explains in one is ``other``: so the causes add up
to the wall time by construction, and what is not known stays visible.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from elastic.ledger.attempts import Attempt, story
from elastic.ledger.ends import End, end_of, rows_of, usual_step_s
from elastic.ledger.events import Evaluated, Event, SaveCommitted, SaveStarted, Steps

CAUSES: Mapping[str, str] = {
    "training": "steps that count",
    "evaluation": "evaluations",
    "data": "waiting for batches",
    "save": "standing still for saves",
    "lost": "steps done again, or left half done",
    "rollback": "steps given up by going back on purpose",
    "detect": "until a failure was noticed",
    "restart": "old processes out, new ones in, warming up",
    "load": "choosing and reading a checkpoint",
    "wait": "no job: waiting for machines, or for somebody",
    "other": "between steps, and what nothing explains",
}
"""Cause -> what it is; the first two are productive."""
PRODUCTIVE = ("training", "evaluation")


@dataclass(frozen=True, slots=True)
class Slice:
    """From ``start`` to ``end`` (seconds since 1970) in start ``attempt``; ``parts`` (seconds by cause) fill it."""

    start: float
    end: float
    attempt: int
    parts: Mapping[str, float]
    phase: str = ""
    """Of a recovery: "detect", "stop", "respawn", "start", "load"; empty while it trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One start: what it did, how it ended, and where its time went, its way back from the last failure included."""

    attempt: Attempt
    end: End
    began: float
    ended: float
    seconds: Mapping[str, float]
    kept: float
    """Steps up to this one count; infinite where nothing later went back."""

    @property
    def steps(self) -> tuple[int, int]:
        """(first completed before, completed at its end)."""
        first = self.attempt.resumed_step
        return (first if first is not None else self.attempt.steps, self.attempt.steps)

    @property
    def steps_lost(self) -> int:
        """Completed steps that were or must be done again."""
        first, last = self.steps
        return int(max(0, last - max(first, min(self.kept, last))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The whole run. ``seconds`` by cause add up to ``wall_s``."""

    began: float
    ended: float
    running: bool
    parts: tuple[Part, ...]
    slices: tuple[Slice, ...]
    notes: tuple[str, ...]
    seconds: Mapping[str, float] = field(default_factory=dict)
    device_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds times devices, by cause."""

    @property
    def wall_s(self) -> float:
        """From the first process to the last word."""
        return self.ended - self.began

    @property
    def goodput(self) -> float | None:
        """Share of the wall time that was productive; None for no time at all."""
        return sum(self.seconds[c] for c in PRODUCTIVE) / self.wall_s if self.wall_s > 0 else None

    @property
    def availability(self) -> float | None:
        """Share of the wall time in which a training process was at work, whatever came of it."""
        down = sum(self.seconds[c] for c in ("detect", "restart", "load", "wait"))
        return 1 - down / self.wall_s if self.wall_s > 0 else None

    @property
    def steps(self) -> int:
        """Completed steps that count."""
        return max((int(min(p.kept, p.attempt.steps)) for p in self.parts), default=0)


def account(events: Iterable[Event]) -> Account:
    """Share out the wall time of a run, from all its events in any order; ``ValueError`` for none."""
    told = story(events)
    if not told.attempts:
        raise ValueError("no events")
    book = _Book(told.attempts[0].born, list(told.notes))
    ends = [end_of(a, b) for a, b in zip(told.attempts, [*told.attempts[1:], None], strict=True)]
    kept = _kept(told.attempts, ends)
    usual = [usual_step_s(a) for a in told.attempts]
    anywhere = median([u for u in usual if u is not None] or [math.inf])
    for n, attempt in enumerate(told.attempts):
        book.attempt = attempt.number
        if n:
            _gap(book, attempt, told.attempts[n - 1], ends[n - 1])
        _live(book, attempt, ends[n], usual[n] or anywhere, *kept[n])
    parts, by_attempt = [], _by_attempt(book.slices)
    for attempt, end, (until, _) in zip(told.attempts, ends, kept, strict=True):
        mine = by_attempt.get(attempt.number, [])
        began, ended = (mine[0].start, mine[-1].end) if mine else (attempt.born, attempt.born)
        parts.append(Part(attempt=attempt, end=end, began=began, ended=ended, seconds=_sum(mine), kept=until))
    worlds = {a.number: a.world for a in told.attempts}
    return Account(
        began=book.began, ended=book.at, running=ends[-1].how == "running", parts=tuple(parts),
        slices=tuple(book.slices), notes=tuple(book.notes), seconds=_sum(book.slices),
        device_s=_sum(book.slices, worlds),
    )  # fmt: skip


class _Book:
    """Slices laid end to end."""

    def __init__(self, began: float, notes: list[str]) -> None:
        self.began = self.at = began
        self.attempt = 1
        self.slices: list[Slice] = []
        self.notes = notes

    def lay(self, until: float, parts: str | Mapping[str, float], phase: str = "") -> None:
        """Fill the time up to ``until``: with one cause, or with parts whose rest is ``other``."""
        if until <= self.at:
            return
        if isinstance(parts, str):
            parts = {parts: until - self.at}
        self.slices.append(Slice(self.at, until, self.attempt, parts, phase))
        self.at = until


def _kept(attempts: Sequence[Attempt], ends: Sequence[End]) -> list[tuple[float, bool]]:
    """Up to which step the work of each start counts, and whether what is beyond was given up on purpose."""
    out: list[tuple[float, bool]] = []
    limit, on_purpose = math.inf, False
    if ends[-1].how == "failure":  # nobody has gone on yet: what is not saved will have to be done again
        saved = [step for a in attempts for step, _ in _saves(a).items()]
        limit = max([*saved, attempts[-1].resumed_step or 0])
    for attempt in reversed(attempts):
        out.append((limit, on_purpose))
        if attempt.resumed_step is not None and attempt.resumed_step <= limit:
            limit, on_purpose = attempt.resumed_step, attempt.rolled_back
    return out[::-1]


def _saves(attempt: Attempt) -> dict[int, SaveCommitted]:
    return {step: data for _, step, data in attempt.lead.of(SaveCommitted)}


def _gap(book: _Book, attempt: Attempt, before: Attempt, end: End) -> None:
    """From the last word of one start to the first process of the next."""
    early = book.at - attempt.born
    if early > 0.5:
        book.notes.append(f"start {attempt.number} begins {early:.3g} s before the last word of start {before.number}: "
                          "clocks disagree, or two jobs ran at once")  # fmt: skip
    again = attempt.restart_count is not None and attempt.restart_count > (before.restart_count or 0)
    if end.how != "failure" or not again:
        book.lay(attempt.born, "wait", "respawn")
        return
    book.lay(attempt.born, "restart", "respawn")


def _live(book: _Book, attempt: Attempt, end: End, usual: float, kept: float, on_purpose: bool) -> None:
    lead = attempt.lead
    if lead.entered is not None:
        book.lay(lead.entered, "restart", "start")
    if lead.resumed is None:
        book.lay(end.gone, "restart", "start")
        return
    book.lay(lead.resumed, "load", "load")
    gone = "rollback" if on_purpose else "lost"
    stalls = {step: s.stall_s for step, s in _saves(attempt).items()}
    evaluated = [(at, e.seconds) for at, _, e in lead.of(Evaluated)]
    for n, (at, step, row) in enumerate(rows_of(attempt)):
        told = sum(s for t, s in evaluated if book.at < t <= at) if evaluated else 0.0
        parts = _shared(row, at - book.at, told, stalls.get(step - row.n, 0.0), first=n == 0, usual=usual)
        if at - book.at > 0 and (over := parts.pop("over", 0.0)) > max(0.1, 0.05 * (at - book.at)):
            book.notes.append(f"in start {attempt.number} the parts of steps {step - row.n + 1} to {step} take "
                              f"{over:.3g} s more than the time they were done in: clocks disagree")  # fmt: skip
        _lose(parts, row.n, step, kept, gone)
        book.lay(at, parts)
    if end.how != "failure":
        _close(book, attempt, end)
        return
    _die(book, attempt, end, kept, gone, usual)


def _shared(
    row: Steps, window: float, evaluation: float, stall_s: float, *, first: bool, usual: float
) -> dict[str, float]:
    """The parts of one row's window; ``over``: how much more they were than it."""
    save = row.save_s if row.save_s is not None else stall_s
    parts = {
        "training": row.seconds, "data": row.data_s, "save": save, "other": max(0.0, row.boundary_s - save),
        "evaluation": evaluation, "restart": 0.0,
    }  # fmt: skip
    inside = min(evaluation, row.seconds, max(0.0, sum(parts.values()) - window))
    parts["training"] -= inside  # an evaluation within the body of a step was measured twice
    if first and row.n == 1:
        parts["restart"] = min(parts["training"], max(0.0, row.seconds + row.data_s - usual))
        parts["training"] -= parts["restart"]
    rest = window - math.fsum(parts.values())
    if rest < 0:
        scale = max(0.0, window) / math.fsum(parts.values())
        parts = {cause: s * scale for cause, s in parts.items()}
        parts["over"] = -rest
        rest = window - math.fsum(s for c, s in parts.items() if c != "over")
    parts["restart" if first else "other"] += rest
    return parts


def _lose(parts: dict[str, float], n: int, step: int, kept: float, gone: str) -> None:
    """Move the share of the steps beyond ``kept`` to the work that was lost."""
    share = min(1.0, max(0.0, (step - kept) / n)) if n else float(step > kept)
    if share:
        for cause in ("training", "data", "other", "evaluation"):
            parts[gone] = parts.get(gone, 0.0) + share * parts[cause]
            parts[cause] -= share * parts[cause]


def _close(book: _Book, attempt: Attempt, end: End) -> None:
    """After the last row of a start that ended well, or that still runs."""
    began = [at for at, _, _ in attempt.lead.of(SaveStarted) if at >= book.at - 1e-3]
    if end.how != "running" and began:
        book.lay(began[-1], "other")
        done = [at for at, _, _ in attempt.lead.of(SaveCommitted) if at >= began[-1]]
        book.lay(min(end.gone, max(done, default=end.gone)), "save")
    book.lay(end.gone, "other" if end.how != "running" else "training")


def _die(book: _Book, attempt: Attempt, end: End, kept: float, gone: str, usual: float) -> None:
    """After the last row of a start that failed."""
    told = max((step for _, step, _ in rows_of(attempt)), default=attempt.resumed_step or 0)
    if not end.certain and told < kept < math.inf:  # steps that nobody told of, and that were saved
        book.lay(min(end.died, book.at + (kept - told) * usual), "training")
    book.lay(end.died, gone if gone == "rollback" else "lost")
    if end.noticed is not None:
        book.lay(end.noticed, "detect", "detect")
    book.lay(end.gone, "restart", "stop")


def _by_attempt(slices: Iterable[Slice]) -> dict[int, list[Slice]]:
    out: dict[int, list[Slice]] = {}
    for piece in slices:
        out.setdefault(piece.attempt, []).append(piece)
    return out


def _sum(slices: Iterable[Slice], worlds: Mapping[int, int] | None = None) -> dict[str, float]:
    found: dict[str, list[float]] = {cause: [] for cause in CAUSES}
    for piece in slices:
        for cause, seconds in piece.parts.items():
            found[cause].append(seconds * (worlds[piece.attempt] if worlds else 1))
    return {cause: math.fsum(values) for cause, values in found.items()}
