"""The checkpoint interval: ``recommend(rates, costs, job) -> Plan``.

Pure and without dependencies. Default: the exact optimum for exponential failures (Lambert form) with the effective
save δ = stall + slowdown × persist latency and MTBF = 1 / E[rate | what was seen], clipped to what storage can
persist, best whole step. Notice, lazy commit, tiers, verification and other laws switch to their own exact forms.
A slightly wrong interval costs little (off by a factor f multiplies save-and-rework waste by (f + 1/f)/2); the inputs
and the right model are what matter, so every plan carries what to fix first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from elastic.economics.inputs import BadInput, Costs, Job, Rates, positive
from elastic.economics.models import Model, Setting, SingleTier, Split
from elastic.economics.posterior import Posterior, rate_of_job
from elastic.economics.roots import best_count

if TYPE_CHECKING:
    from elastic.economics.tiers import Level

Bound = Literal["none", "persist", "step", "minimum", "maximum", "work"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """When to save, and what to expect of it."""

    interval_s: float
    """Useful work from the end of one save to the start of the next; for tiers, between saves to the fastest."""
    steps: int | None
    parts: tuple[int, ...]
    """Tiers: saves to tier i per save to tier i+1. Verification: checks per checkpoint."""
    goodput: float
    """Useful share of wall time since the job started, queueing excluded."""
    goodput_range: tuple[float, float]
    split: Split
    interval_range_s: tuple[float, float]
    """The optimum at both ends of the 95 % credible interval of the MTBF; equal when the rate was given as known."""
    rate: Posterior
    bound: Bound
    """What the interval runs into: uploads, one step, the limits given, or the end of the job."""
    model: Model
    segments: int | None
    """Saves of a finite job, its end included; None for a long job."""
    expected_total_s: float | None
    warnings: tuple[str, ...]
    rates: Rates
    costs: Costs
    job: Job

    @property
    def setting(self) -> Setting:
        """What the model takes."""
        return Setting(self.interval_s, self.parts)

    @property
    def mtbf_s(self) -> float:
        """The mean up-time between interruptions that was planned with."""
        return self.rate.mtbf_s

    @property
    def saves_per_day(self) -> float:
        """Saves in a day of wall time, to the fastest tier."""
        return 86_400.0 * self.goodput / self.interval_s

    @property
    def failures_per_week(self) -> float:
        """Interruptions to expect in a week, those that hit a recovery included."""
        idle = self.split.detect + self.split.reschedule + (0 if self.rates.strike_recovery else self.split.recovery)
        return 604_800.0 * (1 - idle) / self.mtbf_s

    @property
    def lost_per_failure_s(self) -> float:
        """Mean work lost by a failure without notice."""
        return self.model.lost_per_failure_s(self.setting)

    @property
    def lost_p95_s(self) -> float:
        """Work lost by all but the worst twentieth of failures without notice."""
        return self.model.lost_per_failure_s(self.setting, 0.95)

    def goodput_at(self, interval_s: float) -> float:
        """Goodput of another interval, all else equal; below what uploads allow, saves wait for each other."""
        return self.model.goodput(Setting(positive("interval_s", interval_s, "an interval in seconds"), self.parts))


def goodput(rates: Rates, costs: Costs, job: Job, interval_s: float) -> float:
    """Goodput of any interval, as a share of wall time; counts of a pattern are the best for this interval."""
    work = positive("interval_s", interval_s, "an interval in seconds")
    model = build_model(rates, costs, rate_of_job(rates, job.nodes).mtbf_s)
    setting = model.best(work, work) if costs.tiers or rates.silent_mtbf_s is not None else Setting(work)
    return model.goodput(Setting(work, setting.parts))


def recommend(rates: Rates, costs: Costs, job: Job | None = None) -> Plan:
    """The interval with the highest goodput under what is known, with its forecast and warnings.

    Raises :class:`~elastic.economics.inputs.BadInput` for inputs that contradict each other or leave nothing to
    optimise. Deterministic and below a millisecond for one tier.
    """
    job = job or Job()
    rate = rate_of_job(rates, job.nodes)
    model = build_model(rates, costs, rate.mtbf_s)
    _need_a_cost(costs, job)
    setting, bound = _choose(model, costs, job)
    segments = total = None
    if job.work_s is not None:
        setting, bound, segments, total = _fit_to_job(model, setting, bound, costs, job)
    split = model.split(setting)
    gain = model.goodput(setting)
    gains, intervals = (gain, gain), (setting.work_s, setting.work_s)
    if not rate.known:
        ends = [build_model(rates, costs, mtbf) for mtbf in rate.mtbf_range_s()]
        worst, best = (end.goodput(setting) for end in ends)
        short, long = (_choose(end, costs, job)[0].work_s for end in ends)
        gains, intervals = (worst, best), (short, long)
    step = job.step_s
    return Plan(
        interval_s=setting.work_s,
        steps=None if step is None else round(setting.work_s / step),
        parts=setting.parts,
        goodput=gain,
        goodput_range=gains,
        split=split,
        interval_range_s=intervals,
        rate=rate,
        bound=bound,
        model=model,
        segments=segments,
        expected_total_s=total,
        warnings=tuple(_warnings(rates, costs, job, rate, setting, bound)),
        rates=rates,
        costs=costs,
        job=job,
    )


def build_model(rates: Rates, costs: Costs, mtbf_s: float) -> Model:
    """The exact model for what was given; raises :class:`BadInput` for combinations that none covers."""
    _refuse_unmodelled(rates, costs)
    common: dict[str, Any] = {
        "mtbf_s": mtbf_s,
        "detect_s": costs.detect_s,
        "reschedule_s": costs.reschedule_s,
    }
    save: dict[str, Any] = {"stall_s": costs.stall_s, "persist_s": costs.persist_s, "slowdown": costs.slowdown}
    if costs.tiers:
        from elastic.economics.tiers import Tiered  # here and below: most plans need neither

        return Tiered(levels=_levels(costs), **common)
    if rates.silent_mtbf_s is not None and costs.verify_s is not None:
        from elastic.economics.silent import Verified

        return Verified(
            silent_mtbf_s=rates.silent_mtbf_s, verify_s=costs.verify_s, recovery_s=costs.recovery_s, **save, **common
        )
    upload = {"lazy": costs.commit == "next-save", "overlapping": costs.in_flight == "many"}
    if rates.shape is not None or rates.lognormal_sigma is not None:
        from elastic.economics.renewal import Renewal

        return Renewal(
            recovery_s=costs.recovery_s, shape=rates.shape, sigma=rates.lognormal_sigma, **save, **common, **upload
        )
    on_notice = costs.stall_s + costs.persist_s if costs.notice_save_s is None else costs.notice_save_s
    return SingleTier(
        recovery_s=costs.recovery_s,
        warned=rates.warned,
        notice_save_s=on_notice,
        strike_save=rates.strike_save,
        strike_recovery=rates.strike_recovery,
        **save,
        **common,
        **upload,
    )


def _refuse_unmodelled(rates: Rates, costs: Costs) -> None:
    law = rates.shape is not None or rates.lognormal_sigma is not None
    notice = rates.warned > 0
    lazy = costs.commit == "next-save"
    silent = rates.silent_mtbf_s is not None
    if silent != (costs.verify_s is not None):
        missing = "verify_s" if silent else "silent_mtbf_s"
        raise BadInput(
            missing,
            "silent errors need both silent_mtbf_s and verify_s: give how often they strike and what a check costs",
        )
    special = {"tiers": bool(costs.tiers), "silent_mtbf_s": silent, "shape": law}
    asked = [field for field, on in special.items() if on]
    asked += [
        field
        for field, on in {"notice_share": notice, "commit": lazy}.items()
        if on and (costs.tiers or silent or (law and field == "notice_share"))
    ]
    asked += ["strike_save"] if not (rates.strike_save and rates.strike_recovery) and costs.tiers else []
    if len(asked) > 1:
        raise BadInput(
            asked[1],
            f"{' with '.join(asked[:2])} is not modelled: leave out one of the two, or simulate the combination",
        )


def _levels(costs: Costs) -> tuple[Level, ...]:
    from elastic.economics.tiers import Level

    levels, before = [], 0.0
    for tier in costs.tiers:
        load = costs.load_s if tier.load_s is None else tier.load_s
        levels.append(
            Level(
                stall_s=tier.stall_s,
                share=tier.survives - before,
                recovery_s=load + costs.warmup_s,
                persist_s=tier.persist_s,
                slowdown=tier.slowdown,
            )
        )
        before = tier.survives
    durable = Level(
        stall_s=costs.stall_s,
        share=1 - before,
        recovery_s=costs.recovery_s,
        persist_s=costs.persist_s,
        slowdown=costs.slowdown,
    )
    return (*levels, durable)


def _need_a_cost(costs: Costs, job: Job) -> None:
    first = costs.tiers[0] if costs.tiers else costs
    free = first.stall_s + first.slowdown * first.persist_s == 0
    if free and first.persist_s == 0 and job.step_s is None and job.min_interval_s is None:
        raise BadInput(
            "stall_s",
            "saving that costs nothing has no best interval: give stall_s or persist_s, or step_s to save every step",
        )


def _money_as_time(costs: Costs, job: Job) -> float:
    if not costs.per_save_usd:
        return 0.0
    if job.usd_per_s is None:
        raise BadInput(
            "usd_per_device_hour",
            "per_save_usd needs the price of the machines to compare with: "
            "give the number of nodes and usd_per_device_hour",
        )
    return costs.per_save_usd / job.usd_per_s


def _choose(model: Model, costs: Costs, job: Job) -> tuple[Setting, Bound]:
    """The best setting within the limits given, on whole aligned steps when a step time is known."""
    low, high = job.min_interval_s or 0.0, job.max_interval_s or math.inf
    extra = _money_as_time(costs, job)
    free = model.best(0.0, math.inf, extra)
    setting = free if low <= free.work_s <= high else model.best(low, high, extra)
    bound: Bound = "none"
    if setting.work_s < free.work_s:
        bound = "maximum"
    elif setting.work_s > free.work_s:
        bound = "minimum"
    elif _persist_bound(model, setting, costs):
        bound = "persist"
    if job.step_s is None:
        return setting, bound
    quantum = job.step_s * job.align_steps
    least = max(1, math.ceil(max(low, model.floor_s) / quantum * (1 - 1e-12)))
    below = max(least, math.floor(setting.work_s / quantum))
    choices = [m for m in (below, below + 1) if m * quantum <= high] or [below]
    settings = [model.best(m * quantum, m * quantum) if setting.parts else Setting(m * quantum) for m in choices]
    best = max(settings, key=model.goodput)
    if free.work_s < quantum and best.work_s == quantum and quantum >= max(low, model.floor_s):
        bound = "step"
    return best, bound


def _persist_bound(model: Model, setting: Setting, costs: Costs) -> bool:
    spans, work = [model.floor_s], [setting.work_s]
    if costs.tiers:
        for part, level in zip(setting.parts, _levels(costs)[1:], strict=True):
            work.append(work[-1] * part)
            spans.append(level.lag_s)
    return any(span > 0 and at <= span * (1 + 1e-9) for span, at in zip(spans, work, strict=True))


def _fit_to_job(
    model: Model, setting: Setting, bound: Bound, costs: Costs, job: Job
) -> tuple[Setting, Bound, int, float]:
    """Whole numbers of segments for a job that ends: E[T] is convex in their number."""
    assert job.work_s is not None
    if not isinstance(model, SingleTier) or model.warned or not model.strike_save:
        segments = max(1, math.ceil(job.work_s / setting.work_s))
        if segments == 1:
            setting, bound = Setting(job.work_s, setting.parts), "work"
        gain = model.goodput(setting)
        return setting, bound, segments, job.work_s / gain if gain > 0 else math.inf
    allowed = max(1, math.floor(job.work_s / max(model.floor_s, job.min_interval_s or 0.0, job.step_s or 0.0, 1e-12)))
    forced = math.ceil(job.work_s / job.max_interval_s * (1 - 1e-12)) if job.max_interval_s else 1
    k = min(max(round(job.work_s / setting.work_s), forced, 1), max(allowed, forced))
    k = best_count(lambda count: -_expected_total(model, job, count), k, forced, allowed)
    total = _expected_total(model, job, k)
    if k == 1 and forced == 1:
        return Setting(job.work_s), "work", 1, total
    if job.step_s is None:
        return Setting(job.work_s / k), bound, k, total
    return setting, bound, math.ceil(job.work_s / setting.work_s * (1 - 1e-12)), total


def _expected_total(model: SingleTier, job: Job, segments: int) -> float:
    """E[T] of a finite job in equal segments; exact for blocking saves, persist latency charged as in long jobs."""
    assert job.work_s is not None
    m, work = model.mtbf_s, job.work_s / segments
    last = model.stall_s + model.persist_s if job.final_save else 0.0
    cycle, late, _ = model._shape(work)
    grow = (segments - 1) * math.expm1(min(cycle / m, 700)) * math.exp(min(late / m, 700)) + math.expm1(
        min((work + last) / m, 700)
    )
    return grow * model._turn_s()


def _warnings(rates: Rates, costs: Costs, job: Job, rate: Posterior, setting: Setting, bound: Bound) -> list[str]:
    out = []
    mtbf, save = rate.mtbf_s, costs.effective_save_s
    if save > mtbf:
        out.append(
            "A save takes longer than the mean time between failures: most of the time is lost "
            "whatever the interval. Make saves cheaper first."
        )
    if costs.dead_s + costs.recovery_s > mtbf:
        out.append("A restart takes longer than the mean time between failures: make restarts faster first.")
    if bound == "persist":
        out.append(
            "Persist-bound: the next save would have to wait for the upload of the last one. "
            "Faster storage, not a better interval, is the lever."
        )
    if costs.commit == "next-save":
        out.append(
            "A checkpoint counts only once the next save is called: a failure may lose two intervals. Commit eagerly."
        )
    if rate.source.startswith("assumed"):
        out.append("The failure rate is assumed, not measured: let the job's own failures replace it.")
    if rates.notice_share and not rates.observed_notices:
        out.append("The share of stops that save in time was never observed: count those that completed.")
    if costs.notice_s is not None:
        need = costs.stall_s + costs.persist_s + (job.step_s or 0.0)
        if need > costs.notice_s:
            out.append(
                f"Notice of {costs.notice_s:g} s is shorter than a step and a save ({need:g} s): such stops lose work."
            )
    if costs.tiers and costs.tiers[0].survives > 0:
        out.append("What share of failures the fast tier survives was not observed: check it against real recoveries.")
    if job.keep is not None and job.detection_latency_s is not None:
        from elastic.economics.silent import retention_risk

        risk = retention_risk(setting.work_s, job.detection_latency_s, job.keep)
        if risk > 1e-3:
            out.append(
                f"With {job.keep} checkpoints kept, an error noticed late has spoiled all of them "
                f"in {risk:.0%} of cases: keep an older tail."
            )
    if job.current_s is not None and not 0.5 <= job.current_s / setting.work_s <= 2:
        out.append(f"The interval in use is {job.current_s / setting.work_s:.2g} times the best one.")
    return out
