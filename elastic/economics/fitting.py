"""Inputs of the calculator from what a run has been through."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from elastic.economics.inputs import BadInput, Costs, Rates


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One life of the job, from its first step to its end."""

    uptime_s: float
    """0 when it died before its first step: such a life lost no work and counts neither as failure nor as exposure."""
    ended: Literal["failure", "planned", "running"]
    notice_saved: bool | None = None
    """For a stop with notice: whether the save on notice completed; None without notice."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Inputs read off a run."""

    rates: Rates
    costs: Costs
    crash_loop: bool
    """Three lives in a row ended before their first step: fix that, no interval helps."""


def fit(
    attempts: Iterable[Attempt],
    *,
    stalls_s: Iterable[float] = (),
    persists_s: Iterable[float] = (),
    detects_s: Iterable[float] = (),
    reschedules_s: Iterable[float] = (),
    loads_s: Iterable[float] = (),
    warmups_s: Iterable[float] = (),
) -> Fit:
    """Rates and costs of a run from its lives and its measured saves and restarts.

    Means, never medians, of the costs: the mean save cost is right to the order Var/M. Planned stops and the running
    life are censored: they add exposure and no failure. Raises :class:`BadInput` without exposure or without a save.
    """
    failures = saved = notices = early = longest_early = 0
    exposure = 0.0
    for attempt in attempts:
        if attempt.uptime_s <= 0:
            early += attempt.ended == "failure"
            longest_early = max(longest_early, early)
            continue
        early = 0
        exposure += attempt.uptime_s
        if attempt.ended == "failure":
            failures += 1
            notices += attempt.notice_saved is not None
            saved += attempt.notice_saved is True
    if exposure <= 0:
        raise BadInput(
            "exposure_s", "no life of the run reached its first step: there is nothing to learn a failure rate from yet"
        )
    stall = _mean(stalls_s)
    if stall is None:
        raise BadInput("stall_s", "no save was measured: give the stall of at least one save")
    rates = Rates(
        failures=failures,
        exposure_s=exposure,
        notice_saved=saved if notices else None,
        notice_missed=failures - saved if notices else None,
    )
    costs = Costs(
        stall_s=stall,
        persist_s=_mean(persists_s) or 0.0,
        detect_s=_mean(detects_s) or 0.0,
        reschedule_s=_mean(reschedules_s) or 0.0,
        load_s=_mean(loads_s) or 0.0,
        warmup_s=_mean(warmups_s) or 0.0,
    )
    return Fit(rates, costs, longest_early >= 3)


def _mean(values: Iterable[float]) -> float | None:
    seen = list(values)
    return sum(seen) / len(seen) if seen else None
