"""Several places to save to: fast ones that some failures destroy, slow ones that survive; exact for any number.

Every ``w`` of work ends with a save to tier 1; every k₁-th of those also goes to tier 2, every k₂-th of those to
tier 3, and so on. A failure of class j can be restored from tier j and slower ones. The pattern is nested blocks:
a block of level j runs its parts one after another and starts over when a failure throws it back to its beginning.
Geometric sums replace the segment-by-segment recursion of Moody et al.'s (SC 2010) SCR Markov model, so a pattern of
thousands of segments costs as much as one of two. First order (Benoit et al. 2016): each tier gets Young's interval
with its own failure rate, √(2·C_l·M/p_l). Exact for exponential failures and blocking saves; where a tier is written
in the background its latency L_l is charged as e^(−p_l·(1−s_l)·L_l/M), within 0.03 points of simulation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from elastic.economics.models import Setting, Split
from elastic.economics.roots import maximise

_MOST_PARTS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """One tier as the model sees it."""

    stall_s: float
    share: float
    """Share of failures for which this is the fastest tier left."""
    recovery_s: float
    persist_s: float = 0.0
    slowdown: float = 0.0

    @property
    def cost_s(self) -> float:
        """Training time one save to this tier takes."""
        return self.stall_s + self.slowdown * self.persist_s

    @property
    def lag_s(self) -> float:
        """Work done while a save to this tier cannot be restored yet."""
        return (1 - self.slowdown) * self.persist_s


class _Block(NamedTuple):
    """How a block ends, from its start."""

    done: float
    """Chance that it is completed, rather than left for a failure that throws back further."""
    time_s: float
    """Expected time until either, recoveries included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiered:
    """Exponential failures, two or more tiers, fastest first."""

    mtbf_s: float
    levels: tuple[Level, ...]
    detect_s: float = 0.0
    reschedule_s: float = 0.0

    @property
    def name(self) -> str:
        """What the model is called in reports."""
        return f"{len(self.levels)} tiers, each failure restored from the fastest that survived"

    @property
    def floor_s(self) -> float:
        """Shortest interval the fastest tier can keep up with."""
        return self.levels[0].lag_s

    def _recoveries(self, dead_s: float, clock: float) -> tuple[float, list[float]]:
        """(mean time of recovering from a failure, chance of ending at each level); a failure on the way may go deeper.

        ``clock`` = 0 counts dead periods alone.
        """
        m = self.mtbf_s
        total: list[float] = [0.0] * len(self.levels)
        ends: list[list[float]] = [[] for _ in self.levels]
        for j in reversed(range(len(self.levels))):
            clean = math.exp(-self.levels[j].recovery_s / m)
            deeper = [(i, p) for i, p in enumerate(level.share for level in self.levels) if i > j and p > 0]
            stay = clean + (1 - clean) * sum(p for _, p in deeper)
            time = dead_s + clock * (1 - clean) * m + (1 - clean) * sum(p * total[i] for i, p in deeper)
            total[j] = time / stay if stay > 0 else math.inf
            ends[j] = [0.0] * len(self.levels)
            ends[j][j] = clean / stay if stay > 0 else 1.0
            for i, p in deeper:
                for level, chance in enumerate(ends[i]):
                    ends[j][level] += (1 - clean) * p * chance / stay if stay > 0 else 0.0
        shares = [level.share for level in self.levels]
        mean = sum(p * t for p, t in zip(shares, total, strict=True) if p)
        final = [sum(p * end[level] for p, end in zip(shares, ends, strict=True)) for level in range(len(shares))]
        return mean, final

    def _pattern(self, setting: Setting) -> tuple[float, float, float]:
        """(work of one pattern, its expected time, mean time of a recovery); time may be infinite."""
        setting = self._kept_up(setting)
        recovery, ends = _recoveries(self)
        block = self._block(len(self.levels) - 1, 0.0, setting, ends, recovery)
        work = setting.work_s * math.prod(setting.parts)
        return work, block.time_s, recovery

    def _kept_up(self, setting: Setting) -> Setting:
        """The setting as it would run: saves to a background tier are skipped while its last one is under way."""
        span, parts = setting.work_s, []
        for part, level in zip(setting.parts, self.levels[1:], strict=True):
            parts.append(max(part, math.ceil(level.lag_s / span * (1 - 1e-9))))
            span *= parts[-1]
        return Setting(setting.work_s, tuple(parts))

    def _block(self, level: int, extra_s: float, setting: Setting, ends: list[float], recovery: float) -> _Block:
        """A block of ``level`` whose last save costs ``extra_s`` more."""
        if level == 0:
            length = (setting.work_s + self.levels[0].cost_s + extra_s) / self.mtbf_s
            fail = -math.expm1(-length)
            passed, time, fatal = math.exp(-length), self.mtbf_s * fail + fail * recovery, fail
        else:
            last = self._block(level - 1, extra_s + self.levels[level].cost_s, setting, ends, recovery)
            count = setting.parts[level - 1]
            passed, time = last.done, last.time_s
            if count > 1:
                part = self._block(level - 1, 0.0, setting, ends, recovery)
                before = part.done ** (count - 1)
                lost = 1 - part.done
                runs = (
                    -math.expm1((count - 1) * math.log1p(-lost)) / lost
                    if 0 < lost < 1
                    else count - 1
                    if lost == 0
                    else 1.0
                )
                passed, time = before * last.done, part.time_s * runs + before * last.time_s
            fatal = 1 - passed
        deep = sum(ends[level:])
        here = 1.0 if level == len(self.levels) - 1 else ends[level] / deep if deep > 0 else 0.0
        leaves = passed + fatal * (1 - here)  # the chance that a run of the block is its last
        return _Block(passed / leaves, time / leaves) if leaves > 0 else _Block(0.0, math.inf)

    def _lag_factor(self) -> float:
        return math.exp(-sum(level.share * level.lag_s for level in self.levels) / self.mtbf_s)

    def goodput(self, setting: Setting) -> float:
        """Useful share of wall time."""
        work, time, _ = self._pattern(setting)
        return work / time * self._lag_factor()

    def best(self, low_s: float, high_s: float, extra_save_s: float = 0.0) -> Setting:
        """Exact interval and counts: from the first-order counts uphill, one count at a time."""
        if extra_save_s:
            first = replace(self.levels[0], stall_s=self.levels[0].stall_s + extra_save_s)
            return replace(self, levels=(first, *self.levels[1:])).best(low_s, high_s)
        low_s = max(low_s, self.floor_s)
        parts = self._first_order_parts()
        best = self._best_work(parts, low_s, high_s)
        value, improved = self.goodput(best), True
        while improved:
            improved = False
            for at in range(len(parts)):
                stride = max(1, parts[at] // 8)
                while stride:
                    moved = False
                    for step in (stride, -stride):
                        trial = list(parts)
                        trial[at] += step
                        if not 1 <= trial[at] <= _MOST_PARTS:
                            continue
                        setting = self._best_work(trial, low_s, high_s)
                        if (got := self.goodput(setting)) > value * (1 + 1e-13):
                            parts, best, value, moved, improved = trial, setting, got, True, True
                            break
                    stride = stride * 2 if moved else stride // 2
        return best

    def _first_order_parts(self) -> list[int]:
        parts = []
        for fast, slow in zip(self.levels, self.levels[1:], strict=False):
            ratio = slow.cost_s * fast.share / (max(fast.cost_s, 1e-9) * slow.share) if slow.share > 0 else 1e8
            floor = slow.lag_s / max(fast.lag_s, self.mtbf_s * 1e-3, 1e-9)
            parts.append(max(1, round(min(_MOST_PARTS, max(math.sqrt(ratio), floor)))))
        return parts

    def _best_work(self, parts: list[int], low_s: float, high_s: float) -> Setting:
        """Best interval for given counts; each background tier bounds its own interval from below."""
        count, cost = 1, self.levels[0].cost_s
        for part, level in zip(parts, self.levels[1:], strict=True):
            count *= part
            low_s = max(low_s, level.lag_s / count)
            cost += level.cost_s / count
        guess = math.sqrt(2 * max(cost, 1e-12) * self.mtbf_s)
        low, high = min(guess, self.mtbf_s) / 300, max(guess, self.mtbf_s) * 20
        if low_s > high:
            return Setting(low_s, tuple(parts))
        work = maximise(lambda w: self.goodput(Setting(w, tuple(parts))), low, high, tol=1e-8)
        return Setting(min(max(work, low_s), max(high_s, low_s)), tuple(parts))

    def split(self, setting: Setting) -> Split:
        """Shares of wall time."""
        setting = self._kept_up(setting)
        work, time, recovery = self._pattern(setting)
        factor = self._lag_factor()
        up = 1 / (1 + recovery / self.mtbf_s)
        periods, _ = self._recoveries(1.0, 0.0)
        failures = up / self.mtbf_s  # per second of wall time
        stall = slow = 0.0
        count = math.prod(setting.parts)
        for index, level in enumerate(self.levels):
            per_work = count / math.prod(setting.parts[:index]) / work
            stall, slow = stall + level.stall_s * per_work, slow + level.slowdown * level.persist_s * per_work
        useful = work / time
        dead = periods * failures
        return Split(
            useful=useful * factor,
            save=useful * stall * factor,
            slowdown=useful * slow * factor,
            rework=up - useful * (1 + stall + slow),
            persist_lag=useful * (1 + stall + slow) * (1 - factor),
            detect=dead * self.detect_s,
            reschedule=dead * self.reschedule_s,
            recovery=1 - up - dead * (self.detect_s + self.reschedule_s),
        )

    def lost_per_failure_s(self, setting: Setting, share: float | None = None) -> float:
        """Mean work lost by a failure; as a quantile, that of a failure which leaves only the slowest needed tier."""
        if share is None:
            split = self.split(setting)
            up = split.useful + split.save + split.slowdown + split.rework + split.persist_lag
            return (split.rework + split.persist_lag) / up * self.mtbf_s if up > 0 else self.mtbf_s
        deepest, seen = 0, 0.0
        for index, level in enumerate(self.levels):
            deepest, seen = index, seen + level.share
            if seen >= share:
                break
        span = setting.work_s * math.prod(setting.parts[:deepest])
        return span + self.levels[deepest].lag_s


@lru_cache(maxsize=256)  # a search asks a thousand times for what no setting changes
def _recoveries(model: Tiered) -> tuple[float, list[float]]:
    return model._recoveries(model.detect_s + model.reschedule_s, 1.0)
