"""Goodput against the interval as one SVG, and as a page around it: self-contained, no script, no outside reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from elastic.economics.advice import daly_s, rivals, sensitivity, young_s
from elastic.economics.interval import Plan
from elastic.units import show_duration as time

Scale = Callable[[float], float]
_W, _H, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 380, 62, 20, 34, 64
_STYLE = (
    ".elastic{font:13px system-ui,sans-serif;color:#222;background:#fff}.elastic text{fill:currentColor}"
    ".elastic .grid{stroke:currentColor;opacity:.15}.elastic .band{fill:#4c78a8;opacity:.2}"
    ".elastic .curve{fill:none;stroke:#4c78a8;stroke-width:2.5}.elastic .flat{stroke:#54a24b;stroke-width:5;opacity:.5}"
    ".elastic .mark{stroke:currentColor;stroke-dasharray:3 3}.elastic .dot{stroke:#fff;stroke-width:1.5}"
    "@media(prefers-color-scheme:dark){.elastic{color:#ddd;background:#161616}}"
)
_COLOURS = {"best": "#54a24b", "in use": "#e45756", "Young": "#f58518", "Daly": "#b279a2"}


def marks(plan: Plan) -> list[tuple[str, float]]:
    """(name, interval): the best one, Young's and Daly's for one tier, the one in use."""
    out = [("best", plan.interval_s)]
    save = plan.costs.effective_save_s
    if save > 0 and not plan.costs.tiers:
        out += [("Young", young_s(plan.mtbf_s, save)), ("Daly", daly_s(plan.mtbf_s, save))]
    if plan.job.current_s is not None:
        out.append(("in use", plan.job.current_s))
    return out


def svg(plan: Plan) -> str:
    """The curve on a log axis, its 95 % band where the failure rate is not known, and the marks."""
    at_s = marks(plan)
    widest = max(max(x / plan.interval_s, plan.interval_s / x) for _, x in at_s)
    curve = sensitivity(plan, points=121, span=max(30.0, 1.5 * widest))
    low, high = math.log(curve[0][0]), math.log(curve[-1][0])
    top = max(max(point[1:]) for point in curve)
    top = min(1.0, math.ceil(top * 20 + 0.2) / 20)

    def x(interval_s: float) -> float:
        return _LEFT + (math.log(interval_s) - low) / (high - low) * (_W - _LEFT - _RIGHT)

    def y(goodput: float) -> float:
        return _TOP + (1 - max(goodput, 0.0) / top) * (_H - _TOP - _BOTTOM)

    parts = _axes(x, y, top, curve[0][0], curve[-1][0])
    if not plan.rate.known:
        edge = [(t, worse) for t, _, worse, _ in curve] + [(t, better) for t, _, _, better in reversed(curve)]
        points = " ".join(f"{x(t):.1f},{y(g):.1f}" for t, g in edge)
        parts.append(f'<polygon class="band" points="{points}"><title>95 % range of the failure rate</title></polygon>')
    points = " ".join(f"{x(t):.1f},{y(g):.1f}" for t, g, _, _ in curve)
    parts.append(f'<polyline class="curve" points="{points}"/>')
    parts += _marks(plan, at_s, x, y)
    return (
        f'<svg class="elastic" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_W} {_H}" role="img" '
        f'aria-label="goodput against the checkpoint interval"><style>{_STYLE}</style>{"".join(parts)}</svg>\n'
    )


def _axes(x: Scale, y: Scale, top: float, first: float, last: float) -> list[str]:
    parts = []
    for k in range(6):
        share = top * k / 5
        parts.append(f'<path class="grid" d="M{_LEFT} {y(share):.1f}H{_W - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    ticks = [1e-3, 1e-2, 0.1, 1, 10, 60, 600, 3600, 6 * 3600, 86_400, 7 * 86_400, 30 * 86_400, 365 * 86_400]
    for tick in (t for t in ticks if first <= t <= last):
        parts.append(f'<path class="grid" d="M{x(tick):.1f} {_TOP}V{_H - _BOTTOM}"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{_H - _BOTTOM + 18}" text-anchor="middle">{time(tick)}</text>')
    parts.append(
        f'<text x="{(_LEFT + _W - _RIGHT) / 2}" y="{_H - _BOTTOM + 38}" text-anchor="middle">'
        "training between saves</text>"
    )
    parts.append(f'<text x="8" y="{_TOP - 16}">goodput: share of wall time that trains</text>')
    return parts


def _marks(plan: Plan, at_s: list[tuple[str, float]], x: Scale, y: Scale) -> list[str]:
    parts, legend = [], 8
    for name, interval in at_s:
        gain, colour = plan.goodput_at(interval), _COLOURS[name]
        said = f"{name}: {time(interval)}, {gain:.1%}"
        parts.append(f'<path class="mark" d="M{x(interval):.1f} {y(gain):.1f}V{_H - _BOTTOM}"/>')
        parts.append(
            f'<circle class="dot" cx="{x(interval):.1f}" cy="{y(gain):.1f}" r="6" fill="{colour}">'
            f"<title>{escape(said)}</title></circle>"
        )
        parts.append(f'<circle cx="{legend + 6}" cy="{_H - 10}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{legend + 16}" y="{_H - 6}">{escape(said)}</text>')
        legend += 24 + 7 * len(said)
    return parts


def page(plan: Plan, text: str) -> str:
    """The picture, the intervals beside it, and the answer as it is printed."""
    rows = "".join(
        f"<tr><td>{escape(r.name)}<td>{time(r.interval_s)}<td>{r.goodput:.1%}<td>{max(r.points, 0.0):.2f}"
        for r in rivals(plan)
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>How often to save</title>'
        "<style>:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:760px;margin:2em auto;"
        "padding:0 1em}svg{width:100%;height:auto}pre{overflow-x:auto}td,th{padding-right:1em;text-align:left}</style>"
        f"<h1>How often to save</h1>{svg(plan)}"
        "<table><tr><th>interval<th>training between saves<th>goodput<th>points lost"
        f"{rows}</table><pre>{escape(text)}</pre></html>\n"
    )
