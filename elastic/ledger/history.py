"""What a ledger says about failures and costs: the lives of a run, and the calculator's inputs read off them. Pure.

A life is one start of the run, from its first step to its end, as rank 0 saw it. A killed process writes nothing, so
when it ended is known only to lie between its last line and the next it would have written (``pulse_s``): the middle
is taken. A stop by a signal is an interruption with notice, saved or missed; one by the training code is planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Literal

from elastic.economics.fitting import Attempt
from elastic.ledger.events import (
    Error,
    Event,
    Finished,
    Resumed,
    RunStarted,
    SaveCommitted,
    SaveFailed,
    SaveStarted,
    Steps,
    Stopped,
    StopRequested,
)


def pulse_s(uptime_s: float) -> float:
    """After how long a run writes its next line at the latest: a quarter of its up-time, 1 s to 5 min."""
    return min(300.0, max(1.0, 0.25 * uptime_s))


@dataclass(kw_only=True)
class Life:
    """One start of the run. Times are seconds since 1970."""

    epoch: str
    born: float
    """The process began."""
    every: str = ""
    attempt: str | None = None
    """What it was restored from."""
    world: int = 1
    trained_from: float | None = None
    """State was restored; None: it never got there."""
    ended: float = 0.0
    how: Literal["failure", "planned", "running"] = "failure"
    notice_saved: bool | None = None
    stopping: bool = False
    """All ranks had agreed to stop."""
    steps: int = 0
    load_s: float = 0.0
    warmup_s: float | None = None
    first_step_s: float | None = None
    quiet: list[Steps] = field(default_factory=list)
    uploading: list[Steps] = field(default_factory=list)
    saves: list[SaveCommitted] = field(default_factory=list)
    begun: list[tuple[float, int]] = field(default_factory=list)
    """(time, step) of each save."""

    @property
    def uptime_s(self) -> float:
        """From its first step to its end; 0 where there was no step."""
        return max(0.0, self.ended - self.trained_from) if self.trained_from is not None and self.steps else 0.0

    def as_attempt(self) -> Attempt:
        """The same for :func:`elastic.economics.fitting.fit`."""
        return Attempt(uptime_s=self.uptime_s, ended=self.how, notice_saved=self.notice_saved)


def lives(events: Iterable[Event]) -> list[Life]:
    """The lives in a ledger, oldest first; ``events`` in the order of the reader. The last one may be running."""
    mine = (e for e in events if e.rank == 0)
    out = [_life(list(group)) for _, group in groupby(mine, key=lambda e: e.epoch)]
    for life, successor in pairwise(out):
        life.ended = min(life.ended, max(successor.born, life.trained_from or life.born))
        if life.how == "running":
            life.how = "failure"
    return out


def _life(events: list[Event]) -> Life:
    life = Life(epoch=events[0].epoch, born=events[0].unix_s, how="running")
    last, uploading, closing, asked, exact = events[-1].unix_s, False, False, False, False
    for event in events:
        data, now = event.data, event.unix_s
        life.world = event.world
        if isinstance(data, RunStarted):
            life.born, life.every = now, data.every
        elif isinstance(data, Resumed):
            began = data.seconds.get("start", 0.0)
            life.born -= began
            life.load_s = began + data.seconds.get("resume", 0.0)
            life.trained_from, life.attempt = now, data.attempt
        elif isinstance(data, Steps):
            if life.steps == 0 and data.n == 1:
                life.first_step_s = data.seconds + data.data_s
            else:
                (life.uploading if uploading or closing else life.quiet).append(data)
            life.steps += data.n
            closing = False
        elif isinstance(data, SaveStarted):
            uploading, life.stopping = True, data.reason == "stop"
            life.begun.append((now, event.step))
        elif isinstance(data, (SaveCommitted, SaveFailed)):
            uploading, closing = False, True
            if isinstance(data, SaveCommitted):
                life.saves.append(data)
        elif isinstance(data, StopRequested) and data.source != "run.stop":
            asked = True
        elif isinstance(data, (Stopped, Finished, Error)):
            exact = True
            _end(life, data)
    if asked and life.notice_saved is None and life.how != "planned" and (life.stopping or not exact):
        life.notice_saved = False  # SIGTERM is also what an agent sends when another rank has died: then errors follow
    since = last - (life.trained_from or last)
    life.ended = last if exact or life.trained_from is None else last + pulse_s(since) / 2
    usual = step_s([life])
    if life.first_step_s is not None and usual is not None:
        life.warmup_s = max(0.0, life.first_step_s - usual)
    return life


def _end(life: Life, how: Stopped | Finished | Error) -> None:
    life.how = "failure" if isinstance(how, Error) else "planned"
    if isinstance(how, Stopped) and how.status:
        life.how, life.notice_saved = "failure", True


def step_s(story: Sequence[Life]) -> float | None:
    """Mean time of a step while nothing is uploaded, the wait for its batch included; None for no such step."""
    return _per_step(row for life in story for row in life.quiet) or _per_step(
        row for life in story for row in life.uploading
    )


def slowdown(story: Sequence[Life]) -> float | None:
    """Share of training speed lost while uploading; None where steps of one kind are missing."""
    quiet = _per_step(row for life in story for row in life.quiet)
    loaded = _per_step(row for life in story for row in life.uploading)
    return None if quiet is None or loaded is None else max(0.0, 1 - quiet / loaded)


def _per_step(rows: Iterable[Steps]) -> float | None:
    seen = list(rows)
    n = sum(row.n for row in seen)
    return sum(row.seconds + row.data_s for row in seen) / n if n else None


def stall_s(save: SaveCommitted) -> float:
    """How long training stood still, on the slowest rank where that is known."""
    return save.stall_s if save.stall_max_s is None else save.stall_max_s


def dead_s(story: Sequence[Life]) -> Iterator[float]:
    """From each failure without notice to the birth of the next process; a stop may be followed by a weekend."""
    for life, successor in pairwise(story):
        if life.how == "failure" and life.notice_saved is None:
            yield max(0.0, successor.born - life.ended)


@dataclass(frozen=True, kw_only=True, slots=True)
class Since:
    """What happened after the state was saved that a start has restored."""

    failures: int
    """Unplanned ends without notice, of lives that had made a step."""
    notices_saved: int
    notices_missed: int
    early: int
    """Ends before a first step, in a row, the last ones before this start."""
    lost_s: float
    """Up-time since the save."""
    saves: tuple[tuple[float, float], ...] = ()
    """(stall, persist) of that save and later ones: what was saved cannot know what saving it took."""


def since_save(events: Iterable[Event], *, attempt: str | None, epoch: str) -> Since:
    """The lives after (and the rest of the one that saved) ``attempt``, up to the start of ``epoch``.

    ``attempt`` None: nothing was ever saved, all lives count.
    """
    step, _, saved_in = (attempt or "").partition("-")
    saved_in = saved_in.rpartition("-")[0]
    past = [life for life in lives(events) if saved_in <= life.epoch < epoch]
    failures = saved = missed = early = 0
    lost, saves = 0.0, list[tuple[float, float]]()
    for life in past:
        if life.how == "running":  # this start has succeeded it
            life.how = "failure"
        rest = life.uptime_s
        if life.epoch == saved_in:
            begun = [now for now, at in life.begun if at == int(step)]
            rest = max(0.0, life.ended - begun[-1]) if begun else rest
        lost += rest
        own = life.epoch == saved_in
        saves += [(stall_s(s), s.persist_s) for s in life.saves if not own or s.attempt >= (attempt or "")]
        if life.how != "failure":
            early = 0
        elif not life.steps:
            early += 1
        else:
            early = 0
            saved += life.notice_saved is True
            missed += life.notice_saved is False
            failures += life.notice_saved is None
    return Since(failures=failures, notices_saved=saved, notices_missed=missed, early=early, lost_s=lost,
                 saves=tuple(saves))  # fmt: skip
