"""A plan as text for a person, as a picture of characters, and as a record for programs."""

from __future__ import annotations

import math
from dataclasses import asdict

from elastic.commands.economics.basis import WIDTH, rests_on, wrapped
from elastic.commands.economics.options import FLAGS, Asked
from elastic.economics.advice import flat_region, levers, rivals, sensitivity, total_time, what_reaches
from elastic.economics.inputs import given
from elastic.economics.interval import Plan
from elastic.units import show_duration as time
from elastic.units import show_number as number

SCHEMA = "elastic.interval/1"
_NOTHING = 1e-9
"""Goodput below which there is no forecast to give."""
_NEVER_S = 10_000 * 31_557_600.0
_NAMES = {
    "useful": "training", "save": "saving", "slowdown": "slower while uploading", "verify": "verifying",
    "rework": "work done again",
    "persist_lag": "work lost because its save was still uploading",
    "detect": "noticing failures", "reschedule": "getting machines",
    "recovery": "loading and warming up",
    "notice_save": "saving on notice",
}  # fmt: skip


def text(plan: Plan, asked: Asked, target: float | None) -> str:
    """The answer first, then forecast, waste, levers, comparison, and what it rests on."""
    blocks = [_answer(plan), [*_forecast(plan), *_waste(plan)], _levers(plan), _rivals(plan)]
    if target is not None:
        blocks.append(_target(plan, target))
    blocks.append([*wrapped([f"! {warning}" for warning in (*asked.notes, *plan.warnings)]), *_basis(plan, asked)])
    if every := in_code(plan):
        blocks[-1].append(f'In code: elastic.Run(url, state, every="{every}"), or every="auto".')
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _answer(plan: Plan) -> list[str]:
    every = time(plan.interval_s)
    if plan.steps is not None:
        every = f"{plan.steps:,} step{'s' if plan.steps != 1 else ''} ({every})"
    if plan.bound == "work":
        return wrapped([f"Save once, at the end: {every} of work are cheaper to repeat than to save in between."])
    what = "Save" if not plan.costs.tiers else f"Save to {plan.costs.tiers[0].name}"
    lines = [f"{what} every {every} of training, {number(plan.saves_per_day)} times a day."]
    names = [tier.name for tier in plan.costs.tiers[1:]] + ["durable storage"]
    if plan.costs.tiers:
        span = plan.interval_s
        for name, part in zip(names, plan.parts, strict=True):
            span *= part
            lines.append(f"Every {_ordinal(part)} of these also to {name}: every {time(span)}.")
    elif plan.parts:
        lines.append(
            f"Verify {plan.parts[0]} time{'s' if plan.parts[0] != 1 else ''} per checkpoint, the last just before it."
        )
    if not plan.goodput > _NOTHING:
        return wrapped(lines)
    low, high = flat_region(plan)
    steps = f" ({low / plan.job.step_s:,.0f} to {high / plan.job.step_s:,.0f} steps)" if plan.job.step_s else ""
    lines.append(f"Anything from {time(low)} to {time(high)}{steps} is within 0.1 point.")
    if not plan.rate.known:
        low, high = plan.interval_range_s
        lines.append(f"The failure rate is uncertain: the best interval may be {time(low)} to {time(high)}.")
    return wrapped(lines)


def _ordinal(n: int) -> str:
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n:,}{ending}"


def _forecast(plan: Plan) -> list[str]:
    low, high = plan.goodput_range
    span = "" if plan.rate.known else f", 95 %: {_percent(low)} to {_percent(high)}"
    lines = [f"Goodput {_percent(plan.goodput)} (share of wall time that trains{span})."]
    kind = "an unannounced one" if plan.rates.warned else "each"
    week, lost, most = plan.failures_per_week, plan.lost_per_failure_s, plan.lost_p95_s
    if math.isfinite(week + lost + most):
        lines.append(f"{number(week)} failures a week; {kind} loses {time(lost)} of work (1 in 20 over {time(most)}).")
    return wrapped([*lines, *_whole_job(plan)])


