"""The commands ``ls`` and ``inspect``: read records, describe, print."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import click

from ckpt.errors import NotFound
from ckpt.tools import describe, gather, inspection, render
from ckpt.tools.inspection import Inspection
from ckpt.tools.options import STATUSES, Settings, common
from ckpt.tools.target import Address, Place, locate


@click.command(epilog=STATUSES)
@click.argument("url")
@click.option("--all", "everything", is_flag=True, help="Also attempts that are unfinished, off the line, or retired.")
@click.option(
    "--limit", type=click.IntRange(min=0), default=50, show_default=True, help="Newest attempts to show; 0: all."
)
@common
@click.pass_obj
def ls(settings: Settings, url: str, everything: bool, limit: int, client: str | None, options: dict[str, Any]) -> int:
    """List the steps of the run at URL, newest first.

    \b
    State       committed  whole by its records and by the size of every object
                partial    data without a commit record: unfinished, or abandoned
                damaged    proven damage, or quarantined
                unknown    committed, but off the line that counts: never chosen
    "*" marks the newest valid step: the one that a restart resumes from.

    \b
    Example:  ckpt ls s3://bucket/run42
    """
    address = Address.parse(url, client=client, options=options)
    place = locate(address)
    if place.kind != "run" or place.attempt is not None or address.step is not None:
        return _ls_one(settings, place, address)
    assert place.listing is not None
    view = gather.view_run(place.catalog, place.listing, everything=everything, limit=limit)
    if not view.rows and view.problem is None:
        raise _nothing_committed(place, address)
    if settings.json:
        print(render.as_json("ckpt.ls/1", {
            "url": place.store.url, "kind": "run",
            "newest_valid": str(view.newest_valid) if view.newest_valid else None,
            "lineage": [{"epoch": str(e), "base": str(b) if b else None} for e, b in view.lineage],
            "total": view.total, "hidden": view.hidden, "problem": view.problem and str(view.problem),
            "rows": [{**asdict(r), "age_s": render.age_s(r.created)} for r in view.rows],
        }))  # fmt: skip
    else:
        _print_run(place, address, view)
    if view.problem is None:
        return 0
    sys.stderr.write(render.error_text(view.problem) + "\n")
    return view.problem.exit_status


def _print_run(place: Place, address: Address, view: gather.RunView) -> None:
    unread = any(r.state == "committed" for r in view.rows) or view.problem is not None
    newest = f"newest valid {view.newest_valid.step}" if view.newest_valid else "no valid step"
    newest = "newest valid not known" if view.newest_valid is None and unread else newest
    render.print_lines([f"{render.safe(place.store.url)}: {render.plural(view.total, 'attempt')}, {newest}", ""])
    render.print_table(
        ["", "step>", "state", "epoch", "size>", "ranks>", "saved?", "age>", "notes"],
        [["*" if r.newest_valid else "", str(r.step), r.state, r.epoch, render.size(r.bytes),
          "-" if r.world_size is None else str(r.world_size), render.moment(r.created), render.age(r.created),
          "; ".join(r.notes)] for r in view.rows],
    )  # fmt: skip
    lines = [""]
    if view.total > len(view.rows):
        lines.append(f"… showing the newest {len(view.rows)} of {view.total}; --limit 0 shows all")
    if view.lineage:
        steps = [f"{e} builds on {b or 'a fresh start'}" for e, b in view.lineage[:8]]
        more = f", and {len(view.lineage) - 8} older epochs" if len(view.lineage) > 8 else ""
        lines.append("counts: " + ", ".join(steps) + more)
    claim = view.newest_claim
    if claim is not None and (not view.lineage or claim.epoch != str(view.lineage[0][0])):
        lines.append(
            f"epoch {claim.epoch} was claimed {render.age(claim.created)} by {claim.host} and has not resumed yet"
        )
    if view.hidden:
        what = render.plural(view.hidden, "attempt")
        lines.append(f"{what} not to be used left out: {address.paste('ls', flags='--all')}")
    if bad := [r for r in view.rows if r.state == "damaged" and r.counts]:
        lines.append(f"next: {address.paste('validate', bad[0].step)}")
    render.print_lines(map(render.safe, lines))


def _ls_one(settings: Settings, place: Place, address: Address) -> int:
    """A URL that names one checkpoint: say so, and say what it is."""
    seen = inspection.inspect(place, address.step)
    if settings.json:
        print(render.as_json("ckpt.ls/1", {
            "url": place.where, "kind": seen.kind, "newest_valid": None, "lineage": [], "total": 1, "hidden": 0,
            "problem": None, "rows": [_row(seen)],
        }))  # fmt: skip
    else:
        run = f"; its run: {address.of_run(place).paste('ls')}" if place.kind == "run" else ""
        step = "" if seen.step is None else f", step {seen.step}"
        render.print_lines(map(render.safe, [
            f"{seen.where} is one checkpoint ({seen.what}), not a run{run}",
            f"{seen.state}, {render.size(seen.bytes)}{step}: {address.paste('inspect', address.step)}",
        ]))  # fmt: skip
    return 0


def _row(seen: Inspection) -> dict[str, Any]:
    return {"step": seen.step, "attempt": seen.attempt, "state": seen.state, "epoch": None, "bytes": seen.bytes,
            "world_size": seen.world_size, "created": seen.created, "newest_valid": False, "counts": seen.counts,
            "notes": list(seen.notes), "age_s": render.age_s(seen.created)}  # fmt: skip


def _nothing_committed(place: Place, address: Address) -> NotFound:
    assert place.listing is not None
    found = gather.unfinished(place.store, place.listing)
    facts = [("epochs claimed", str(len(place.listing.epochs))), ("commit records", str(len(place.listing.commits))),
             ("unfinished attempts", str(len(found)))]  # fmt: skip
    newest = place.listing.newest_epoch
    if newest is not None and (claim := gather.read_claim(place.store, newest)) is not None:
        facts.append(("newest start", f"{newest}, {render.age(claim.created)}, by {claim.host} (pid {claim.pid})"))
    something = found or place.listing.commits
    hint = address.paste("ls", flags="--all") if something else "wait for its first save, or look at the job's log"
    return NotFound(f"the run at {place.store.url} has no committed step that counts", facts=facts, hint=hint)


# --- inspect --------------------------------------------------------------------------------------------------


@click.command(epilog=STATUSES)
@click.argument("url", metavar="URL[@STEP]")
@click.option("--tree", "show", flag_value="tree", help="The tree of tensors and values, with shape, dtype and bytes.")
@click.option("--tensors", "show", flag_value="tensors", help="One tensor or value a line: dtype, shape, bytes, name.")
@click.option("--objects", "show", flag_value="objects", help="One stored object a line: bytes, digest, rank, name.")
@click.option("--glob", metavar="G", help="Only names that match, such as 'model.*.weight'; implies --tensors.")
@click.option("--limit", type=click.IntRange(min=0), default=None,
              help="Lines of detail to show; 0: all.  [default: 500 on a terminal, else all]")  # fmt: skip
@common
@click.pass_obj
def inspect(
    settings: Settings, url: str, show: str | None, glob: str | None, limit: int | None, client: str | None,
    options: dict[str, Any],
) -> int:  # fmt: skip
    """Show what a checkpoint holds; no tensor data are read.

    URL is a run (then the newest usable step is shown, or the one after "@"), an attempt's folder, a folder that
    ckpt.ObjectWriter wrote, or a plain DCP folder. Only "@" and digits at the very end are a step; end a URL that
    really ends so with "/".

    \b
    Examples:  ckpt inspect s3://bucket/run42@42000 --tree
               ckpt inspect s3://bucket/run42 --tensors | grep float16
    """
    address = Address.parse(url, client=client, options=options)
    seen = inspection.inspect(locate(address), address.step)
    show = show or ("tensors" if glob else None)
    entries = describe.matching(seen.entries, glob)
    if glob is not None and not entries:
        sys.stderr.write(f"no name matches {glob!r}\n")
    if settings.json:
        details = {"entries": entries if show in ("tree", "tensors") else None,
                   "objects": seen.objects if show == "objects" else None}  # fmt: skip
        print(render.as_json("ckpt.inspect/1", {
            **asdict(replace(seen, entries=(), objects=())), "age_s": render.age_s(seen.created),
            "tensor_count": sum(e.dtype is not None for e in seen.entries),
            "object_count": len(seen.objects), **details,
        }))  # fmt: skip
        return int(seen.state == "damaged")
    limit = limit if limit is not None else 500 if sys.stdout.isatty() else 0
    if show is None or show == "tree":
        render.print_lines(render.facts(_facts(seen)))
    if show is None and seen.entries:
        render.print_lines(["", *render.tree_lines(describe.tops(seen.entries)), "",
                            f"next: {address.paste('inspect', address.step, '--tree')}"])  # fmt: skip
    elif show == "tree" and entries:
        render.print_lines(["", *render.cut(render.tree_lines(describe.tree(entries)), limit)])
    elif show == "tensors":
        render.print_lines(render.cut(render.entry_lines(entries), limit))
    elif show == "objects":
        lines = (f"{o.bytes:>14}  {o.digest}  rank {o.rank:>5}  {render.safe(o.name)}" for o in seen.objects)
        render.print_lines(render.cut(lines, limit))
    return int(seen.state == "damaged")


def _facts(seen: Inspection) -> Iterator[tuple[str, str]]:
    yield "checkpoint", seen.where
    yield "what", seen.what
    if seen.step is not None:
        yield "step", str(seen.step)
    yield "state", ", ".join([seen.state, *seen.notes])
    if seen.base is not None:
        yield "builds on", seen.base
    if seen.created is not None:
        by = ", ".join(f"{k} {v}" for k, v in seen.writer.items())
        yield "saved", f"{render.moment(seen.created)} ({render.age(seen.created)}) by {by or 'an unnamed writer'}"
    if seen.world_size is not None:
        yield "world size", f"{seen.world_size} when it was saved"
    tensors = [e for e in seen.entries if e.kind == "tensor"]
    dtypes = ", ".join(f"{render.size(n)} {d}" for d, n in describe.bytes_by_dtype(tensors).items())
    yield "tensors", f"{len(tensors)}: {dtypes or 'none'}"
    same = sum(e.kind == "replicated" for e in seen.entries)
    own = [f"{k} of each of {render.plural(n, 'rank')}" for k, n in seen.per_rank.items()]
    other = len(seen.entries) - len(tensors) - same - sum(seen.per_rank.values())
    parts = [f"{same} the same on all ranks"] * bool(same) + own + [f"{other} of unknown kind"] * bool(other)
    yield "values", "; ".join(parts) or "none"
    objects = f"{render.plural(len(seen.objects), 'object')}, " if seen.objects else ""
    yield "stored", objects + render.size(seen.bytes)
    yield "checksums", seen.checksums
    yield "fingerprint", seen.fingerprint or "not verified (none was recorded)"
    if seen.references:
        yield "refers to", ", ".join(seen.references)
