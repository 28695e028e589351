"""The report as one HTML page that needs nothing else: no script, no network, readable on a phone."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from drills.checks import Check, overall, phases
from drills.history import Record
from drills.report import plots
from drills.report.document import utc
from drills.report.story import replay_line, tell
from drills.scenario import Scenario

# Two drawings of each picture, for a desk and for a phone: scaled text would be unreadable on one of them.
WIDE, NARROW = 960, 350
SHOWN_DIFFERENCES = 20


def page(record: Record, scenario: Scenario, checks: Sequence[Check]) -> str:
    """Render the page."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    verdict = overall(checks, record)
    return env.get_template("page.html.j2").render(
        record=record, scenario=scenario, checks=checks, story=tell(record, scenario, checks),
        verdict=verdict.value, kind=verdict.name.lower(), started=utc(record.started),
        seconds=None if record.ended is None else record.ended - record.started,
        phases=_phase_rows(record), timeline=_picture(record, plots.timeline), curves=_picture(record, plots.curves),
        differences=_differences(record), runs=list(record.runs.values()),
        command=shlex.join(record.plan.command).replace("'{", "{").replace("}'", "}"),
        replay=replay_line(record.plan, record.moment), ledger=_ledger(record),
    )  # fmt: skip


def _picture(record: Record, draw: Any) -> tuple[Markup, Markup] | None:
    wide, narrow = draw(record, WIDE), draw(record, NARROW)
    return None if wide is None or narrow is None else (Markup(wide), Markup(narrow))


def _phase_rows(record: Record) -> list[dict[str, Any]]:
    """The phases one after another: when each ended after the fault, and where its bar starts and ends in percent."""
    seen = phases(record)
    if seen is None:
        return []
    marks = [
        ("noticed", seen.noticed), ("first new process", seen.restarted), ("every rank has a process", seen.complete),
        ("first new step", seen.first_step), ("caught up with the lost work", seen.caught_up),
    ]  # fmt: skip
    whole = max((t for _, m in marks if (t := seen.after(m)) is not None), default=0.0) or 1.0
    rows, before = [], 0.0
    for name, moment in marks:
        at = seen.after(moment)
        end = before if at is None else max(before, at)
        rows.append({"name": name, "at": at, "took": None if at is None else end - before,
                     "from_pc": before / whole * 100, "width_pc": max(0.6, (end - before) / whole * 100)})  # fmt: skip
        before = end
    return rows


def _differences(record: Record) -> list[dict[str, Any]]:
    """The first entries that differ in the earliest step in which any does."""
    answer = record.compared.get(("control", "drilled"), {})
    for pair in answer.get("pairs", ()):
        if pair.get("differences"):
            return [{"step": pair["step"], **d} for d in pair["differences"][:SHOWN_DIFFERENCES]]
    return []


def _ledger(record: Record) -> list[str]:
    run = record.drilled
    events = (run.storage or {}).get("ledger", []) if run else []
    return [json.dumps(e) for e in events]
