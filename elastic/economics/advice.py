"""What a plan is worth and what would improve it: levers in points of goodput, flat region, rivals, targets, totals.

Every figure is the exact model solved again with one input changed, its interval chosen anew, so the list agrees with
the envelope theorem (∂ ln G/∂σ = −1/w, ∂/∂L = −s/w − (1−s)/M, ∂/∂R = −1/M, ∂/∂D = −1/(M+D)) for small changes and
stays right for large ones. One point is one hundredth of wall time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from elastic.economics.inputs import BadInput, Costs, Tier
from elastic.economics.interval import Plan, build_model
from elastic.economics.models import Setting, SingleTier
from elastic.economics.roots import crossing, gamma_quantile
from elastic.economics.tiers import Tiered


@dataclass(frozen=True, kw_only=True, slots=True)
class Lever:
    """One change and what it brings."""

    name: str
    change: str
    """In words, with its figures."""
    goodput: float
    points: float
    """Gain in points of goodput; negative for a loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """Another interval, and what it costs against the best one."""

    name: str
    interval_s: float
    goodput: float
    points: float
    """Points of goodput lost."""
    device_hours_per_day: float | None
    usd_per_day: float | None


def _solved(plan: Plan, costs: Costs | None = None, mtbf_s: float | None = None) -> float:
    model = build_model(plan.rates, costs or plan.costs, mtbf_s or plan.mtbf_s)
    low, high = plan.job.min_interval_s or 0.0, plan.job.max_interval_s or math.inf
    return model.goodput(model.best(low, high))


def levers(plan: Plan) -> tuple[Lever, ...]:
    """What to fix first, best first, without what would gain nothing; last what going back to blocking saves loses."""
    costs, base = plan.costs, _solved(plan)
    out: list[Lever] = []

    def add(name: str, change: str, new: Costs | None = None, mtbf_s: float | None = None) -> None:
        gain = _solved(plan, new, mtbf_s)
        if gain > base or name == "blocking":
            out.append(Lever(name=name, change=change, goodput=gain, points=100 * (gain - base)))

    add(
        "failures",
        f"failures half as often (MTBF {_time(plan.mtbf_s)} to {_time(2 * plan.mtbf_s)})",
        mtbf_s=2 * plan.mtbf_s,
    )
    halves = {
        "detect_s": "notice a failure",
        "reschedule_s": "get machines again",
        "load_s": "load",
        "warmup_s": "warm up",
    }
    for field, what in halves.items():
        if seconds := getattr(costs, field):
            add(
                field,
                f"{what} in half the time ({_time(seconds)} to {_time(seconds / 2)})",
                replace(costs, **{field: seconds / 2}),
            )
    if costs.stall_s:
        place = " of the durable tier" if costs.tiers else ""
        add(
            "stall_s",
            f"halve the stall{place} of a save ({_time(costs.stall_s)} to {_time(costs.stall_s / 2)})",
            replace(costs, stall_s=costs.stall_s / 2),
        )
    if costs.persist_s:
        add(
            "persist_s",
            f"upload twice as fast ({_time(costs.persist_s)} to {_time(costs.persist_s / 2)})",
            replace(costs, persist_s=costs.persist_s / 2),
        )
    if costs.slowdown:
        add("slowdown", f"no slowdown while uploading (now {costs.slowdown:.0%})", replace(costs, slowdown=0.0))
    if costs.commit == "next-save":
        add("commit", "commit a save when its upload ends, not at the next save", replace(costs, commit="eager"))
    out.extend(_fast_tier(plan, base))
    out.sort(key=lambda lever: -lever.points)
    if costs.persist_s and costs.stall_s < costs.persist_s / 2 and not costs.tiers:
        add(
            "blocking",
            f"going back to saves that block for {_time(costs.stall_s + costs.persist_s)}",
            replace(costs, stall_s=costs.stall_s + costs.persist_s, persist_s=0.0, slowdown=0.0),
        )
    return tuple(out)


