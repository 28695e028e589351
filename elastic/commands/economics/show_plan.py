"""The growth of a job as a record, a table, and one page with its curves."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from elastic.commands.economics.basis import WIDTH, wrapped
from elastic.economics import budget
from elastic.economics.scale import Scaling
from elastic.units import show_bytes, show_duration, show_number

SCHEMA = "elastic.plan/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What was asked."""

    scaling: Scaling
    training: budget.Training | None
    deadline_s: float | None
    marginal: float
    checkpoint_bytes: float | None
    storage_points: float
    people: dict[str, float]
    sizes: list[int]
    rests_on: str
    notes: tuple[str, ...] = ()


def answer(q: Question) -> dict[str, Any]:
    """All figures, in seconds, nodes, bytes and dollars."""
    scaling, per_node = q.scaling, q.scaling.job.devices_per_node
    rows = []
    for nodes in q.sizes:
        point = scaling.at(nodes)
        row: dict[str, Any] = {"devices": nodes * per_node, **asdict(point)}
        if q.checkpoint_bytes and not scaling.costs.tiers:
            background, blocking = budget.bandwidth_needed(scaling, q.checkpoint_bytes, nodes, q.storage_points)
            row["storage_bytes_per_s"] = {"background": background, "blocking": blocking}
        if q.training:
            row["bill"] = asdict(budget.bill(scaling, q.training, nodes, **q.people)) if point.goodput > 1e-6 else None
        rows.append(row)
    sensible, wall = scaling.size_where(q.marginal), scaling.wall
    out: dict[str, Any] = {
        "schema": SCHEMA,
        "rests_on": q.rests_on,
        "sizes": rows,
        "marginal": q.marginal,
        "sensible_devices": None if sensible is None else sensible * per_node,
        "wall_devices": None if wall is None else wall * per_node,
        "variants": [_variant(name, each, q.marginal, per_node) for name, each in budget.variants(scaling)],
    }
    if q.training and q.deadline_s:
        nodes = budget.nodes_for(scaling, q.training, q.deadline_s)
        out["deadline"] = {
            "seconds": q.deadline_s,
            "devices": nodes * per_node,
            **asdict(budget.bill(scaling, q.training, nodes, **q.people)),
        }
        if q.checkpoint_bytes and not scaling.costs.tiers:
            out["deadline"]["storage_bytes_per_s"] = budget.bandwidth_needed(
                scaling, q.checkpoint_bytes, nodes, q.storage_points
            )[0]
    return out


def _variant(name: str, scaling: Scaling, marginal: float, per_node: int) -> dict[str, Any]:
    sensible, wall = scaling.size_where(marginal), scaling.wall
    return {
        "name": name,
        "sensible_devices": sensible and sensible * per_node,
        "wall_devices": wall and wall * per_node,
    }


def text(q: Question, a: dict[str, Any]) -> str:
    """The table and the sentences to act on."""
    lines = []
    if deadline := a.get("deadline"):
        money = f", ${_big(deadline['usd'])}" if deadline["usd"] is not None else ""
        lines.append(
            f"{_big(deadline['devices'])} devices finish in {show_duration(deadline['wall_s'])} "
            f"at goodput {deadline['goodput']:.1%}:"
        )
        lines.append(
            f"{_big(deadline['device_hours'])} device-hours{money}, "
            f"{show_number(deadline['failures'])} failures on the way."
        )
        if deadline["interventions"]:
            lines.append(
                f"About {show_number(deadline['interventions'])} need a person: ${_big(deadline['people_usd'])}."
            )
        if "storage_bytes_per_s" in deadline:
            lines.append(
                f"Storage must take {show_bytes(deadline['storage_bytes_per_s'])}/s in the background "
                f"to cost at most {q.storage_points:g} point."
            )
        lines.append("")
    head = ["devices", "MTBF", "interval", "goodput", "next adds"]
    if q.scaling.efficiency.points:
        head.append("parallel")
    if q.checkpoint_bytes and not q.scaling.costs.tiers:
        head.append("storage")
    if q.training:
        head += ["time", "device-h"]
        head += ["cost"] if q.scaling.job.usd_per_device_hour else []
    table = [head, *(_cells(q, row) for row in a["sizes"])]
    lines += _table(table)
    lines.append("")
    lines.append(f"Up to {_size(a['sensible_devices'])} the next node still adds {q.marginal:.0%} of itself;")
    lines.append(f"beyond {_size(a['wall_devices'])} it takes away more than it adds (the reliability wall).")
    better = [v for v in a["variants"] if v["name"] != "as given"]
    lines += [f"  with {v['name']:<25} {_size(v['sensible_devices'])}, wall {_size(v['wall_devices'])}" for v in better]
    if q.training:
        t = q.training
        lines.append(
            f"At {t.mfu:.0%} MFU of {show_number(t.peak_flops / 1e12)} TFLOP/s, "
            f"{show_bytes(t.checkpoint_bytes)} a checkpoint."
        )
    if not q.scaling.efficiency.points:
        lines.append("Failures alone are counted; --measured adds what communication costs.")
    lines += wrapped([*(f"! {note}" for note in q.notes), q.rests_on])
    return "\n".join(lines)


