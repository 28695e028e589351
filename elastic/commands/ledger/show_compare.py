"""Runs side by side, as text for a person and as a record for programs."""

from __future__ import annotations

from typing import Any

from elastic.commands.economics.basis import wrapped
from elastic.commands.ledger.show_goodput import percent, table
from elastic.ledger.compare import Comparison, Entry
from elastic.units import show_duration as time
from elastic.units import show_number as number

SCHEMA = "elastic.compare/1"


def text(c: Comparison) -> str:
    """Which run is faster first, then how well devices are used, then the way to the same quality."""
    blocks = [wrapped(verdict(c)), _efficiency(c), _quality(c), wrapped([f"! {note}" for note in c.notes])]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def verdict(c: Comparison) -> list[str]:
    """Which run is faster, in sentences."""
    out = []
    quick, good = c.by_speed, c.by_quality
    if good:
        first = good[0]
        assert first.reached is not None
        sign = ">=" if c.higher else "<="
        out.append(f"Fastest to {c.metric} {sign} {number(c.target or 0, 4)}: {_called(first)}, after "
                   f"{time(first.reached.at_s)}{_ahead(good)}.")  # fmt: skip
        if quick and quick[0] is not first:
            out.append(_why(c, quick[0], first))
        never = [e.name for e in c.entries if e.reached is None and e.curve]
        if never:
            out.append(f"Not reached by {', '.join(never)}.")
    elif c.metric is not None and c.target is not None:
        out.append(f"No run has reached {c.metric} {number(c.target, 4)}.")
    if quick:
        lead = quick[0]
        out.append(f"Most {c.unit} a second: {_called(lead)}, {number(lead.speed or 0)} while training.")
    return out


def _called(e: Entry) -> str:
    return f"{e.name} ({e.world} device{'s' if e.world != 1 else ''})"


def _ahead(good: list[Entry]) -> str:
    if len(good) < 2 or good[0].reached is None or good[1].reached is None or not good[0].reached.at_s:
        return ""
    factor = good[1].reached.at_s / good[0].reached.at_s
    return f", {number(factor)} times as fast as {good[1].name} ({time(good[1].reached.at_s)})"


def _why(c: Comparison, quick: Entry, first: Entry) -> str:
    faster = (quick.speed or 0.0) / (first.speed or 1.0)
    words = f"{quick.name} does {number(faster)} times the {c.unit} a second of {first.name}, but "
    if quick.reached is None or first.reached is None or not first.reached.work:
        return words + "has not reached that quality."
    needs = quick.reached.work / first.reached.work
    if needs > 1.02:
        return words + f"needs {number(needs)} times as many: more {c.unit} a second is not faster here."
    return (
        words
        + f"was down for longer (goodput {percent(quick.account.goodput)} against {percent(first.account.goodput)})."
    )


def _efficiency(c: Comparison) -> list[str]:
    rows = [("run", "devices", f"{c.unit}/s", "a device", "efficiency", "all hours", "step p50", "goodput")]
    for e in c.entries:
        p50 = e.rates.times.at(0.5) or e.rates.step_s
        rows.append((e.name, str(e.world), number(e.speed or 0) if e.speed else "-",
                     number(e.speed / e.world) if e.speed else "-", percent(e.efficiency), percent(e.efficiency_wall),
                     time(p50) if p50 else "-", percent(e.account.goodput)))  # fmt: skip
    return table(rows)


def _quality(c: Comparison) -> list[str]:
    if c.metric is None or c.target is None:
        return []
    rows = [(f"to {c.metric} {number(c.target, 4)}", "time", "device-time", c.unit, "step", "best")]
    for e in c.entries:
        best = "-" if e.best is None else number(e.best, 4)
        if e.reached is None:
            rows.append((e.name, "not reached", "-", "-", "-", best))
        else:
            rows.append((e.name, time(e.reached.at_s), time(e.device_s or 0), number(e.reached.work),
                         f"{e.reached.step:,}", best))  # fmt: skip
    return table(rows)


def record(c: Comparison) -> dict[str, Any]:
    """Everything, schema ``elastic.compare/1``; seconds; null is not known."""
    return {
        "schema": SCHEMA, "unit": c.unit, "metric": c.metric, "target": c.target, "higher_is_better": c.higher,
        "verdict": verdict(c), "fastest_to_quality": c.by_quality[0].name if c.by_quality else None,
        "order_by_speed": [e.name for e in c.by_speed], "order_by_quality": [e.name for e in c.by_quality],
        "runs": [_run(e) for e in c.entries], "notes": list(c.notes),
    }  # fmt: skip


def _run(e: Entry) -> dict[str, Any]:
    r = e.reached
    return {
        "run": e.name, "world": e.world, "speed_per_s": e.speed, "wall_per_s": e.per_s, "efficiency": e.efficiency,
        "efficiency_wall": e.efficiency_wall, "step_s": {"p50": e.rates.times.at(0.5), "mean": e.rates.step_s},
        "goodput": e.account.goodput, "wall_s": e.account.wall_s, "steps": e.account.steps, "best": e.best,
        "reached": None if r is None else {"at_s": r.at_s, "device_s": e.device_s, "step": r.step, "work": r.work,
                                           "value": r.value},
        "curve": [{"at_s": p.at_s, "step": p.step, "work": p.work, "value": p.value} for p in e.curve],
    }  # fmt: skip
