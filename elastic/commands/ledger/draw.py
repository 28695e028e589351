"""Parts of inline SVG pictures: no script, no font; colours are classes that the page styles, light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

MAX_MARKS = 600


def svg(width: int, height: float, title: str, parts: Sequence[str], *, style: str = "") -> str:
    """The picture; ``style`` where it is to stand by itself."""
    alone = ' xmlns="http://www.w3.org/2000/svg"' if style else ""
    inner = f"<style>{style}</style>" if style else ""
    return (f'<svg{alone} viewBox="0 0 {width} {height:g}" role="img" aria-label="{escape(title)}">'
            f"<title>{escape(title)}</title>{inner}\n" + "\n".join(parts) + "\n</svg>")  # fmt: skip


def rect(kind: str, x: float, y: float, width: float, height: float, tip: str = "") -> str:
    """A box; ``tip`` is shown where the pointer rests on it."""
    inner = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{y:.1f}" width="{max(width, 0):.2f}" height="{height:.1f}">{inner}</rect>'
    )


def label(x: float, y: float, words: str, anchor: str = "middle", kind: str = "label") -> str:
    """Some words."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(kind: str, points: Iterable[tuple[float, float]]) -> str:
    """A line through points."""
    return f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers from ``low`` to ``high``."""
    raw = (high - low) / max(1, count)
    if not raw > 0:
        return [low]
    size = 10.0 ** math.floor(math.log10(raw))
    size *= next(m for m in (1, 2, 5, 10) if m * size >= raw * 0.999)
    first = math.ceil(low / size - 1e-9)
    return [round(n * size, 12) for n in range(first, math.floor(high / size + 1e-9) + 1)]


def clock_ticks(span_s: float, count: int) -> list[tuple[float, str]]:
    """About ``count`` round times within a span, each with its label."""
    raw = span_s / max(1, count)
    sizes = [1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600]
    sizes += [7200, 10_800, 21_600, 43_200, 86_400, 2 * 86_400, 7 * 86_400, 30 * 86_400, 365 * 86_400]
    size = next((s for s in sizes if s >= raw), sizes[-1])
    units = (("d", 86_400, 86_400), ("h", 3600, 3600), ("min", 60, 60), ("s", 1, 0))
    unit, each = next((unit, each) for unit, each, least in units if size >= least)
    count = math.floor(span_s / size + 1e-9)
    return [(n * size, f"{n * size / each:g} {unit}" if n else "0") for n in range(count + 1)]
