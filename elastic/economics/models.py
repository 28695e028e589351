"""One place to save to: exact goodput of blocking, asynchronous and lazily committed saves, with or without notice.

Between failures the process renews, so one identity covers every variant,

    G(w) = [w · Σₖ P(U ≥ uₖ)] / (E[U] + E[recovery]),     uₖ = up-time at which checkpoint k can be restored,

and exponential up-times U make the sum geometric. ``w`` is always useful work between the end of one save and the
start of the next. With D = detect + reschedule dead and R = load + warm-up, a recovery that can fail and start over
takes (M+D)·e^(R/M) − M on average, which for D = 0 makes this Daly's (2006, FGCS 22) complete cost function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from elastic.economics.roots import highest, optimal_work_s, optimal_work_safe_save_s


class Setting(NamedTuple):
    """What can be chosen: work between saves, and for patterns how many small parts make a large one."""

    work_s: float
    parts: tuple[int, ...] = ()
    """Tiers: saves of tier i per save of tier i+1. Verified saves: verifications per checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Where each second of wall time goes; the shares sum to one."""

    useful: float
    save: float = 0.0
    slowdown: float = 0.0
    verify: float = 0.0
    rework: float = 0.0
    """Work done again, and saves cut short by a failure."""
    persist_lag: float = 0.0
    """Work done again because a finished snapshot could not be restored yet."""
    detect: float = 0.0
    reschedule: float = 0.0
    recovery: float = 0.0
    notice_save: float = 0.0


class Model(Protocol):
    """A set of assumptions under which goodput is known."""

    @property
    def name(self) -> str:
        """What the model is called in reports."""

    @property
    def mtbf_s(self) -> float:
        """Mean up-time between interruptions."""

    @property
    def floor_s(self) -> float:
        """Shortest work between saves that storage can keep up with."""

    def best(self, low_s: float, high_s: float, extra_save_s: float = 0.0) -> Setting:
        """The setting with the highest goodput, its interval within [low_s, high_s]."""

    def split(self, setting: Setting) -> Split:
        """Shares of wall time at a setting."""

    def goodput(self, setting: Setting) -> float:
        """Useful share of wall time at a setting."""

    def lost_per_failure_s(self, setting: Setting, share: float | None = None) -> float:
        """Work lost by an unannounced failure: its mean, or the given quantile of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleTier:
    """Exponential failures, one durable tier. Exact for every positive input, also δ ≫ M.

    Persist latency does not move the optimum: each failure loses about w/2 + L whatever w is. The optimum is that
    of a blocking save of σ + s·L (stall, slowdown × latency), raised to (1−s)·L when only one upload may be in
    flight: below that the next save waits for the previous upload, which is never better unless uploads outlast
    the MTBF itself, where w = M is best.
    """

    mtbf_s: float
    stall_s: float
    persist_s: float = 0.0
    slowdown: float = 0.0
    detect_s: float = 0.0
    reschedule_s: float = 0.0
    recovery_s: float = 0.0
    warned: float = 0.0
    """Share of interruptions that lose no work."""
    notice_save_s: float = 0.0
    lazy: bool = False
    overlapping: bool = False
    strike_save: bool = True
    strike_recovery: bool = True

    @property
    def name(self) -> str:
        """What the model is called in reports."""
        kind = "blocking save" if self.persist_s == 0 else "asynchronous save"
        kind += ", committed by the next save" if self.lazy else ""
        return kind + (", part of the stops announced" if self.warned else "")

    @property
    def floor_s(self) -> float:
        """(1−s)·L with one upload in flight, at most M; zero when uploads may overlap."""
        return 0.0 if self.overlapping else min((1 - self.slowdown) * self.persist_s, self.mtbf_s)

    @property
    def effective_save_s(self) -> float:
        """σ + s·L: training time one save takes."""
        return self.stall_s + self.slowdown * self.persist_s

    def best(self, low_s: float, high_s: float, extra_save_s: float = 0.0) -> Setting:
        """The Lambert optimum, or a search where notice or lazy commit rule it out, clipped to [low_s, high_s]."""
        if extra_save_s:
            return replace(self, stall_s=self.stall_s + extra_save_s).best(low_s, high_s)
        save = self.effective_save_s
        plain = not self.warned and not self.lazy
        if save <= 0:
            work = self.floor_s
        elif plain and self.strike_save:
            work = max(optimal_work_s(self.mtbf_s, save), self.floor_s)
        elif plain and self.persist_s == 0:
            work = optimal_work_safe_save_s(self.mtbf_s, save, self._turn_s())
        else:
            start = optimal_work_s(self.mtbf_s, save)
            top = 60 * self.mtbf_s * max(1.0, save / self.mtbf_s) / (1 - self.warned)
            work = highest(self._gain, start * 1e-3, max(top, start, 2 * self.floor_s))
            if abs(work / (self.floor_s or math.inf) - 1) < 1e-5:
                work = self.floor_s
        return Setting(min(max(work, low_s), high_s))

    def _gain(self, w: float) -> float:
        """Goodput apart from a factor that the interval cannot change, so that it does not vanish."""
        work, time = self._per_turn(w)
        return work / time

    def goodput(self, setting: Setting) -> float:
        """Useful share of wall time."""
        return min(1.0, self._gain(setting.work_s) * self._survive_recovery())

    def _survive_recovery(self) -> float:
        return math.exp(-self.recovery_s / self.mtbf_s) if self.strike_recovery else 1.0

    def _turn_s(self) -> float:
        """Mean time from one return to work to the next, saves that cannot be struck apart."""
        survive = self._survive_recovery()
        return self._scaled_turn(survive) / survive if survive > 0 else math.inf

    def _scaled_turn(self, survive: float) -> float:
        """The turn multiplied by e^(−R/M): finite even where R is many times M."""
        dead = (1 - self.warned) * self.detect_s + self.reschedule_s
        recovery = 0.0 if self.strike_recovery else self.recovery_s
        return self.mtbf_s + dead + recovery + self.warned * self.notice_save_s * survive

    def _shape(self, w: float) -> tuple[float, float, float]:
        """(struck part of a cycle, how much later than the cycle's end its work is safe, exposed stall)."""
        stall = self.stall_s if self.strike_save else 0.0
        own = w + self.slowdown * self.persist_s
        span = own if self.overlapping else max(own, self.persist_s)
        late = w if self.lazy else w + self.persist_s - span
        return stall + span, late, stall

    def _drag(self, w: float) -> tuple[float, float]:
        """(time lost to slowdown, time waited for the previous upload) in each cycle."""
        slow = self.slowdown * self.persist_s
        if self.overlapping or w >= (1 - self.slowdown) * self.persist_s:
            return slow, 0.0
        slow = w * self.slowdown / (1 - self.slowdown)
        return slow, max(0.0, self.persist_s - w - slow)

    def _progress(self, w: float, cycle: float, stall: float) -> tuple[float, float]:
        """Mean work done, and mean time lost to slowdown, in one up-time (whether or not it was secured)."""
        m, s = self.mtbf_s, self.slowdown
        starts = math.exp(-w / m) / -math.expm1(-cycle / m)  # saves begun in one up-time
        begun = math.exp(-stall / m) * starts * m
        slow_s = min(self.persist_s, w / (1 - s))
        if self.overlapping:
            run = w + s * self.persist_s
            done = begun * (w / run) * -math.expm1(-run / m)
            slowed = begun * -math.expm1(-run / m) * max(0.0, 1 - w / run)
        else:
            rest = max(0.0, w - (1 - s) * self.persist_s)
            quiet = math.exp(-self.persist_s / m) * -math.expm1(-rest / m)
            done = begun * ((1 - s) * -math.expm1(-slow_s / m) + quiet)
            slowed = begun * s * -math.expm1(-slow_s / m)
        return m * -math.expm1(-w / m) + done, slowed

    def _per_turn(self, w: float) -> tuple[float, float]:
        """(useful work in one up-time, scaled length of a turn)."""
        m = self.mtbf_s
        cycle, late, stall = self._shape(w)
        through = -math.expm1(-cycle / m)
        secured = w * math.exp(-(cycle + late) / m) / through
        if self.warned:
            secured = (1 - self.warned) * secured + self.warned * self._progress(w, cycle, stall)[0]
        survive = self._survive_recovery()
        time = self._scaled_turn(survive)
        if not self.strike_save:
            time += self.stall_s * math.exp(-w / m) / through * survive
        return secured, time

    def split(self, setting: Setting) -> Split:
        """Shares of wall time; saves that secured nothing count as rework."""
        w, m, q = setting.work_s, self.mtbf_s, self.warned
        cycle, late, stall = self._shape(w)
        survive = self._survive_recovery()
        _, time = self._per_turn(w)
        unit = survive / time  # shares per second of up-time
        saves = math.exp(-cycle / m) / -math.expm1(-cycle / m)  # cycles completed in one up-time
        kept = saves * math.exp(-late / m)
        slow, wait = self._drag(w)
        save, slowed, useful = kept * (stall + wait), kept * slow, kept * w
        lag = saves * cycle * -math.expm1(-late / m)
        rework = m * _missing(cycle / m)
        if q:
            done, warned_slow = self._progress(w, cycle, stall)
            useful = (1 - q) * useful + q * done
            save = (1 - q) * save + q * max(0.0, m - done - warned_slow)
            slowed = (1 - q) * slowed + q * warned_slow
            lag, rework = (1 - q) * lag, (1 - q) * rework
        if not self.strike_save:
            save += self.stall_s * math.exp(-w / m) / -math.expm1(-cycle / m)
        recovery = m * -math.expm1(-self.recovery_s / m) if self.strike_recovery else self.recovery_s
        return Split(
            useful=useful * unit,
            save=save * unit,
            slowdown=slowed * unit,
            rework=rework * unit,
            persist_lag=lag * unit,
            detect=(1 - q) * self.detect_s / time,
            reschedule=self.reschedule_s / time,
            recovery=recovery / time,
            notice_save=q * self.notice_save_s * unit,
        )

    def lost_per_failure_s(self, setting: Setting, share: float | None = None) -> float:
        """Up-time thrown away by an unannounced failure: mean, or a quantile of time since the last usable snapshot."""
        m = self.mtbf_s
        cycle, late, _ = self._shape(setting.work_s)
        if share is None:
            saves = math.exp(-cycle / m) / -math.expm1(-cycle / m)
            return m * _missing(cycle / m) + saves * cycle * -math.expm1(-late / m)
        return late - m * math.log1p(share * math.expm1(-cycle / m))


def _missing(x: float) -> float:
    """1 − x/(eˣ−1) without cancellation near 0."""
    if x < 1e-3:
        return x / 2 - x * x / 12 + x**4 / 720
    return 1.0 if x > 700 else 1 - x / math.expm1(x)
