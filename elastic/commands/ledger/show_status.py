"""How a run stands, as text for a person, as a line for a log, and as a record for programs."""

from __future__ import annotations

from typing import Any

from elastic.commands.economics.basis import wrapped
from elastic.commands.ledger.show_goodput import moment, percent
from elastic.ledger.ends import printable
from elastic.ledger.status import Status
from elastic.units import show_duration as time
from elastic.units import show_number as number

SCHEMA = "elastic.status/1"
_GOOD = ("running", "starting", "restarting", "finished", "stopped")
EXIT_STATUS = {**dict.fromkeys(_GOOD, 0), "failed": 1, "silent": 3}
COLOURS = {
    "running": "green",
    "starting": "cyan",
    "restarting": "yellow",
    "finished": "green",
    "stopped": "cyan",
    "failed": "bold red",
    "silent": "yellow",
}
_METRICS = 8


def facts(s: Status) -> list[tuple[str, str]]:
    """What a person wants to know, as (label, words); the first is the state."""
    out = [("state", _state(s))]
    step = f"{s.step:,} on {s.world} rank{'s' if s.world != 1 else ''}"
    if s.recent_step_s:
        spread = f", p99 {time(s.recent_p99_s)}" if s.recent_p99_s else ""
        step += f", {time(s.recent_step_s)} each{spread}"
    out.append(("step", step))
    for name, speed in s.recent_counted.items():
        out.append((name, f"{number(speed)} a second, {number(speed / s.world)} a device"))
    out.append(("durable", _durable(s)))
    a = s.account
    out.append(
        ("goodput", f"{percent(a.goodput)} of {time(a.wall_s)}, {len(a.parts)} start{'s' if len(a.parts) != 1 else ''}")
    )
    shown = list(s.metrics.items())[:_METRICS]
    out += [(printable(name), f"{number(value, 4)} at step {step:,}") for name, (step, value) in shown]
    if len(s.metrics) > len(shown):
        out.append(("…", f"{len(s.metrics) - len(shown)} more metrics: --json"))
    return out


def _state(s: Status) -> str:
    ago = f"{time(max(0.0, s.heard_s))} ago"
    if s.heard_s < -1:
        ago = f"{time(-s.heard_s)} in the future (clocks disagree)"
    said = {
        "running": f"running; last word {ago}",
        "starting": f"starting; last word {ago}",
        "silent": f"silent: last word {ago}, one was due within {time(s.expected_s)}; dead, hanging or cut off",
        "finished": f"finished {ago}",
        "stopped": f"stopped {ago}" + (f" ({s.why})" if s.why else "") + ": start the same command to go on",
        "restarting": f"down; a rank failed {ago}, its agent may start the job again: {s.why}",
        "failed": f"failed {ago}, and nobody has gone on: {s.why}",
    }  # fmt: skip
    return said[s.state]


def _durable(s: Status) -> str:
    if s.durable_step is None or s.durable_s is None:
        words = "no step yet"
    else:
        words = f"step {s.durable_step:,}, {time(max(0.0, s.durable_s))} ago"
        if s.step > s.durable_step and s.state in ("running", "silent", "failed"):
            words += f"; {s.step - s.durable_step:,} steps at risk"
    if s.failed_saves:
        words += f"; ! {s.failed_saves} save{'s' if s.failed_saves != 1 else ''} failed since"
    return words + ("; one is being written" if s.saving and s.state == "running" else "")


def text(s: Status, notes: tuple[str, ...]) -> str:
    """A few aligned lines."""
    rows = facts(s)
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {words}" for name, words in rows]
    return "\n".join([*lines, *wrapped([f"! {note}" for note in (*notes, *s.account.notes)])])


def line(s: Status) -> str:
    """All in one line, for a log."""
    return f"{moment(s.now)}  {s.state}  step {s.step:,}" + (
        f"  {time(s.recent_step_s)} each" if s.recent_step_s else ""
    ) + f"  durable {_durable(s)}"  # fmt: skip


def record(s: Status, url: str, notes: tuple[str, ...]) -> dict[str, Any]:
    """Everything, schema ``elastic.status/1``; seconds; null is not known."""
    return {
        "schema": SCHEMA, "url": url, "at": moment(s.now), "state": s.state, "exit_status": EXIT_STATUS[s.state],
        "why": s.why or None, "world": s.world, "step": s.step, "heard_s": s.heard_s, "expected_s": s.expected_s,
        "durable_step": s.durable_step, "durable_s": s.durable_s, "saving": s.saving, "failed_saves": s.failed_saves,
        "recent_step_s": {"mean": s.recent_step_s, "p50": s.recent_p50_s, "p99": s.recent_p99_s},
        "per_s": s.recent_counted,
        "metrics": {k: {"step": step, "value": _finite(v)} for k, (step, v) in s.metrics.items()},
        "starts": len(s.account.parts), "goodput": s.account.goodput, "wall_s": s.account.wall_s,
        "notes": [*notes, *s.account.notes],
    }  # fmt: skip


def _finite(value: float) -> float | str:
    return value if value - value == 0 else str(value)
