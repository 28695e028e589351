"""Pictures of an account: the hours by cause, each rank's time line, step times, and what a step is made of."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from statistics import median

from elastic.commands.ledger.draw import MAX_MARKS, clock_ticks, label, rect, svg, ticks
from elastic.commands.ledger.show_goodput import split
from elastic.ledger.attempts import Stay
from elastic.ledger.events import SaveCommitted, SaveStarted
from elastic.ledger.goodput import CAUSES, Account, Part, Slice
from elastic.ledger.rates import Rates
from elastic.units import show_duration as time

LEFT, RIGHT, ROW, BAR = 64, 16, 30, 18
_RANKS = 32


def hours(account: Account, width: int) -> str:
    """The wall time in columns, each cut in the causes that filled it."""
    top, height, columns = 8, 150, max(40, width // 9)
    wide = (width - LEFT - RIGHT) / columns
    each = account.wall_s / columns or 1.0
    filled = [dict.fromkeys(CAUSES, 0.0) for _ in range(columns)]
    for piece in account.slices:
        _pour(piece, account.began, each, filled)
    parts = []
    for share in (0, 0.5, 1):
        y = top + (1 - share) * height
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{width - RIGHT}"/>')
        parts.append(label(LEFT - 8, y + 4, f"{share:.0%}", "end"))
    for n, column in enumerate(filled):
        y = float(top + height)
        whole = sum(column.values()) or 1.0
        for cause, seconds in column.items():
            if seconds / whole > 1e-3:
                tall = height * seconds / whole
                y -= tall
                parts.append(rect(f"c-{cause}", LEFT + n * wide, y, wide + 0.1, tall, f"{cause}: {time(seconds)}"))
    parts += _times(account, width, top + height + 16)
    return svg(width, top + height + 24, "What the hours went into, over time", parts)


def _pour(piece: Slice, began: float, each: float, filled: list[dict[str, float]]) -> None:
    length = piece.end - piece.start
    n = min(len(filled) - 1, int((piece.start - began) / each))
    at = piece.start
    while at < piece.end and n < len(filled):
        until = min(piece.end, began + (n + 1) * each) if n + 1 < len(filled) else piece.end
        for cause, seconds in piece.parts.items():
            filled[n][cause] += seconds * max(0.0, until - at) / length
        at, n = until, n + 1


def timeline(account: Account, width: int) -> str:
    """Each rank over time: its processes, what they were at, the saves, and who died."""
    ranks = sorted({r for p in account.parts for r in p.attempt.stays})
    span = account.wall_s or 1.0

    def x(t: float) -> float:
        return LEFT + min(1.0, max(0.0, (t - account.began) / span)) * (width - LEFT - RIGHT)

    parts = []
    shown = ranks[:_RANKS]
    for n, rank in enumerate(shown):
        y = 6 + n * ROW
        parts.append(label(LEFT - 8, y + 14, f"rank {rank}", "end"))
        for part in account.parts:
            if (stay := part.attempt.stays.get(rank)) is not None:
                for kind, start, end, tip in _bars(part, stay):
                    if x(end) - x(start) > 0.05:
                        words = f"start {part.attempt.number}, {tip}: {time(end - start)}"
                        parts.append(rect(f"c-{kind}", x(start), y, x(end) - x(start), BAR, words))
                if part.end.how == "failure" and part.end.rank == rank:
                    parts.append(f'<circle class="strike" cx="{x(part.end.died):.1f}" cy="{y + BAR / 2}" r="5.5">'
                                 f"<title>{escape(part.end.cause)}</title></circle>")  # fmt: skip
    y = 6 + len(shown) * ROW
    parts.append(label(LEFT - 8, y + 12, "saved", "end"))
    saves = [(at, s) for p in account.parts for at, s, _ in p.attempt.lead.of(SaveCommitted)]
    for at, step in saves[:: -(-len(saves) // MAX_MARKS) or 1]:
        parts.append(f'<path class="commit" d="M{x(at):.1f} {y + 2} l4 5 l-4 5 l-4 -5 z"><title>step {step} is durable'
                     "</title></path>")  # fmt: skip
    parts += _times(account, width, y + 34)
    if len(ranks) > len(shown):
        parts.append(label(width - RIGHT, y + 12, f"{len(ranks) - len(shown)} more ranks are not drawn", "end"))
    return svg(width, y + 42, "Time line of every rank", parts)


def _bars(part: Part, stay: Stay) -> Iterator[tuple[str, float, float, str]]:
    """(cause, from, to, words) of one process, from its start to its end."""
    end = part.end
    born, entered, trains = stay.born or stay.said[0].at, stay.entered, stay.resumed
    yield "restart", born, entered or stay.last, "starting"
    if entered is None or trains is None:
        return
    yield "load", entered, trains, "loading"
    died = end.died if end.how == "failure" else max(end.died, stay.last)
    first, last = part.steps
    again = min(died, _step_at(part, part.kept, trains, died)) if part.steps_lost else died
    yield "training", trains, again, f"steps {first + 1} to {last - part.steps_lost}"
    yield "lost", again, died, f"{part.steps_lost} steps that were done again"
    if end.rank != stay.rank and end.noticed is not None and end.how == "failure":
        yield "detect", died, end.noticed, "waiting for a rank that is gone"
        yield "restart", end.noticed, max(end.noticed, stay.last), "ending"


def _step_at(part: Part, step: float, trains: float, died: float) -> float:
    """When a step was over: a save began there, or in proportion."""
    first, last = part.steps
    exact = [at for at, s, _ in part.attempt.lead.of(SaveStarted) if s == step]
    share = (step - first) / (last - first) if last > first else 0.0
    return exact[0] if exact else trains + max(0.0, share) * (died - trains)


def steps(found: Rates, width: int) -> str | None:
    """Step time over steps, the scale by median and MAD: a few slow ones do not flatten all others."""
    if len(found.curve) < 3:
        return None
    top, height = 24, 150
    values = [s for _, s in found.curve]
    usual = median(values)
    spread = max(1.4826 * median(abs(v - usual) for v in values), 0.02 * usual)
    low, high = max(0.0, min(*values, usual - 6 * spread)), usual + 8 * spread
    last = max(s for s, _ in found.curve)

    def x(step: float) -> float:
        return LEFT + step / max(1, last) * (width - LEFT - RIGHT)

    def y(seconds: float) -> float:
        return top + (high - min(seconds, high)) / (high - low) * height

    parts = []
    for v in ticks(low, high, 4):
        parts.append(f'<path class="grid" d="M{LEFT} {y(v):.1f}H{width - RIGHT}"/>')
        parts.append(label(LEFT - 8, y(v) + 4, time(v) if v else "0", "end"))
    parts.append(rect("band", LEFT, y(usual + spread), width - LEFT - RIGHT, y(usual - spread) - y(usual + spread),
                      f"median {time(usual)}, give or take {time(spread)} (MAD)"))  # fmt: skip
    for step, seconds in found.curve[:: -(-len(found.curve) // MAX_MARKS) or 1]:
        kind = "dot off" if seconds > high else "dot"
        parts.append(f'<circle class="{kind}" cx="{x(step):.1f}" cy="{y(seconds):.1f}" r="2.2"><title>up to step '
                     f"{step}: {time(seconds)} each</title></circle>")  # fmt: skip
    over = sum(v > high for v in values)
    if over:
        parts.append(label(width - RIGHT, 11, f"{over} slower than drawn (at the upper edge)", "end"))
    marks = ticks(0, last, max(2, width // 160))[1:]
    edge = [(s, "middle" if s < 0.95 * last else "end") for s in marks]
    parts += [label(min(x(s), width - 4), top + height + 18, f"step {s:,g}", anchor) for s, anchor in edge]
    return svg(width, top + height + 24, "Step time", parts)


def ranks(found: Rates, width: int) -> str | None:
    """What a mean step of each rank is made of, and the spread of its steps."""
    if not found.ranks:
        return None
    shown = found.ranks[:_RANKS]
    p99 = {r.rank: r.times.at(0.99) or r.step_s for r in shown}
    most = max(*p99.values(), *(r.step_s + r.save_s / r.n for r in shown)) * 1.04

    def x(seconds: float) -> float:
        return LEFT + seconds / most * (width - LEFT - RIGHT)

    parts = []
    for n, rank in enumerate(shown):
        y = 4 + n * ROW
        parts.append(label(LEFT - 8, y + 14, f"rank {rank.rank}", "end"))
        split_ = split(rank, found.device)
        names = ("data", "compute", "off_cpu") if split_["compute"] is not None else ("data", "body")
        at = 0.0
        for name in (*names, "between", "save"):
            seconds = split_[name] or 0.0
            parts.append(
                rect(f"p-{name}", x(at), y, x(at + seconds) - x(at), BAR, f"{name.replace('_', ' ')}: {time(seconds)}")
            )
            at += seconds
        for share, tall in ((0.5, 4), (0.95, 2), (0.99, 0)):
            if (q := rank.times.at(share)) is not None:
                parts.append(f'<path class="mark" d="M{x(q):.1f} {y - 2 + tall / 2}V{y + BAR + 2 - tall / 2}"><title>'
                             f"p{share * 100:.0f}: {time(q)}</title></path>")  # fmt: skip
    bottom = 4 + len(shown) * ROW
    parts += [label(x(v), bottom + 12, time(v) if v else "0") for v in ticks(0, most, max(2, width // 160))]
    return svg(width, bottom + 18, "What a step is made of, by rank", parts)


def _times(account: Account, width: int, y: float) -> list[str]:
    span = account.wall_s or 1.0
    return [label(LEFT + t / span * (width - LEFT - RIGHT), y, words, "middle" if t else "start")
            for t, words in clock_ticks(span, max(3, width // 120)) if t / span < 0.97]  # fmt: skip
