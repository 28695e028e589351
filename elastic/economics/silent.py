"""Silent corruption: verified checkpoints, and how many to keep when errors are only noticed late.

n verifications divide the work W between checkpoints; the checkpoint follows the last one, so it is known clean. A
silent error is seen at the next verification and rolls back to the checkpoint; a fail-stop error strikes at any time.
Exact for exponential errors. First order, Benoit, Cavelan, Robert and Sun (IPDPS 2016):
W = √((nV+C)/(λ_s(n+1)/(2n)+λ_f/2)), n = √((C/V)·λ_s/(λ_s+λ_f)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from elastic.economics.inputs import BadInput, positive
from elastic.economics.models import Setting, Split
from elastic.economics.roots import best_count, maximise


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """Guaranteed verification V, blocking (or nearly: see ``persist_s``) checkpoint C."""

    mtbf_s: float
    """Mean up-time between fail-stop errors; infinite when only silent ones occur."""
    silent_mtbf_s: float
    verify_s: float
    stall_s: float
    persist_s: float = 0.0
    slowdown: float = 0.0
    detect_s: float = 0.0
    reschedule_s: float = 0.0
    recovery_s: float = 0.0

    @property
    def name(self) -> str:
        """What the model is called in reports."""
        return "verified checkpoints against silent errors"

    @property
    def floor_s(self) -> float:
        """(1−s)·L."""
        return (1 - self.slowdown) * self.persist_s

    def _exposed(self, length: float) -> float:
        """Mean time in an attempt of this length until it ends or a fail-stop error strikes."""
        return length if math.isinf(self.mtbf_s) else self.mtbf_s * -math.expm1(-length / self.mtbf_s)

    def _after(self) -> tuple[float, float]:
        """Mean time to be back at work after a fail-stop error, and after a detected silent one (rollback alone)."""
        m, dead = self.mtbf_s, self.detect_s + self.reschedule_s
        if math.isinf(m):
            return dead + self.recovery_s, self.recovery_s
        grown = math.expm1(min(self.recovery_s / m, 700)) * (m + dead)
        return dead + grown, grown

    def _pattern(self, setting: Setting) -> tuple[float, float, float, float]:
        """(expected time, up-time alone, silent rollbacks, chance of a clean pass) until a clean checkpoint."""
        n = setting.parts[0]
        part = setting.work_s / n
        save_s = self.stall_s + self.slowdown * self.persist_s
        lag = math.exp(-self.floor_s / self.mtbf_s)
        runs = math.exp(-(part + self.verify_s) / self.mtbf_s)
        caught = -math.expm1(-part / self.silent_mtbf_s)
        step = runs * (1 - caught)  # a part runs and is clean
        reached = step**n
        visits = n if step == 1 else -math.expm1(n * math.log(step)) / (1 - step) if step > 0 else 1.0
        passed = reached * math.exp(-save_s / self.mtbf_s)
        if passed * lag <= 0:
            return math.inf, math.inf, math.inf, 0.0
        exposed = visits * self._exposed(part + self.verify_s) + reached * self._exposed(save_s)
        failed = visits * (1 - runs) + reached * -math.expm1(-save_s / self.mtbf_s)
        rollbacks = visits * runs * caught
        stop, roll = self._after()
        time = (exposed + failed * stop + rollbacks * roll) / passed
        return time / lag, exposed / passed, rollbacks / passed, passed

    def goodput(self, setting: Setting) -> float:
        """Useful share of wall time."""
        return setting.work_s / self._pattern(setting)[0]

    def best(self, low_s: float, high_s: float, extra_save_s: float = 0.0) -> Setting:
        """Work between checkpoints and verifications, exact, from the first-order count uphill."""
        if extra_save_s:
            return replace(self, stall_s=self.stall_s + extra_save_s).best(low_s, high_s)
        low_s = max(low_s, self.floor_s)
        fail, silent = 1 / self.mtbf_s, 1 / self.silent_mtbf_s
        save = self.stall_s + self.slowdown * self.persist_s
        n = max(1, round(math.sqrt(save / self.verify_s * silent / (silent + fail))))

        def at(count: int) -> tuple[float, Setting]:
            guess = math.sqrt((count * self.verify_s + save) / (silent * (count + 1) / (2 * count) + fail / 2))
            top = max(guess, 1 / (silent + fail)) * 20
            work = maximise(lambda w: self.goodput(Setting(w, (count,))), min(guess, 1 / (silent + fail)) / 100, top)
            setting = Setting(min(max(work, low_s), max(high_s, low_s)), (count,))
            return self.goodput(setting), setting

        return at(best_count(lambda count: at(count)[0], n, 1, math.inf))[1]

    def split(self, setting: Setting) -> Split:
        """Shares of wall time."""
        time, up, rollbacks, _ = self._pattern(setting)
        lag = math.exp(-self.floor_s / self.mtbf_s)
        bare = time * lag
        failures = up / self.mtbf_s
        roll = self._after()[1]
        dead = self.detect_s + self.reschedule_s
        hit = 0.0 if math.isinf(self.mtbf_s) else math.expm1(min(self.recovery_s / self.mtbf_s, 700))
        periods = failures * (1 + hit) + rollbacks * hit
        recovery = failures * (roll + dead) + rollbacks * roll - periods * dead
        used = setting.work_s + self.stall_s + self.slowdown * self.persist_s + setting.parts[0] * self.verify_s
        return Split(
            useful=setting.work_s / time,
            save=self.stall_s / time,
            slowdown=self.slowdown * self.persist_s / time,
            verify=setting.parts[0] * self.verify_s / time,
            rework=(up - used) / bare,
            persist_lag=used / bare - used / time,
            detect=periods * self.detect_s / bare,
            reschedule=periods * self.reschedule_s / bare,
            recovery=recovery / bare,
        )

    def lost_per_failure_s(self, setting: Setting, share: float | None = None) -> float:
        """Mean, or about the quantile as if errors fell uniformly in a pattern."""
        _, up, rollbacks, _ = self._pattern(setting)
        used = setting.work_s + self.stall_s + self.slowdown * self.persist_s + setting.parts[0] * self.verify_s
        if share is None:
            return (up - used) / (up / self.mtbf_s + rollbacks) + self.floor_s
        return share * used + self.floor_s


def retention_risk(interval_s: float, detection_latency_s: float, keep: int) -> float:
    """Chance that no clean checkpoint is left when an error is noticed after an exponential delay.

    e^(−(k−1)T/μ)·(1−e^(−T/μ))/(T/μ) with the newest k = ``keep`` checkpoints, one every ``interval_s``.
    """
    x = interval_s / detection_latency_s
    return math.exp(-(keep - 1) * x) * -math.expm1(-x) / x


def keep_for_late_detection(interval_s: float, detection_latency_s: float, risk: float) -> int:
    """How many newest checkpoints leave at most ``risk`` that an error noticed late has spoiled them all.

    Raises :class:`BadInput` for a risk outside (0, 1). Keeping so many evenly spaced ones is expensive for long
    delays: an exponentially thinning tail does the same with far fewer.
    """
    x = positive("interval_s", interval_s, "seconds between checkpoints") / positive(
        "detection_latency_s", detection_latency_s, "the mean delay in seconds"
    )
    if not 0 < risk < 1:
        raise BadInput("risk", f"risk is {risk!r}: give the chance you accept, between 0 and 1")
    keep = max(1, math.ceil(1 + math.log(-math.expm1(-x) / (x * risk)) / x))
    while keep > 1 and retention_risk(interval_s, detection_latency_s, keep - 1) <= risk:
        keep -= 1
    while retention_risk(interval_s, detection_latency_s, keep) > risk:
        keep += 1
    return keep