def _fast_tier(plan: Plan, base: float) -> list[Lever]:
    """A copy in peer memory, where the model allows one: assumed to survive 80 % of failures and load in a tenth."""
    costs = plan.costs
    plain = isinstance(plan.model, SingleTier) and not plan.model.warned and not plan.model.lazy
    if not plain or not (plan.rates.strike_save and plan.rates.strike_recovery) or costs.effective_save_s <= 0:
        return []
    stall = costs.stall_s / 10 if costs.persist_s == 0 else costs.stall_s
    tier = Tier(name="memory", stall_s=stall, survives=0.8, load_s=costs.load_s / 10)
    gain = _solved(plan, replace(costs, tiers=(tier,)))
    text = f"also save to peer memory (assumed: {_time(stall)}, survives 80 %, load in a tenth of the time)"
    return [Lever(name="fast_tier", change=text, goodput=gain, points=100 * (gain - base))] if gain > base else []


def flat_region(plan: Plan, points: float = 0.1) -> tuple[float, float]:
    """The intervals within ``points`` of the best: any round number in between will do."""
    floor = plan.goodput - points / 100
    if floor <= 0:
        return max(plan.model.floor_s, plan.interval_s * 1e-3), plan.interval_s * 1e3
    at = plan.interval_s
    low = crossing(lambda x: plan.goodput_at(at * at / x) - floor, at, at * 1e4)
    high = crossing(lambda x: plan.goodput_at(x) - floor, at, at * 1e4)
    return max(at * at / low, min(plan.model.floor_s, at)), high


def rivals(plan: Plan) -> tuple[Rival, ...]:
    """Young's, Daly's and the current interval, and half and twice the best, with what each loses."""
    m, save = plan.mtbf_s, plan.costs.effective_save_s
    named: list[tuple[str, float]] = []
    if plan.job.current_s is not None:
        named.append(("in use now", plan.job.current_s))
    named += [("half of it", plan.interval_s / 2), ("twice", plan.interval_s * 2)]
    if save > 0 and not plan.costs.tiers:
        named.append(("Young 1974", young_s(m, save)))
        named.append(("Daly 2006", daly_s(m, save)))
    return tuple(_rival(plan, name, interval) for name, interval in named)


def _rival(plan: Plan, name: str, interval_s: float) -> Rival:
    gain = plan.goodput_at(interval_s)
    hours = None if plan.job.devices is None else (plan.goodput - gain) * plan.job.devices * 24
    price = plan.job.usd_per_device_hour
    return Rival(
        name=name,
        interval_s=interval_s,
        goodput=gain,
        points=100 * (plan.goodput - gain),
        device_hours_per_day=hours,
        usd_per_day=None if hours is None or price is None else hours * price,
    )


def young_s(mtbf_s: float, save_s: float) -> float:
    """√(2δM), Young (1974, CACM 17). First order: 5 % too long at δ = M/100, worse above."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly_s(mtbf_s: float, save_s: float) -> float:
    """√(2δM)·[1 + ⅓√(δ/2M) + ⅑(δ/2M)] − δ below δ = 2M, else M: Daly (2006, FGCS 22), eq. 37."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    x = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - save_s


class Reach(NamedTuple):
    """What one input would have to be for a target; None when that input alone cannot do it."""

    field: str
    now_s: float
    needed_s: float | None


def what_reaches(plan: Plan, target: float) -> tuple[Reach, ...]:
    """For a target goodput: the largest stall, latency, dead time or recovery, or the least MTBF, one at a time."""
    if not 0 < target < 1:
        raise BadInput("target_goodput", f"target_goodput is {target!r}: give a share between 0 and 1, such as 0.95")
    if plan.goodput >= target:
        return ()
    costs = plan.costs
    fields: dict[str, tuple[float, Callable[[float], float]]] = {
        "mtbf_s": (plan.mtbf_s, lambda f: _solved(plan, mtbf_s=plan.mtbf_s / f)),
    }
    for field in ("stall_s", "persist_s", "detect_s", "reschedule_s", "load_s", "warmup_s"):
        now = getattr(costs, field)
        if now:
            fields[field] = (now, lambda f, field=field, now=now: _solved(plan, replace(costs, **{field: now * f})))  # type: ignore[misc]
    out = []
    for field, (now, gain) in fields.items():
        if gain(1e-9) < target:
            out.append(Reach(field, now, None))
            continue
        factor = crossing(lambda f, gain=gain: gain(f) - target, 1e-9, 1.0)  # type: ignore[misc]
        out.append(Reach(field, now, now / factor if field == "mtbf_s" else now * factor))
    return tuple(out)


