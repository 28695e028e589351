"""Failures that are not exponential: the same identity with another survival function. Imported when asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic.economics.models import Setting, SingleTier, Split
from elastic.economics.roots import maximise, upper_gamma


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewal:
    """Up-times of another law, renewed as a whole at each failure: Weibull (``shape``) or lognormal (``sigma``).

    The identity of :mod:`elastic.economics.models` with the law's own survival function; recovery is not struck. The
    best *fixed* interval: schedules that lengthen with the hazard's fall gain at most half a point at shape 0.5.
    Do not feed it the minimum over nodes of fresh Weibulls: only the failed node is renewed, so many nodes tend to
    exponential with M/N. Decreasing hazards at shape 0.7 to 0.8 are what Schroeder and Gibson (2006) found.
    """

    mtbf_s: float
    stall_s: float
    persist_s: float = 0.0
    slowdown: float = 0.0
    detect_s: float = 0.0
    reschedule_s: float = 0.0
    recovery_s: float = 0.0
    shape: float | None = None
    sigma: float | None = None
    lazy: bool = False
    overlapping: bool = False

    @property
    def name(self) -> str:
        """What the model is called in reports."""
        law = (
            f"Weibull up-times of shape {self.shape:g}" if self.shape else f"lognormal up-times of sigma {self.sigma:g}"
        )
        return f"{law}, renewed at each failure"

    @property
    def floor_s(self) -> float:
        """As for :class:`SingleTier`."""
        return self._plain().floor_s

    def _plain(self) -> SingleTier:
        return SingleTier(
            mtbf_s=self.mtbf_s,
            stall_s=self.stall_s,
            persist_s=self.persist_s,
            slowdown=self.slowdown,
            lazy=self.lazy,
            overlapping=self.overlapping,
        )

    def survival(self, t: float) -> float:
        """P(up-time > t)."""
        return self._law()(t)

    def _law(self) -> Callable[[float], float]:
        """The survival function with its constants worked out: a sum calls it hundreds of times."""
        if shape := self.shape:
            scale = self.mtbf_s / math.gamma(1 + 1 / shape)

            def weibull(t: float) -> float:
                log_hazard = shape * math.log(t / scale) if t > 0 else -math.inf
                return math.exp(-math.exp(log_hazard)) if log_hazard < 7 else 0.0

            return weibull
        assert self.sigma is not None
        mu, width = math.log(self.mtbf_s) - self.sigma**2 / 2, self.sigma * math.sqrt(2)
        return lambda t: 0.5 * math.erfc((math.log(t) - mu) / width)

    def beyond_s(self, t: float) -> float:
        """∫ of the survival function from t on."""
        if self.shape:
            scale = self.mtbf_s / math.gamma(1 + 1 / self.shape)
            return scale / self.shape * upper_gamma(1 / self.shape, (t / scale) ** self.shape)
        assert self.sigma is not None
        mu = math.log(self.mtbf_s) - self.sigma**2 / 2
        upper = 0.5 * math.erfc((math.log(t) - mu - self.sigma**2) / (self.sigma * math.sqrt(2)))
        return max(0.0, self.mtbf_s * upper - t * self.survival(t))

    def _secured_cycles(self, cycle: float, late: float) -> float:
        """Σₖ S(k·cycle + late): term by term while it changes fast, Euler and Maclaurin's formula for the tail."""
        total, k, t, survival = 0.0, 0, 0.0, self._law()
        while k < 600:
            k += 1
            t = k * cycle + late
            value = survival(t)
            total += value
            if value < 1e-16:
                return total
        h = cycle * 1e-3
        first = survival(t + h) - survival(t - h)
        return total + self.beyond_s(t) / cycle - survival(t) / 2 - first / (2 * h) * cycle / 12

    def best(self, low_s: float, high_s: float, extra_save_s: float = 0.0) -> Setting:
        """The best fixed interval, by search around the exponential one."""
        if extra_save_s:
            return replace(self, stall_s=self.stall_s + extra_save_s).best(low_s, high_s)
        plain = self._plain()
        start = plain.best(0.0, math.inf).work_s
        low_s = max(low_s, self.floor_s)
        work = maximise(lambda w: self.goodput(Setting(w)), start / 30, start * 30, tol=1e-6) if start > 0 else low_s
        return Setting(min(max(work, low_s), high_s))

    def goodput(self, setting: Setting) -> float:
        """Useful share of wall time."""
        cycle, late, _ = self._plain()._shape(setting.work_s)
        turn = self.mtbf_s + self.detect_s + self.reschedule_s + self.recovery_s
        return setting.work_s * self._secured_cycles(cycle, late) / turn

    def split(self, setting: Setting) -> Split:
        """Shares of wall time."""
        w = setting.work_s
        cycle, late, _ = self._plain()._shape(w)
        turn = self.mtbf_s + self.detect_s + self.reschedule_s + self.recovery_s
        saves, kept = self._secured_cycles(cycle, 0.0), self._secured_cycles(cycle, late)
        slow, wait = self._plain()._drag(w)
        return Split(
            useful=kept * w / turn,
            save=kept * (self.stall_s + wait) / turn,
            slowdown=kept * slow / turn,
            rework=max(0.0, self.mtbf_s - saves * cycle) / turn,
            persist_lag=max(0.0, saves - kept) * cycle / turn,
            detect=self.detect_s / turn,
            reschedule=self.reschedule_s / turn,
            recovery=self.recovery_s / turn,
        )

    def lost_per_failure_s(self, setting: Setting, share: float | None = None) -> float:
        """Mean, or about the quantile as if the failure fell uniformly in a cycle."""
        cycle, late, _ = self._plain()._shape(setting.work_s)
        if share is None:
            return self.mtbf_s - cycle * self._secured_cycles(cycle, late)
        return late + share * cycle
