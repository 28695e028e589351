"""Pictures of a drill as inline SVG: no script, no font, no colour of their own (classes are styled by the page)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import TypeVar

from drills.checks import phases
from drills.history import Record
from drills.timeline import Log

M = TypeVar("M")

MAX_MARKS = 500
ROW, BAR = 34, 18


def timeline(record: Record, width: int) -> str | None:
    """Ranks over time: processes, steps, the fault, the way back, the commits; None without a drilled run."""
    run, seen = record.drilled, phases(record)
    if run is None or run.ended is None or not run.procs:
        return None
    ranks = sorted({p.rank for p in run.procs})
    left, right, top = 62, 14, 32
    span = max(run.ended - run.started, 0.001)

    def x(t: float) -> float:
        return left + (min(max(t, run.started), run.started + span) - run.started) / span * (width - left - right)

    parts = []
    bottom = top + ROW * (len(ranks) + 1)
    if seen and seen.first_step:
        parts.append(f'<rect class="gap" x="{x(seen.killed):.1f}" y="{top - 4}" height="{bottom - top}"'
                     f' width="{x(seen.first_step) - x(seen.killed):.1f}"><title>no training</title></rect>'
                     )  # fmt: skip
    for n, rank in enumerate(ranks):
        y = top + n * ROW
        parts.append(_text(left - 8, y + 14, f"rank {rank}", "end"))
        for p in (p for p in run.procs if p.rank == rank):
            end = p.ended or run.ended
            tip = f"pid {p.pid}, from {p.started - run.started:.2f} s to {end - run.started:.2f} s"
            wide = max(1.5, x(end) - x(p.started))
            parts.append(f'<rect class="proc" x="{x(p.started):.1f}" y="{y}" width="{wide:.1f}" height="{BAR}" rx="3">'
                         f"<title>{tip}</title></rect>")  # fmt: skip
        marks = [(x(line.t), line) for line in run.log.lines if line.rank == rank and line.t is not None]
        for mark, line in _thinned(marks):
            parts.append(f'<rect class="step" x="{mark - 0.6:.1f}" y="{y + 3}" width="1.2" height="{BAR - 6}">'
                         f"<title>step {line.step}</title></rect>")  # fmt: skip
        if seen and (strike := record.strike()) and strike["rank"] == rank:
            parts.append(f'<circle class="strike" cx="{x(seen.killed):.1f}" cy="{y + BAR / 2}" r="6">'
                         f"<title>{escape(str(strike['said']))}</title></circle>")  # fmt: skip
    parts.append(_commits(record, x, top + len(ranks) * ROW, left))
    if seen:
        parts += [_vertical(x(seen.killed), top - 20, bottom - 8, "fault", "killed", width)]
    for t in _ticks(0, span, max(3, width // 140)):
        parts.append(_text(x(run.started + t), bottom + 12, f"{t:g} s", "middle"))
    return _svg(width, bottom + 20, "Timeline of the drilled run", parts)


def curves(record: Record, width: int) -> str | None:
    """Loss over steps of both runs, laid over each other; None when one of them logged no loss."""
    control, drilled, seen = record.control, record.drilled, phases(record)
    if control is None or drilled is None:
        return None
    truth, kept = _mean_losses(control.log), _mean_losses(drilled.log)
    values = [v for v in (*truth.values(), *kept.values()) if math.isfinite(v)]
    if not truth or not kept or not values:
        return None
    left, right, top, height = 62, 14, 12, 210
    low, high = min(values), max(values)
    high = high if high > low else low + 1.0
    last = max(*truth, *kept, 2)

    def x(step: float) -> float:
        return left + (step - 1) / (last - 1) * (width - left - right)

    def y(loss: float) -> float:
        return top + (high - loss) / (high - low) * (height - top - 26)

    parts = []
    for v in _ticks(low, high, 4):
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>')
        parts.append(_text(left - 8, y(v) + 4, f"{v:.4g}", "end"))
    for s in _ticks(1, last, max(3, width // 140)):
        inside = x(s) < width - right - 20
        parts += [_text(x(s) if inside else width - right, height - 6, f"step {s:g}", "middle" if inside else "end")]
    parts.append(_line("control", [(x(s), y(v)) for s, v in sorted(truth.items()) if math.isfinite(v)]))
    parts.append(_line("drilled", [(x(s), y(v)) for s, v in sorted(kept.items()) if math.isfinite(v)]))
    again = set(seen.again) if seen else set()
    parts += [
        f'<circle class="again" cx="{x(s):.1f}" cy="{y(kept[s]):.1f}" r="3.2">'
        f"<title>step {s} was trained twice</title></circle>"
        for s in sorted(again & kept.keys()) if math.isfinite(kept[s])
    ]  # fmt: skip
    if seen:
        parts.append(_vertical(x(max(1, seen.last_before)), top - 4, height - 22, "fault", "killed", width))
    return _svg(width, height, "Loss of the control run and of the drilled run", parts)


def _commits(record: Record, x: object, y: float, left: int) -> str:
    run = record.drilled
    if run is None or not callable(x):
        return ""
    parts = [_text(left - 8, y + 14, "saved", "end")]
    shown_at = -math.inf
    for mark, c in _thinned([(x(c.seen), c) for c in run.commits if c.seen is not None]):
        parts.append(f'<path class="commit" d="M{mark:.1f} {y + 2} l5 5 l-5 5 l-5 -5 z"><title>step {c.step} seen'
                     f" committed</title></path>")  # fmt: skip
        if mark - shown_at > 30:
            parts.append(_text(mark, y + 25, str(c.step), "middle"))
            shown_at = mark
    return "".join(parts)


def _mean_losses(log: Log) -> dict[int, float]:
    by_step: dict[int, list[float]] = {}
    for line in log.effective().values():
        if line.loss is not None:
            by_step.setdefault(line.step, []).append(line.loss)
    return {step: math.fsum(v) / len(v) for step, v in by_step.items()}


def _thinned(marks: Sequence[M]) -> Sequence[M]:
    """At most ``MAX_MARKS`` of them, evenly."""
    stride = math.ceil(len(marks) / MAX_MARKS) or 1
    return marks[::stride]


def _ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers from ``low`` to ``high``."""
    raw = (high - low) / max(1, count)
    size = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    size *= next(m for m in (1, 2, 5, 10) if m * size >= raw * 0.999)
    first = math.ceil(low / size - 1e-9)
    return [round(n * size, 12) for n in range(first, math.floor(high / size + 1e-9) + 1)]


def _line(kind: str, points: Iterable[tuple[float, float]]) -> str:
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in _thinned(list(points)))
    return f'<polyline class="{kind}" points="{path}"/>'


def _vertical(x: float, y1: float, y2: float, kind: str, label: str, width: int) -> str:
    anchor, dx = ("start", 5) if x < width - 70 else ("end", -5)
    return (f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{y1}" y2="{y2}"/>'
            f"{_text(x + dx, y1 + 8, label, anchor, 'fault-label')}")  # fmt: skip


def _text(x: float, y: float, text: str, anchor: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: int, height: float, title: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (f'<svg viewBox="0 0 {width} {height:g}" role="img" aria-label="{escape(title)}">'
            f"<title>{escape(title)}</title>\n{body}\n</svg>")  # fmt: skip
