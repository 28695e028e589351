"""Pictures of a comparison: speed against devices beside the ideal, and the metric against time."""

from __future__ import annotations

import math
from html import escape

from elastic.commands.ledger.draw import MAX_MARKS, clock_ticks, label, line, svg, ticks
from elastic.ledger.compare import Comparison
from elastic.units import show_duration as time
from elastic.units import show_number as number

LEFT, RIGHT = 64, 18
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#72b7b2", "#9d755d", "#bab0ac")
_ALONE = (
    "svg{background:#fff;color:#222;font:12px system-ui,sans-serif}text{fill:currentColor}"
    ".grid,.ideal,.target{stroke:currentColor;fill:none}.grid{opacity:.18}"
    ".ideal,.target{opacity:.55;stroke-dasharray:5 4}"
    "polyline{fill:none;stroke-width:2.2}@media(prefers-color-scheme:dark){svg{background:#161616;color:#ddd}}"
)
"""The style of a picture that stands by itself."""


def speed(c: Comparison, width: int, *, alone: bool = False) -> str | None:
    """Speed against devices, both on log scales, with the line of perfect scaling from the smallest run."""
    shown = [(e, e.speed) for e in c.entries if e.speed]
    if len({e.world for e, _ in shown}) < 2:
        return None
    base, base_speed = min(shown, key=lambda pair: (pair[0].world, -pair[1]))
    low, high = base.world, max(e.world for e, _ in shown)
    ideal = base_speed * high / low
    least = min(s for _, s in shown)
    top, height = 20, 230

    def x(world: float) -> float:
        return LEFT + 14 + math.log(world / low) / math.log(high / low) * (width - LEFT - RIGHT - 60)

    def y(s: float) -> float:
        return top + (math.log(ideal) - math.log(s)) / max(1e-9, math.log(ideal) - math.log(least * 0.85)) * height

    parts = [label(4, 12, f"{c.unit} a second while training", "start")]
    for world in sorted({e.world for e, _ in shown}):
        parts.append(f'<path class="grid" d="M{x(world):.1f} {top}V{top + height}"/>')
        parts.append(label(x(world), top + height + 16, f"{world} device{'s' if world != 1 else ''}"))
    parts.append(line("ideal", [(x(low), y(base_speed)), (x(high), y(ideal))]))
    parts.append(label(x(high) - 6, y(ideal) + 4, "ideal", "end"))
    for n, (e, s) in enumerate(shown):
        said = f"{e.name}: {number(s)}, {100 * (e.efficiency or 0):.0f} %"
        colour = COLOURS[c.entries.index(e) % len(COLOURS)]
        parts.append(f'<circle cx="{x(e.world):.1f}" cy="{y(s):.1f}" r="5.5" fill="{colour}">'
                     f"<title>{escape(said)}</title></circle>")  # fmt: skip
        anchor = "start" if n == 0 or x(e.world) < 0.7 * width else "end"
        parts.append(label(x(e.world) + (9 if anchor == "start" else -9), y(s) + 16, said, anchor))
    return svg(width, top + height + 26, "Speed against devices", parts, style=_ALONE if alone else "")


def quality(c: Comparison, width: int, *, alone: bool = False) -> str | None:
    """The metric against the time since each run's first start, with the target and where it was reached."""
    curves = [(n, e) for n, e in enumerate(c.entries) if len(e.curve) > 1]
    if not curves or c.metric is None:
        return None
    values = sorted(p.value for _, e in curves for p in e.curve)
    low, high = values[0], values[min(len(values) - 1, int(0.97 * len(values)))]
    span = max(p.at_s for _, e in curves for p in e.curve) or 1.0
    high = high if high > low else low + 1.0
    pad = 0.05 * (high - low)
    low, high = low - pad, high + pad
    top, height = 20, 230

    def x(at: float) -> float:
        return LEFT + at / span * (width - LEFT - RIGHT)

    def y(v: float) -> float:
        return top + (high - min(max(v, low), high)) / (high - low) * height

    parts = [label(4, 12, f"{c.metric} over time, down time included", "start")]
    for v in ticks(low, high, 4):
        parts.append(f'<path class="grid" d="M{LEFT} {y(v):.1f}H{width - RIGHT}"/>')
        parts.append(label(LEFT - 8, y(v) + 4, f"{v:.4g}", "end"))
    if c.target is not None:
        parts.append(line("target", [(LEFT, y(c.target)), (width - RIGHT, y(c.target))]))
    for n, e in curves:
        colour = COLOURS[n % len(COLOURS)]
        points = e.curve[:: -(-len(e.curve) // MAX_MARKS) or 1]
        parts.append(
            line("run", [(x(p.at_s), y(p.value)) for p in points]).replace("<polyline", f'<polyline stroke="{colour}"')
        )
        if e.reached is not None:
            said = f"{e.name}: after {time(e.reached.at_s)}"
            parts.append(f'<circle cx="{x(e.reached.at_s):.1f}" cy="{y(e.reached.value):.1f}" r="5.5" fill="{colour}">'
                         f"<title>{escape(said)}</title></circle>")  # fmt: skip
    parts += [label(x(t), top + height + 16, words, "middle" if t else "start")
              for t, words in clock_ticks(span, max(3, width // 120)) if t / span < 0.97]  # fmt: skip
    return svg(width, top + height + 26, f"{c.metric} against time", parts, style=_ALONE if alone else "")