def _whole_job(plan: Plan) -> list[str]:
    """How long a job of known length takes, and what it costs where devices and price are known."""
    if plan.job.work_s is None:
        return []
    total, mean = total_time(plan), plan.expected_total_s
    mean = total.mean_s if total else mean
    if mean is None or not mean <= _NEVER_S:
        return ["The job never ends: in 10,000 years it is not done."]
    tail = f"; 1 in 20 times over {time(total.p95_s)}" if total and total.p95_s <= _NEVER_S else ""
    lines = [f"The job takes {time(mean)}{tail}."]
    if plan.job.devices is not None and plan.job.usd_per_device_hour is not None:
        hours, lost = (s * plan.job.devices / 3600 for s in (mean, max(mean - plan.job.work_s, 0.0)))
        usd = plan.job.usd_per_device_hour
        lines[0] += (
            f" These are {number(hours)} device-hours, ${number(hours * usd)}; "
            f"{number(lost)} of them, ${number(lost * usd)}, are lost."
        )
    return lines


def _waste(plan: Plan) -> list[str]:
    if not plan.goodput > _NOTHING:
        return wrapped(["Next to nothing is trained: almost every save or restart is struck before it ends."])
    parts = [(name, share) for name, share in asdict(plan.split).items() if share > 0 and name != "useful"]
    parts.sort(key=lambda part: -part[1])
    shown = [f"{_NAMES[name]} {number(100 * share, 2)}" for name, share in parts]
    return wrapped([f"Of 100 hours {number(100 * plan.goodput)} train. The rest: " + ", ".join(shown) + "."])


def _levers(plan: Plan) -> list[str]:
    rows = [lever for lever in levers(plan) if abs(lever.points) >= 0.1]
    if not rows:
        return []
    worse = [r for r in rows if r.points < 0]
    shown = [*[r for r in rows if r.points > 0][: 4 - len(worse)], *worse]
    return [
        "What to fix first (points of goodput gained)",
        *(line for lever in shown for line in _row(f"{lever.points:+.1f}", lever.change)),
    ]


def _row(head: str, body: str) -> list[str]:
    first, *rest = wrapped([body], WIDTH - 9) or [""]
    return [f"  {head:>5}  {first}", *(" " * 9 + line for line in rest)]


def _rivals(plan: Plan) -> list[str]:
    rows: list[str] = []
    for rival in rivals(plan) if plan.goodput > _NOTHING else ():
        if rival.name in ("Young 1974", "Daly 2006") and rival.points < 0.05:
            continue
        if rival.name == "half of it" and plan.job.current_s is not None:
            continue
        loss = f"{max(rival.points, 0.0):.2f} points"
        if rival.device_hours_per_day is not None and rival.points >= 0.005:
            loss += f"  {number(rival.device_hours_per_day)} device-hours"
            loss += f"  ${number(rival.usd_per_day)}" if rival.usd_per_day is not None else ""
            loss += " a day"
        rows.append(f"  {rival.name:<11} {time(rival.interval_s):>9}  {loss}")
    return ["Other intervals cost", *rows] if rows else []


def _target(plan: Plan, target: float) -> list[str]:
    found = what_reaches(plan, target)
    if not found:
        return [f"Goodput {_percent(target)} is reached."]
    lines = [f"To reach {_percent(target)}, one of these alone"]
    for reach in found:
        needed = "cannot" if reach.needed_s is None else f"{time(reach.needed_s)} instead of {time(reach.now_s)}"
        lines.append(f"  {FLAGS[reach.field]:<12} {needed}")
    return lines


def _basis(plan: Plan, asked: Asked) -> list[str]:
    tail = {
        "persist": "as short as uploads allow",
        "step": "one step is longer than the optimum",
        "minimum": "held at --min",
        "maximum": "held at --max",
    }
    model = plan.model.name + (f"; {tail[plan.bound]}" if plan.bound in tail else "")
    return wrapped([f"{rests_on(plan.rate, plan.costs, asked)} Model: {model}."])


def in_code(plan: Plan) -> str | None:
    """The cadence to write in the training script; None for what ``elastic.Run`` has no cadence for."""
    if plan.parts or plan.bound == "work":
        return None
    if plan.steps is not None:
        return f"{plan.steps} steps"
    low, high = flat_region(plan)
    if plan.interval_s < 60:
        return f"{number(plan.interval_s)}s"
    for unit_s, unit in ((3600.0, "h"), (60.0, "m"), (1.0, "s")):
        count = round(plan.interval_s / unit_s)
        if count and low <= count * unit_s <= high:
            return f"{count}{unit}"
    return f"{round(plan.interval_s)}s"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if 0.1 <= share < 0.995 else f"{100 * share:.3g} %"


