"""Which rank hangs, told from what all ranks of a host are at. Pure: readings and times in, a verdict out.

Ranks that train together stand still together when one of them does: what tells them apart is *progress skew*, who
entered collective n and who did not. A verdict needs that no rank of the host has moved on for longer than the limit,
and a rank that the others wait for, found by, in this order: it is stopped, or in uninterruptible sleep; its
interpreter does not run (a held lock); it is behind in steps or collectives, outside of any; it is outside of any
collective while others are inside; it has gone past a step with fewer collectives than others; it waits in another
place of the script than most. Where all wait alike, the cause is on another host, or in the network, and nothing is
said.

The limit is max(floor, 3 x the 99th percentile of step times), or of the longest pause between collectives where steps
are not known; learned from five steps on. Before the first step of a generation, and in saves and loads, the limit is
``quiet_s``; so it is for a rank that burns CPU time while its interpreter runs, which may be at an evaluation.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic.launch.beats import SAMPLE_S, Beat

FLOOR_S, TIMES, LEARNED_FROM = 3.0, 3.0, 5
QUIET_S = 600.0
_BUSY = 0.5
_STALE_S = 10 * SAMPLE_S
STOPPED, SLEEPING = "T", "D"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at one rank: its last beat, and what the kernel says of its process."""

    beat: Beat
    state: str
    """The letter of /proc/<pid>/stat."""
    cpu_s: float
    """CPU time that it has used by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """``ranks`` (local) hold up the others; ``why`` says what is known of each."""

    ranks: tuple[int, ...]
    why: Mapping[int, str]
    still_s: float
    limit_s: float
    step: int | None


@dataclass(slots=True)
class _Rank:
    progress: tuple[int, int, str] = (-1, 0, "start")
    since_s: float = 0.0
    step_since_s: float = 0.0
    state: str = ""
    state_since_s: float = 0.0
    cpu: deque[tuple[float, float]] = field(default_factory=deque)
    moved: bool = False
    """It has made progress in this generation."""


class Watch:
    """Follows the ranks of a host. ``limit_s`` fixes the limit; None: it is learned, over restarts too."""

    def __init__(self, limit_s: float | None = None, *, quiet_s: float = QUIET_S) -> None:
        self._fixed, self._quiet_s = limit_s, quiet_s
        self._steps: deque[float] = deque(maxlen=512)
        self._pauses: deque[float] = deque(maxlen=512)
        self._ranks: dict[int, _Rank] = {}

    def begin(self) -> None:
        """A new generation: what was learned of step times stays."""
        self._ranks = {}

    @property
    def limit_s(self) -> float | None:
        """How long standing still is a hang now; None: not known yet."""
        if self._fixed is not None:
            return self._fixed
        if len(self._steps) >= LEARNED_FROM:
            return max(FLOOR_S, TIMES * _p99(self._steps))
        if len(self._pauses) >= LEARNED_FROM:
            return max(FLOOR_S, TIMES * max(self._pauses))
        return None

    def look(self, now_s: float, readings: Mapping[int, Reading]) -> Hang | None:
        """Take in one look at all living ranks; a verdict where there is one. Call it about ten times a second."""
        for local, reading in readings.items():
            self._note(now_s, self._ranks.setdefault(local, _Rank(since_s=now_s, step_since_s=now_s)), reading)
        frozen = {
            r: _frozen_words(rank.state)
            for r in readings
            if (rank := self._ranks[r]).state in (STOPPED, SLEEPING)
            and now_s - rank.state_since_s > (FLOOR_S if rank.state == STOPPED else self._limit_of(rank, readings[r]))
        }
        if frozen:
            return self._verdict(now_s, frozen, readings)
        still = [r for r, rank in self._ranks.items() if r in readings
                 and now_s - rank.since_s > self._limit_of(rank, readings[r])]  # fmt: skip
        if not readings or len(still) < len(readings):
            return None
        culprits = self._culprits(now_s, readings)
        patient = {r for r in culprits if self._busy(r, readings[r], now_s)
                   and now_s - self._ranks[r].since_s <= self._quiet_s}  # fmt: skip
        if not culprits or patient:
            return None
        return self._verdict(now_s, culprits, readings)

    def _note(self, now_s: float, rank: _Rank, reading: Reading) -> None:
        beat = reading.beat
        progress = (beat.step, beat.collectives, beat.phase)
        if progress != rank.progress:
            before = rank.progress
            if rank.moved and beat.step < 0:
                self._pauses.append(now_s - rank.since_s)
            if beat.step != before[0]:
                if rank.moved and before[2] == beat.phase == "step":
                    self._steps.append(now_s - rank.step_since_s)
                rank.step_since_s = now_s
            rank.moved = rank.moved or before[0] not in (-1, beat.step) or 0 < before[1] < beat.collectives
            rank.progress, rank.since_s = progress, now_s
        if reading.state != rank.state:
            rank.state, rank.state_since_s = reading.state, now_s
        rank.cpu.append((now_s, reading.cpu_s))
        while len(rank.cpu) > 2 and now_s - rank.cpu[1][0] >= 1.0:
            rank.cpu.popleft()

    def _limit_of(self, rank: _Rank, reading: Reading) -> float:
        limit = self.limit_s
        if limit is None:
            return self._quiet_s
        if not rank.moved or reading.beat.phase not in ("step", "start"):
            return max(limit, self._quiet_s)
        return limit

    def _culprits(self, now_s: float, readings: Mapping[int, Reading]) -> dict[int, str]:
        beats = {r: reading.beat for r, reading in readings.items()}
        if held := {
            r: f"its interpreter has not run for {now_s - b.thread_s:.1f} s: a call into C holds the interpreter lock"
            for r, b in beats.items()
            if b.thread_s and now_s - b.thread_s > max(_STALE_S, 0.5 * (self.limit_s or FLOOR_S))
        }:
            return held
        waiting = {r for r, b in beats.items() if b.waiting}
        first = max((b.step, b.collectives) for b in beats.values())
        own = {r: b for r, b in beats.items() if r not in waiting}
        if behind := {r: b for r, b in own.items() if (b.step, b.collectives) < first}:
            return {r: _behind_words(b, first) for r, b in behind.items()}
        if own and waiting:
            return dict.fromkeys(own, "it runs its own code, while others wait in a collective")
        ahead = {r: b for r, b in beats.items() if b.step == first[0]}
        if not own and 0 < len(ahead) < len(beats):
            most = max(b.collectives for r, b in beats.items() if r not in ahead)
            if skipped := [r for r, b in ahead.items() if b.collectives <= most]:
                return dict.fromkeys(skipped, f"it is at step {first[0]} after fewer collectives: it skipped one")
        return _elsewhere(beats) if not own and len(ahead) == len(beats) else {}

    def _busy(self, local: int, reading: Reading, now_s: float) -> bool:
        """Whether Python runs there and CPU time is used: work, for all that can be seen from outside."""
        (then, was), (last, is_) = self._ranks[local].cpu[0], self._ranks[local].cpu[-1]
        fresh = reading.beat.thread_s == 0 or now_s - reading.beat.thread_s < _STALE_S
        return fresh and last > then and (is_ - was) / (last - then) > _BUSY

    def _verdict(self, now_s: float, why: Mapping[int, str], readings: Mapping[int, Reading]) -> Hang:
        still = max(now_s - self._ranks[r].since_s for r in why)
        step = max((readings[r].beat.step for r in readings), default=-1)
        return Hang(ranks=tuple(sorted(why)), why=dict(why), still_s=still, limit_s=self.limit_s or self._quiet_s,
                    step=None if step < 0 else step)  # fmt: skip


def _elsewhere(beats: Mapping[int, Beat]) -> dict[int, str]:
    """All wait, but not in the same collective: who is in another place than most, or further on in the script."""
    places = Counter((b.file, b.line) for b in beats.values())
    if len(places) < 2 or len({b.collectives for b in beats.values()}) > 1:
        return {}
    (most, count), (_, next_count) = places.most_common(2)
    if count > next_count:
        odd = {r for r, b in beats.items() if (b.file, b.line) != most}
    elif len({b.file for b in beats.values()}) == 1:
        last = max(b.line for b in beats.values())
        odd = {r for r, b in beats.items() if b.line == last}
    else:
        return {}
    return {r: f"it waits in another collective than others, at line {beats[r].line}: it skipped one" for r in odd}


def _p99(values: deque[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]


def _frozen_words(state: str) -> str:
    return "it is stopped by a signal" if state == STOPPED else "it is in uninterruptible sleep in the kernel"


def _behind_words(beat: Beat, first: tuple[int, int]) -> str:
    if beat.step >= 0 and beat.step < first[0]:
        return f"it is at step {beat.step}, others at {first[0]}"
    return f"it has entered {beat.collectives} collectives, others {first[1]}"