class Total(NamedTuple):
    """Wall time of a job: mean, and the 50th and 95th percentile."""

    mean_s: float
    p50_s: float
    p95_s: float


def total_time(plan: Plan, work_s: float | None = None) -> Total | None:
    """Wall time of ``work_s`` of training (default: the job's). None where no variance is known: simulate there.

    Mean exact; spread from the exact variance of a segment (geometric number of truncated attempts and recoveries),
    percentiles of a gamma law with those moments above the time without failures. Persist latency counts as recovery.
    """
    work = work_s or plan.job.work_s
    model = plan.model
    if work is None or not isinstance(model, SingleTier) or model.warned or not model.strike_save:
        return None
    m = model.mtbf_s
    cycle, late, _ = model._shape(plan.interval_s)
    segments = work / plan.interval_s
    dead = model.detect_s + model.reschedule_s
    if model.strike_recovery:
        mean_y, var_y = _struck(m, model.recovery_s + late)
        count = math.expm1(min((model.recovery_s + late) / m, 100))
        mean_r = dead + model.recovery_s + late + count * (mean_y + dead)
        var_r = count * var_y + count * (1 + count) * (mean_y + dead) ** 2
    else:
        mean_r, var_r = dead + model.recovery_s + late, 0.0
    mean_y, var_y = _struck(m, cycle)
    fails = math.expm1(min(cycle / m, 100))
    variance = segments * (fails * (var_y + var_r) + fails * (1 + fails) * (mean_y + mean_r) ** 2)
    quiet = segments * cycle
    extra = segments * fails * (mean_y + mean_r)
    mean = plan.expected_total_s if work == plan.job.work_s and plan.expected_total_s else quiet + extra
    shape, scale = extra**2 / variance, variance / extra
    spread = [
        quiet + (mean - quiet - extra) + scale * gamma_quantile(shape, p) if shape > 1e-3 else mean for p in (0.5, 0.95)
    ]
    return Total(mean, max(spread[0], 0.0), spread[1])


def _struck(mtbf_s: float, length_s: float) -> tuple[float, float]:
    """Mean and variance of the time of a failure, given that it falls within ``length_s``."""
    x = length_s / mtbf_s
    if x < 1e-2:
        mean = length_s * (0.5 - x / 12)
        return mean, length_s**2 * (1 / 3 - x / 12) - mean**2
    through = -math.expm1(-x)
    rest = math.exp(-x) / through
    mean = mtbf_s - length_s * rest
    square = 2 * mtbf_s**2 - rest * (length_s**2 + 2 * mtbf_s * length_s)
    return mean, max(square - mean**2, 0.0)


def storage_limits(plan: Plan, points: float) -> tuple[float, float]:
    """(largest persist latency, largest blocking save) that cost at most ``points`` against storage of no latency."""
    costs = plan.costs
    if isinstance(plan.model, Tiered):
        raise BadInput("tiers", "the bandwidth needed is answered for one tier: leave out tiers")
    best = _solved(plan, replace(costs, persist_s=0.0, slowdown=0.0))
    late = crossing(lambda x: _solved(plan, replace(costs, persist_s=x)) - best + points / 100, 1e-3, plan.mtbf_s * 100)
    tiny = _solved(plan, replace(costs, stall_s=1e-9, persist_s=0.0, slowdown=0.0))
    block = crossing(
        lambda x: _solved(plan, replace(costs, stall_s=x, persist_s=0.0, slowdown=0.0)) - tiny + points / 100,
        1e-9,
        plan.mtbf_s * 100,
    )
    return late, block


def sensitivity(plan: Plan, points: int = 41, span: float = 30.0) -> tuple[tuple[float, float, float, float], ...]:
    """(interval, goodput, goodput at both ends of the MTBF's range), over log intervals around the best."""
    ends = [build_model(plan.rates, plan.costs, m) for m in plan.rate.mtbf_range_s()]
    out = []
    for i in range(points):
        x = plan.interval_s * span ** (2 * i / (points - 1) - 1)
        setting = Setting(x, plan.parts)
        out.append((x, plan.goodput_at(x), ends[0].goodput(setting), ends[1].goodput(setting)))
    return tuple(out)


def _time(seconds: float) -> str:
    from elastic.units import show_duration

    return show_duration(seconds)
