"""The command ``diff``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import click

from ckpt.errors import NotFound
from ckpt.tools import describe, diff, inspection, render
from ckpt.tools.diff import Difference
from ckpt.tools.inspection import Inspection
from ckpt.tools.options import STATUSES, Settings, common
from ckpt.tools.target import Address, Place, locate

DIFFERENT, NOT_VERIFIED = 1, 3


@click.command("diff", epilog=STATUSES.replace("1 damage", "1 different, or damage"))
@click.argument("a", metavar="A[@STEP]")
@click.argument("b", metavar="B[@STEP]")
@click.option("--stats", "with_stats", is_flag=True,
              help="Read the tensors that differ and tell how: needs torch, and the time to read them.")  # fmt: skip
@click.option("--glob", metavar="G", help="Only names that match, such as 'model.*'.")
@click.option("--limit", type=click.IntRange(min=0), default=None,
              help="Lines of detail to show; 0: all.  [default: 500 on a terminal, else all]")  # fmt: skip
@common
@click.pass_obj
def diff_(
    settings: Settings, a: str, b: str, with_stats: bool, glob: str | None, limit: int | None, client: str | None,
    options: dict[str, Any],
) -> int:  # fmt: skip
    """Tell what changed from one checkpoint, A, to another, B.

    No tensor data are read: fingerprints tell what changed, whatever the number of ranks that saved each. With
    --stats the data of what differs are read, in bounded memory: the largest difference, the norm of the difference
    over that of A, and how many elements are NaN or infinite, in A and B. A and B are what "ckpt inspect" takes; of a
    checkpoint without fingerprints (plain DCP, safetensors) only --stats tells whether a tensor changed.

    Exit status 0: equal, 1: different, 3: nothing differs as far as the records tell, and they do not tell all.

    \b
    Examples:  ckpt diff s3://bucket/run42@41000 s3://bucket/run42@42000 --glob 'model.*' --stats
               ckpt diff /data/run42 /data/copy-of-run42 && echo equal
    """
    left, right = (Address.parse(text, client=client, options=options) for text in (a, b))
    places = locate(left), locate(right)
    seen = inspection.inspect(places[0], left.step), inspection.inspect(places[1], right.step)
    for one in seen:
        if one.state == "damaged":
            sys.stderr.write(render.safe(f"{one.where} is damaged: {', '.join(one.notes)}") + "\n")
    found = diff.compare(*(describe.matching(one.entries, glob) for one in seen))
    if glob is not None and not found:
        raise NotFound(
            f"no name in either checkpoint matches {glob!r}", hint=left.paste("inspect", left.step, "--tensors")
        )
    if with_stats:
        found = _with_stats(found, places, (left.step, right.step))
    sums = diff.counts(found)
    shown = [d for d in found if d.change != "unchanged"]
    if settings.json:
        print(render.as_json("ckpt.diff/1", {
            "a": _side(seen[0]), "b": _side(seen[1]), "counts": sums, "differences": shown,
        }))  # fmt: skip
    else:
        limit = limit if limit is not None else 500 if sys.stdout.isatty() else 0
        names = ", ".join(f"{n} {change}" for change, n in sums.items() if n) or "none"
        render.print_lines(render.facts([("A", _name(seen[0])), ("B", _name(seen[1])), ("names", names)]))
        render.print_lines(render.cut(_lines(shown), limit))
    if len(shown) > sums["not verified"]:
        return DIFFERENT
    return NOT_VERIFIED if shown else 0


def _with_stats(
    found: list[Difference], places: tuple[Place, Place], steps: tuple[int | None, int | None]
) -> list[Difference]:
    from ckpt.tools.commands.moving import open_source
    from ckpt.tools.diffstats import stats  # torch

    wanted = [d for d in found if d.comparable]
    if not wanted:
        return found
    sources = open_source(places[0], steps[0]), open_source(places[1], steps[1])
    with render.progress("diff") as progress:
        progress.expect(sum(s.tensors[d.name].nbytes for d in wanted for s in sources))
        read = {d.name: stats(*sources, d.name, progress.advance) for d in wanted}
    return sorted(diff.settle([replace(d, stats=read.get(d.name)) for d in found]), key=diff.order)


def _side(seen: Inspection) -> dict[str, Any]:
    return {"where": seen.where, "kind": seen.kind, "step": seen.step, "attempt": seen.attempt, "state": seen.state,
            "fingerprint": seen.fingerprint}  # fmt: skip


def _name(seen: Inspection) -> str:
    step = "" if seen.step is None else f", step {seen.step}"
    return f"{seen.where} ({seen.what}{step})"


def _lines(found: list[Difference]) -> Iterator[str]:
    rows = [(d.change, _what(d), render.safe(d.name) + _numbers(d)) for d in found]
    widths = [max((len(r[n]) for r in rows), default=0) for n in range(2)]
    return (f"{c:<{widths[0]}}  {w:<{widths[1]}}  {rest}" for c, w, rest in rows)


def _what(d: Difference) -> str:
    """Dtype and shape; of both sides where they differ."""
    sides = [
        f"{e.dtype} {render.shape(e.shape)}" if e.dtype else f"{e.kind} value".replace("value value", "value")
        for e in (d.a, d.b)
        if e is not None
    ]
    return " → ".join(dict.fromkeys(sides))


def _numbers(d: Difference) -> str:
    s = d.stats
    if s is None:
        return ""
    relative = "A is zero" if s.relative is None else f"relative {s.relative:.3g}"
    text = f"  {s.differing} of {s.elements} elements, max abs {s.max_abs:.3g}, {relative}"
    text += f", NaN {s.nan[0]} → {s.nan[1]}" if any(s.nan) else ""
    return text + (f", Inf {s.inf[0]} → {s.inf[1]}" if any(s.inf) else "")