def _table(rows: list[list[str]]) -> list[str]:
    """Columns ruled up; as two tables, each with the devices, where one would be wider than the screen."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if sum(widths) + 2 * len(widths) - 2 > WIDTH:
        cut = rows[0].index("storage" if "storage" in rows[0] else "time")
        return [*_table([row[:cut] for row in rows]), "", *_table([[row[0], *row[cut:]] for row in rows])]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _cells(q: Question, row: dict[str, Any]) -> list[str]:
    cells = [
        _big(row["devices"]),
        show_duration(row["mtbf_s"]),
        show_duration(row["interval_s"]),
        f"{row['goodput']:.1%}",
        f"{round(row['marginal'], 2) + 0.0:.0%}",
    ]
    if q.scaling.efficiency.points:
        cells.append(f"{row['efficiency']:.0%}")
    if "storage_bytes_per_s" in row:
        cells.append(show_bytes(row["storage_bytes_per_s"]["background"]) + "/s")
    if q.training:
        bill = row["bill"]
        cells += [show_duration(bill["wall_s"]), _big(bill["device_hours"])] if bill else ["never", "-"]
        if q.scaling.job.usd_per_device_hour:
            cells.append(f"${_big(bill['usd'])}" if bill else "-")
    return cells


def _size(devices: float | None) -> str:
    return "any size" if devices is None else f"{_big(devices)} devices"


def _big(value: float) -> str:
    for scale, unit in ((1e9, "B"), (1e6, "M")):
        if value >= scale:
            return f"{show_number(value / scale)}{unit}"
    return f"{value:,.0f}"


_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
_W, _H, _LEFT, _TOP = 720, 330, 60, 20


def page(q: Question, a: dict[str, Any]) -> str:
    """One self-contained page: goodput and useful devices against size, one curve a variant, and the table."""
    curves = [(name, _curve(scaling)) for name, scaling in budget.variants(q.scaling)]
    per_node = q.scaling.job.devices_per_node
    legend = "".join(
        f'<span><b style="color:{_COLOURS[i]}">&#9632;</b> {escape(name)}</span> ' for i, (name, _) in enumerate(curves)
    )
    goodput = _svg([[(n * per_node, g) for n, g, _ in c] for _, c in curves], "goodput", 1.0, lambda v: f"{v:.0%}")
    most = max(u for _, c in curves for _, _, u in c) * per_node
    decade = 10.0 ** math.floor(math.log10(most))
    most = next(k * decade for k in (1, 2, 4, 8, 10) if k * decade >= most)
    useful = _svg(
        [[(n * per_node, u * per_node) for n, _, u in c] for _, c in curves], "devices' worth of training", most, _big
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>How far the job can grow</title>'
        "<style>:root{color-scheme:light dark}body{font:15px/1.5 system-ui;"
        "max-width:760px;margin:2em auto;padding:0 1em}"
        "svg{width:100%;height:auto}text{font-size:12px;fill:currentColor}pre{overflow-x:auto}span{margin-right:1em}</style>"
        f"<h1>How far the job can grow</h1><p>{legend}</p><h2>Share of time that trains</h2>{goodput}"
        f"<h2>What all devices together are worth</h2>{useful}<pre>{escape(text(q, a))}</pre></html>\n"
    )


def _curve(scaling: Scaling) -> list[tuple[float, float, float]]:
    per_node = scaling.job.devices_per_node
    low, high = 10 / per_node, max(100_000, 4 * scaling._reference * per_node) / per_node
    out = []
    for i in range(121):
        nodes = low * (high / low) ** (i / 120)
        out.append((nodes, scaling.goodput(nodes)[0], scaling.useful_nodes(nodes)))
    return out


def _svg(curves: list[list[tuple[float, float]]], label: str, top: float, show: Any) -> str:
    low, high = math.log10(curves[0][0][0]), math.log10(curves[0][-1][0])
    width, height = _W - _LEFT - 32, _H - _TOP - 50

    def at(x: float, y: float) -> str:
        return (
            f"{_LEFT + (math.log10(x) - low) / (high - low) * width:.1f},{_TOP + (1 - max(y, 0.0) / top) * height:.1f}"
        )

    parts = [f'<svg viewBox="0 0 {_W} {_H}" role="img" aria-label="{escape(label)} against devices">']
    for k in range(5):
        y = _TOP + height * (1 - k / 4)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_LEFT + width}" stroke="currentColor" opacity=".2"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(show(top * k / 4))}</text>')
    for decade in range(math.ceil(low), math.floor(high) + 1):
        x = _LEFT + (decade - low) / (high - low) * width
        parts.append(f'<path d="M{x:.1f} {_TOP}V{_TOP + height}" stroke="currentColor" opacity=".2"/>')
        parts.append(f'<text x="{x:.1f}" y="{_H - 30}" text-anchor="middle">{10**decade:,}</text>')
    parts.append(f'<text x="{_LEFT + width / 2}" y="{_H - 8}" text-anchor="middle">devices</text>')
    for i, points in enumerate(curves):
        path = " ".join(at(x, y) for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_COLOURS[i]}" stroke-width="2"/>')
    return "".join(parts) + "</svg>"
