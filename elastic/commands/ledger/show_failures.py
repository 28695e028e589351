"""Ends and recoveries of a run, as text for a person and as a record for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic.commands.economics.basis import wrapped
from elastic.commands.ledger.show_goodput import how, moment, table
from elastic.ledger.goodput import Account
from elastic.ledger.recoveries import PHASES, Recovery, summary
from elastic.units import show_duration as time

SCHEMA = "elastic.failures/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What there is to show; ``shown`` are the newest of ``all``."""

    url: str
    account: Account
    all: tuple[Recovery, ...]
    shown: tuple[Recovery, ...]
    budgets: Mapping[str, float]
    notes: tuple[str, ...]


def text(told: Told) -> str:
    """The count first, then each, then the phases over all, warnings, and how the run stands."""
    blocks = [_head(told), *(_one(n, r, told) for n, r in _numbered(told)), _summary(told)]
    blocks.append(wrapped([f"! {note}" for note in (*told.notes, *told.account.notes)]))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _numbered(told: Told) -> list[tuple[int, Recovery]]:
    return [(len(told.all) - len(told.shown) + n, r) for n, r in enumerate(told.shown, 1)]


def _head(told: Told) -> list[str]:
    a = told.account
    failed = [p for p in a.parts if p.end.how == "failure"]
    noticed = sum(p.end.how == "notice" for p in a.parts)
    lasted = time(a.wall_s)
    counts = f"{len(failed)} failure{'s' if len(failed) != 1 else ''}"
    if noticed:
        counts += f" and {noticed} stop{'s' if noticed != 1 else ''} in time"
    lines = [f"{counts} in {lasted}, {len(a.parts)} start{'s' if len(a.parts) != 1 else ''}."]
    lost = sum(p.steps_lost for p in failed)
    if lost:
        lines.append(
            f"{lost:,} step{'s were' if lost != 1 else ' was'} lost and done again: {time(a.seconds['lost'])}."
        )
    last = a.parts[-1]
    if last.end.how == "failure":
        at = f"at {moment(last.end.died)}, step {last.steps[1]:,}"
        lines.append(f"Nobody has gone on since the last, {at}: {how(last)}.")
    elif last.end.how == "running":
        lines.append(
            f"The last start, number {last.attempt.number}, had not ended at its last word, {moment(a.ended)}."
        )
    shown = len(told.shown)
    if shown < len(told.all):
        lines.append(f"Showing the last {shown} of {len(told.all)}.")
    return wrapped(lines)


def _one(n: int, r: Recovery, told: Told) -> list[str]:
    before, end = r.before, r.end
    lines = wrapped([
        f"{n}. {moment(end.died)}  start {before.attempt.number}, {before.attempt.world} ranks, after step "
        f"{before.steps[1]:,}",
        f"{how(before)}",
    ])  # fmt: skip
    lost = f"{before.steps_lost:,} steps again ({time(r.lost_s)})" if before.steps_lost else "no step"
    lines += [f"lost {lost}; went on from step {r.after.steps[0]:,}", _back(r)]
    rows = [("", "took", "")]
    over = {p: limit for p, _, limit in r.over(told.budgets)}
    words = {**PHASES, **({"respawn": "a new job: machines, or somebody to start it"} if r.waited else {})}
    words |= {phase: f"! over its budget of {time(limit)}" for phase, limit in over.items()}
    rows += [(phase, time(s), words[phase]) for phase in PHASES if (s := r.phases[phase]) is not None]
    rows += [(phases, time(s), "not told apart: the ledger does not know") for phases, s in r.unsplit.items()]
    if "total" in over:
        rows.append(("total", time(r.total_s or 0.0), f"! over its budget of {time(over['total'])}"))
    return [lines[0], *(f"   {x}" for x in [*lines[1:], *table(rows[1:], (0, 2))])]


def _back(r: Recovery) -> str:
    if r.total_s is None:
        return "no new step was made"
    caught = f", caught up after {time(r.caught_up_s)}" if r.caught_up_s is not None and r.before.steps_lost else ""
    return f"first new step after {time(r.total_s)}{caught}"


def _summary(told: Told) -> list[str]:
    known = summary(list(told.all))
    if len(told.all) < 2 or not known:
        return []
    count = len(told.all)
    rows = [("over all", "median", "longest", "budget")]
    rows += [(f"  {p}", time(mid), time(most), time(told.budgets[p])) for p, (mid, most) in known.items()]
    over = sum(bool(r.over(told.budgets)) for r in told.all)
    said = [f"! {over} of {count} ways back went over a budget."] if over else ["No way back went over a budget."]
    return [*table(rows), *said]


def record(told: Told) -> dict[str, Any]:
    """Everything, schema ``elastic.failures/1``; seconds; null is not known."""
    a = told.account
    return {
        "schema": SCHEMA, "url": told.url, "wall_s": a.wall_s, "running": a.running, "starts": len(a.parts),
        "failures": sum(p.end.how == "failure" for p in a.parts), "budgets_s": dict(told.budgets),
        "recoveries": [_entry(n, r, told) for n, r in _numbered(told)],
        "phases_s": {p: {"median": mid, "longest": most} for p, (mid, most) in summary(list(told.all)).items()},
        "last": {"start": a.parts[-1].attempt.number, "how": a.parts[-1].end.how, "cause": a.parts[-1].end.cause},
        "notes": [*told.notes, *a.notes],
    }  # fmt: skip


def _entry(n: int, r: Recovery, told: Told) -> dict[str, Any]:
    b, end = r.before, r.end
    return {
        "number": n, "start": b.attempt.number, "epoch": b.attempt.epoch, "world": b.attempt.world, "how": end.how,
        "cause": end.cause, "rank": end.rank, "at": moment(end.died), "certain": end.certain, "step": b.steps[1],
        "went_on_from": r.after.steps[0], "steps_lost": b.steps_lost, "lost_s": r.lost_s,
        "phases_s": dict(r.phases), "unsplit_s": dict(r.unsplit), "total_s": r.total_s, "caught_up_s": r.caught_up_s,
        "waited_for_a_job": r.waited,
        "over_budget": [{"phase": p, "seconds": s, "budget_s": limit} for p, s, limit in r.over(told.budgets)],
    }  # fmt: skip
