"""How a run stands at a moment, from what its ledger says and how long it has said nothing. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from elastic.ledger.events import Event, Metric, SaveCommitted, SaveFailed, SaveStarted, Steps
from elastic.ledger.goodput import Account, account
from elastic.ledger.history import pulse_s
from elastic.ledger.quantiles import Quantiles
from elastic.ledger.rates import COUNTED, rates

State = Literal["running", "starting", "silent", "finished", "stopped", "restarting", "failed"]
RESTART_S = 120.0
"""For how long after a failure an agent may be thought to be starting the job again."""
_RECENT = 20
_SLACK_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """At ``now`` (seconds since 1970). Seconds are ages at that moment; None: not known, or never."""

    now: float
    state: State
    account: Account
    world: int
    step: int
    heard_s: float
    """Since the last word of any rank; below zero where the reader's clock is behind the writer's."""
    expected_s: float
    """How long a run of that age may say nothing."""
    durable_step: int | None
    durable_s: float | None
    saving: bool
    failed_saves: int
    """Since the last one that was committed."""
    recent_step_s: float | None
    recent_p50_s: float | None
    recent_p99_s: float | None
    recent_counted: dict[str, float]
    """Tokens and samples a second, at the recent step time."""
    metrics: dict[str, tuple[int, float]]
    """Name -> (step, newest value), as rank 0 told."""
    why: str
    """What ended it, where it has ended."""


def status(events: Sequence[Event], *, now: float) -> Status:
    """Judge all events of a run; ``ValueError`` for none."""
    whole = account(events)
    part = whole.parts[-1]
    attempt, end = part.attempt, part.end
    lead = attempt.lead
    rows = lead.of(Steps)[-_RECENT:]
    n = sum(row.n for _, _, row in rows)
    recent = (
        sum(row.seconds + row.data_s + row.boundary_s - (row.save_s or 0.0) for _, _, row in rows) / n if n else None
    )
    times = Quantiles()
    for _, _, row in rows:
        if row.times:
            times.merge(Quantiles.parse(row.times))
    saves = [(at, step) for p in whole.parts for at, step, _ in p.attempt.lead.of(SaveCommitted)]
    began = lead.of(SaveStarted)
    over = [at for kind in (SaveCommitted, SaveFailed) for at, _, _ in lead.of(kind)]
    failed = [at for at, _, _ in lead.of(SaveFailed) if not saves or at > saves[-1][0]]
    heard = now - attempt.last
    expected = 2 * pulse_s(attempt.last - (lead.resumed if lead.resumed is not None else attempt.last)) + _SLACK_S
    metrics = {}
    for p in whole.parts:
        for _, step, metric in p.attempt.lead.of(Metric):
            metrics[metric.name] = (step, metric.last)
    speed = rates(whole).counted
    return Status(
        now=now, account=whole, world=attempt.world, step=attempt.steps, heard_s=heard, expected_s=expected,
        state=_state(end.how, bool(rows), heard, expected, agent=attempt.restart_count is not None),
        durable_step=saves[-1][1] if saves else None, durable_s=now - saves[-1][0] if saves else None,
        saving=bool(began) and (not over or began[-1][0] > max(over)), failed_saves=len(failed),
        recent_step_s=recent, recent_p50_s=times.at(0.5), recent_p99_s=times.at(0.99),
        recent_counted={k: c.per_step / recent for k, c in speed.items() if recent},
        metrics={k: v for k, v in metrics.items() if k not in COUNTED}, why=end.cause,
    )  # fmt: skip


def _state(how: str, trains: bool, heard_s: float, expected_s: float, *, agent: bool) -> State:
    if how == "running":
        return "silent" if heard_s > expected_s else "running" if trains else "starting"
    if how in ("notice", "stopped"):
        return "stopped"
    if how == "failure" and agent and heard_s < RESTART_S:
        return "restarting"
    return "finished" if how == "finished" else "failed"