def plot(plan: Plan, rows: int = 12, columns: int = 61) -> str:
    """Goodput against the interval on a log axis; ``o`` is the optimum, ``.`` the range that the MTBF leaves open."""
    curve = sensitivity(plan, columns)
    values = [v for point in curve for v in (point[1:] if not plan.rate.known else point[1:2])]
    top, bottom = max(values), max(0.0, min(values))
    bottom = max(bottom, top - 0.5)
    grid = [[" "] * columns for _ in range(rows)]

    def row(value: float) -> int:
        return min(rows - 1, max(0, round((top - value) / max(top - bottom, 1e-9) * (rows - 1))))

    for x, (_, best, worse, better) in enumerate(curve):
        if not plan.rate.known:
            for y in range(row(better), row(worse) + 1):
                grid[y][x] = "."
        if best >= bottom - 1e-12:
            grid[row(best)][x] = "*"
    middle = columns // 2
    grid[row(plan.goodput)][middle] = "o"
    lines = [
        "",
        "Goodput against the interval" + ("" if plan.rate.known else " (dots: 95 % range of the failure rate)"),
    ]
    for y, cells in enumerate(grid):
        share = top - (top - bottom) * y / (rows - 1)
        lines.append(f"{100 * share:6.1f} % |{''.join(cells).rstrip()}")
    marks = [(0, curve[0][0]), (middle, plan.interval_s), (columns - 1, curve[-1][0])]
    axis = [" "] * (columns + 12)
    for at, value in marks:
        label = time(value)
        start = 9 + at - len(label) // 2
        axis[start : start + len(label)] = label
    return "\n".join([*lines, " " * 9 + "+" + "-" * columns, "".join(axis).rstrip()])


def record(plan: Plan, asked: Asked, target: float | None) -> dict[str, object]:
    """All of it, exact, in seconds and shares; ``null`` where nothing is known."""
    low, high = flat_region(plan)
    total = total_time(plan)
    out: dict[str, object] = {
        "schema": SCHEMA,
        "interval_s": plan.interval_s,
        "steps": plan.steps,
        "saves_per_day": plan.saves_per_day,
        "pattern": list(plan.parts),
        "interval_range_s": list(plan.interval_range_s),
        "flat_region_s": [low, high],
        "bound": plan.bound,
        "goodput": plan.goodput,
        "goodput_range": list(plan.goodput_range),
        "waste": asdict(plan.split),
        "mtbf_s": plan.mtbf_s,
        "mtbf_range_s": list(plan.rate.mtbf_range_s()),
        "failures_per_week": plan.failures_per_week,
        "lost_per_failure_s": plan.lost_per_failure_s,
        "lost_per_failure_p95_s": plan.lost_p95_s,
        "segments": plan.segments,
        "total_s": None
        if total is None and plan.expected_total_s is None
        else {
            "mean": total.mean_s if total else plan.expected_total_s,
            "p50": total.p50_s if total else None,
            "p95": total.p95_s if total else None,
        },
        "levers": [asdict(lever) for lever in levers(plan)],
        "rivals": [asdict(rival) for rival in rivals(plan)],
        "warnings": [*asked.notes, *plan.warnings],
        "every": in_code(plan),
        "model": plan.model.name,
        "inputs": {"rates": given(plan.rates), "costs": given(plan.costs), "job": given(plan.job)},
        "checkpoint_bytes": asked.checkpoint_bytes,
        "provenance": {"rate": plan.rate.source, **{k: v for k, v in asked.provenance.items() if k != "rate"}},
    }
    if target is not None:
        out["target"] = {"goodput": target, "reached_by": [r._asdict() for r in what_reaches(plan, target)]}
    return _plain(out)


def _plain(value: object) -> dict[str, object]:
    """The same with numbers that JSON cannot say turned into null."""
    assert isinstance(value, dict)

    def clean(v: object) -> object:
        if isinstance(v, dict):
            return {k: clean(x) for k, x in v.items()}
        if isinstance(v, (list, tuple)):
            return [clean(x) for x in v]
        return None if isinstance(v, float) and not math.isfinite(v) else v

    return {k: clean(v) for k, v in value.items()}
