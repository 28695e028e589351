"""A discrete-event simulator of the same jobs: it knows the rules of what happens, and none of the formulas.

What a job does between two failures does not depend on chance, so its timeline (when which work becomes restorable)
is played once, event by event, and failures are then thrown at it: a million take a second. Patterns (tiers,
verification) have memory across failures and are played for many jobs side by side. Needs numpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from elastic.economics.inputs import BadInput
from elastic.economics.interval import Plan
from elastic.economics.models import Model, Setting, SingleTier
from elastic.economics.renewal import Renewal
from elastic.economics.silent import Verified
from elastic.economics.tiers import Tiered

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_REPLICAS = 2048
_MOST_EVENTS = 400_000


class Measured(NamedTuple):
    """Goodput as it came out, and how far chance may have moved it."""

    goodput: float
    stderr: float
    failures: int

    def z(self, expected: float) -> float:
        """How many standard errors the simulation lies above an expected goodput."""
        return (self.goodput - expected) / self.stderr if self.stderr > 0 else 0.0


def simulate(plan: Plan, interval_s: float | None = None, failures: int = 100_000, seed: int = 0) -> Measured:
    """Simulated goodput of a plan, at its own or another interval, over about that many failures."""
    return play(plan.model, Setting(interval_s or plan.interval_s, plan.parts), failures, seed)


def play(model: Model, setting: Setting, failures: int = 100_000, seed: int = 0) -> Measured:
    """Simulated goodput of a model at a setting. Raises :class:`BadInput` for models it has no rules for."""
    import numpy as np

    if failures < 100:
        raise BadInput("failures", "simulate at least 100 failures: fewer say nothing")
    rng = np.random.default_rng(seed)
    if isinstance(model, SingleTier):
        return _single(model, setting, failures, rng)
    if isinstance(model, Renewal):
        return _renewal(model, setting, failures, rng)
    if isinstance(model, Tiered):
        return _tiered(model, setting, failures, rng)
    if isinstance(model, Verified):
        return _verified(model, setting, failures, rng)
    raise BadInput("model", f"no rules to simulate {type(model).__name__}")


@dataclass(slots=True)
class _Timeline:
    """One undisturbed life: knots of (exposed clock, wall clock, work done), and when which work became safe."""

    clock: Floats
    wall: Floats
    done: Floats
    safe_at: Floats
    safe: Floats


def _timeline(model: SingleTier | Renewal, w: float, horizon: float) -> _Timeline:
    """Plays compute, stall, upload and commit until the clock passes ``horizon``."""
    import numpy as np

    strike = not isinstance(model, SingleTier) or model.strike_save
    clock = wall = done = 0.0
    target = w
    uploads: list[list[float]] = []  # [seconds left, work held]
    waiting: float | None = None  # a finished upload that only the next save call publishes
    knots, safe = [(0.0, 0.0, 0.0)], [(0.0, 0.0)]

    def advance(seconds: float, rate: float, exposed: bool = True) -> None:
        nonlocal clock, wall, done, waiting
        clock, wall, done = clock + (seconds if exposed else 0.0), wall + seconds, done + seconds * rate
        for upload in uploads:
            upload[0] -= seconds
        while uploads and uploads[0][0] <= 1e-9:
            held = uploads.pop(0)[1]
            if model.lazy:
                waiting = held
            else:
                safe.append((clock, held))
        knots.append((clock, wall, done))

    while clock <= horizon:
        if len(knots) > _MOST_EVENTS:
            raise BadInput(
                "interval_s",
                "hundreds of thousands of saves between two failures: nothing to learn from simulating that",
            )
        while target - done > 1e-9 * w:
            rate = max(1 - model.slowdown * len(uploads), 0.01)
            left = (target - done) / rate
            advance(min([left, *(upload[0] for upload in uploads)]), rate)
        done = target
        if uploads and not model.overlapping:
            advance(uploads[0][0], 0.0)
        if waiting is not None:
            safe.append((clock, waiting))
            waiting = None
        elapsed = model.stall_s
        while elapsed > 0:
            part = min([elapsed, *(max(upload[0], 1e-12) for upload in uploads)])
            advance(part, 0.0, exposed=strike)
            elapsed -= part
        if model.persist_s > 0:
            uploads.append([model.persist_s, done])
        elif model.lazy:
            waiting = done
        else:
            safe.append((clock, done))
        target += w
    table, kept = np.array(knots).T, np.array(safe).T
    return _Timeline(table[0], table[1], table[2], kept[0], kept[1])


def _recoveries(model: SingleTier, n: int, rng: np.random.Generator) -> tuple[Floats, int]:
    """Time from each of n failures to being back at work, and how many further failures struck meanwhile."""
    import numpy as np

    total, extra = np.zeros(n), 0
    warned = rng.random(n) < model.warned
    total += np.where(warned, model.notice_save_s, 0.0)
    todo = np.arange(n)
    while len(todo):
        announced = warned if len(todo) == n else rng.random(len(todo)) < model.warned
        total[todo] += model.reschedule_s + np.where(announced, 0.0, model.detect_s)
        if not model.strike_recovery:
            total[todo] += model.recovery_s
            break
        until = rng.exponential(model.mtbf_s, len(todo))
        total[todo] += np.minimum(until, model.recovery_s)
        todo = todo[until < model.recovery_s]
        extra += len(todo)
    return np.stack([total, warned.astype(float)]), extra


def _single(model: SingleTier, setting: Setting, failures: int, rng: np.random.Generator) -> Measured:
    import numpy as np

    up = rng.exponential(model.mtbf_s, failures)
    line = _timeline(model, setting.work_s, float(up.max()))
    secured = line.safe[np.searchsorted(line.safe_at, up, side="right") - 1]
    (recovery, warned), extra = _recoveries(model, failures, rng)
    if model.warned:
        secured = np.where(warned > 0, np.interp(up, line.clock, line.done), secured)
    time = np.interp(up, line.clock, line.wall) + recovery
    return _ratio(secured, time, failures + extra)


def _renewal(model: Renewal, setting: Setting, failures: int, rng: np.random.Generator) -> Measured:
    import numpy as np

    if model.shape:
        up = model.mtbf_s / math.gamma(1 + 1 / model.shape) * rng.weibull(model.shape, failures)
    else:
        sigma = model.sigma or 1.0
        up = rng.lognormal(math.log(model.mtbf_s) - sigma**2 / 2, sigma, failures)
    line = _timeline(model, setting.work_s, float(up.max()))
    secured = line.safe[np.searchsorted(line.safe_at, up, side="right") - 1]
    time = up + model.detect_s + model.reschedule_s + model.recovery_s
    return _ratio(secured, time, failures)


def _ratio(work: Floats, time: Floats, failures: int) -> Measured:
    goodput = float(work.sum() / time.sum())
    rest = work - goodput * time
    return Measured(goodput, math.sqrt(float(rest.var(ddof=1)) * len(work)) / float(time.sum()), failures)


def _tiered(model: Tiered, setting: Setting, failures: int, rng: np.random.Generator) -> Measured:
    """Segments side by side; each job stops at the end of a pattern, so that no started work is left over."""
    import numpy as np

    m, levels = model.mtbf_s, model.levels
    every = [math.prod(setting.parts[:j]) for j in range(len(levels))]
    shares = np.cumsum([level.share for level in levels])
    t = np.zeros(_REPLICAS)
    at = np.zeros(_REPLICAS, int)  # segments of work the job has in hand
    held = np.zeros((len(levels), _REPLICAS), int)
    pending = np.zeros((len(levels), _REPLICAS), int)
    left = np.full((len(levels), _REPLICAS), np.inf)
    live = np.arange(_REPLICAS)
    struck = 0

    def pass_time(who: Any, seconds: Floats) -> None:
        t[who] += seconds
        left[:, who] -= seconds
        for j in range(len(levels)):
            ready = who[left[j, who] <= 0]
            held[j, ready], left[j, ready] = pending[j, ready], np.inf

    while len(live):
        after = at[live] + 1
        due = np.stack([after % n == 0 for n in every])
        need = setting.work_s + sum(np.where(due[j], level.cost_s, 0.0) for j, level in enumerate(levels))
        until = rng.exponential(m, len(live))
        ok = until >= need
        pass_time(live, np.where(ok, need, until))
        good = live[ok]
        at[good] = after[ok]
        for j, level in enumerate(levels):
            saving = live[ok & due[j]]
            if level.persist_s > 0:
                saving = saving[np.isinf(left[j, saving])]
                pending[j, saving], left[j, saving] = at[saving], level.persist_s
            else:
                held[j, saving] = at[saving]
        bad = live[~ok]
        depth = np.searchsorted(shares[:-1], rng.random(len(bad)), side="right")
        while len(bad):
            struck += len(bad)
            for j in range(len(levels)):
                left[j, bad[depth >= j]] = np.inf
            dead = model.detect_s + model.reschedule_s
            recovery = np.array([level.recovery_s for level in levels])[depth]
            until = rng.exponential(m, len(bad))
            pass_time(bad, dead + np.minimum(until, recovery))
            back = until >= recovery
            done = bad[back]
            at[done] = held[depth[back], done]
            for j in range(len(levels)):  # what is newer than the work in hand is gone
                held[j, done] = np.minimum(held[j, done], at[done])
            bad, depth = bad[~back], depth[~back]
            depth = np.maximum(depth, np.searchsorted(shares[:-1], rng.random(len(bad)), side="right"))
        if struck >= failures:
            live = (
                live[(held[-1, live] != at[live]) | (at[live] == 0)]
                if all(level.persist_s == 0 for level in levels)
                else live[:0]
            )
    return _ratio(at * setting.work_s, t, struck)


def _verified(model: Verified, setting: Setting, failures: int, rng: np.random.Generator) -> Measured:
    import numpy as np

    n = setting.parts[0]
    part = setting.work_s / n
    save = model.stall_s + model.slowdown * model.persist_s
    t, work, at = np.zeros(_REPLICAS), np.zeros(_REPLICAS), np.zeros(_REPLICAS, int)
    struck, live = 0, np.arange(_REPLICAS)

    def stops(size: int) -> Floats:
        return np.full(size, np.inf) if math.isinf(model.mtbf_s) else rng.exponential(model.mtbf_s, size)

    def roll_back(who: Any, dead: float) -> int:
        count = 0
        while len(who):
            until = stops(len(who))
            t[who] += dead + np.minimum(until, model.recovery_s)
            who, dead = who[until < model.recovery_s], model.detect_s + model.reschedule_s
            count += len(who)
        return count

    while len(live):
        saving = at[live] == n
        need = np.where(saving, save, part + model.verify_s)
        until = stops(len(live))
        ok = until >= need
        t[live] += np.minimum(until, need)
        spoiled = ok & ~saving & (rng.exponential(model.silent_mtbf_s, len(live)) < part)
        finished = ok & saving
        work[live[finished]] += setting.work_s
        at[live] = np.where(ok & ~saving & ~spoiled, at[live] + 1, 0)
        struck += int((~ok).sum() + spoiled.sum())
        struck += roll_back(live[~ok], model.detect_s + model.reschedule_s) + roll_back(live[spoiled], 0.0)
        if struck >= failures:
            live = live[~finished]
    return _ratio(work, t, struck)


def simulate_totals(plan: Plan, work_s: float, runs: int = 1000, seed: int = 0) -> Floats:
    """Wall times of a job of ``work_s`` of training, one a run, its end saved; for one tier."""
    import numpy as np

    model = plan.model
    if not isinstance(model, SingleTier):
        raise BadInput("model", "total times are simulated for one tier")
    rng = np.random.default_rng(seed)
    total, got = np.zeros(runs), np.zeros(runs)
    line = _timeline(model, plan.interval_s, work_s * 1.5 + 40 * (plan.interval_s + model.persist_s + model.stall_s))
    live = np.arange(runs)
    while len(live):
        up = rng.exponential(model.mtbf_s, len(live))
        left = work_s - got[live]
        ends = line.safe_at[np.minimum(np.searchsorted(line.safe, left * (1 - 1e-9)), len(line.safe) - 1)]
        over = ends <= up
        lived = np.minimum(up, ends)
        total[live] += np.interp(lived, line.clock, line.wall)
        (recovery, warned), _ = _recoveries(model, len(live), rng)
        safe = line.safe[np.searchsorted(line.safe_at, lived, side="right") - 1]
        if model.warned:
            safe = np.where(warned > 0, np.interp(lived, line.clock, line.done), safe)
        got[live] += safe
        total[live] += np.where(over, 0.0, recovery)
        live = live[~over]
    return total
