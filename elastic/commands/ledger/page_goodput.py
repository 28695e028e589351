"""The account as one HTML page that needs nothing else: no script, no network, light and dark, readable on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from elastic.commands.ledger import plots_goodput
from elastic.commands.ledger.show_goodput import QUANTILES, Told, how, moment, percent, split
from elastic.ledger.goodput import CAUSES, PRODUCTIVE
from elastic.units import show_duration, show_number

# Two drawings of each picture, for a desk and for a phone: scaled text would be unreadable on one of them.
WIDE, NARROW = 960, 350
_STARTS = 200


def environment() -> jinja2.Environment:
    """What all pages of the commands are rendered with."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    env.filters |= {"duration": show_duration, "number": show_number, "percent": percent, "moment": moment}
    return env


def picture(draw: Any, *arguments: Any) -> tuple[Markup, Markup] | None:
    """Both drawings; None where there is nothing to draw."""
    wide, narrow = draw(*arguments, WIDE), draw(*arguments, NARROW)
    return None if wide is None or narrow is None else (Markup(wide), Markup(narrow))


def page(told: Told) -> str:
    """Render the page."""
    a, r = told.account, told.rates
    productive = sum(a.seconds[c] for c in PRODUCTIVE)
    lost = sorted(((s, c) for c, s in a.seconds.items() if c not in PRODUCTIVE and s > 0), reverse=True)
    return environment().get_template("goodput.html.j2").render(
        told=told, a=a, r=r, productive=productive, worst=lost[0] if lost else None, causes=CAUSES,
        hours=picture(plots_goodput.hours, a), timeline=picture(plots_goodput.timeline, a),
        steps=picture(plots_goodput.steps, r), ranks=picture(plots_goodput.ranks, r),
        quantiles=[(f"p{100 * q:.0f}", r.times.at(q)) for q in QUANTILES if r.times.n],
        parts=[(p, how(p), _goodput(p)) for p in a.parts[:_STARTS]], more=max(0, len(a.parts) - _STARTS),
        split=[(x, split(x, r.device)) for x in r.ranks],
        notes=[*told.notes, *a.notes], unverified=told.unverified,
        cost=None if told.price is None else told.price * sum(a.device_s.values()) / 3600,
    )  # fmt: skip


def _goodput(part: Any) -> float | None:
    lasted = part.ended - part.began
    return sum(part.seconds[c] for c in PRODUCTIVE) / lasted if lasted > 0 else None
