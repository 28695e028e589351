"""The commands ``adopt`` and ``export``: the way into a run, and out of it."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt.errors import NotFound, Refused
from ckpt.store import open_store
from ckpt.tools import render
from ckpt.tools.options import STATUSES, Settings, common
from ckpt.tools.target import Address, Place, locate, select

if TYPE_CHECKING:
    from ckpt.foreign.source import Source

_SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
          "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip


class _Size(click.ParamType):  # type: ignore[type-arg]
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)", str(value))
        if match is None or (n := int(float(match[1]) * _SIZES[match[2]])) < 1:
            self.fail(f"{value!r} is not a size: write it like 512MiB or 5GiB", param, ctx)
        return n


class _Rename(click.ParamType):  # type: ignore[type-arg]
    name = "rename"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        old, equals, new = str(value).partition("=")
        if not (equals and (old or new)):
            self.fail(f"{value!r} is not OLD=NEW", param, ctx)
        return old, new


_ONLY = click.option("--only", multiple=True, metavar="GLOB",
                     help="Only entries whose whole name matches, such as 'model.*'; repeatable.")  # fmt: skip


@click.command(epilog=STATUSES)
@click.argument("source", metavar="SRC")
@click.argument("run", metavar="RUN_URL")
@click.option("--step", type=click.IntRange(0, 10**12 - 1), help="Its number in the run: completed steps.  "
              "[default: 0 in a new run; must be given, and be the highest, where there are steps]")  # fmt: skip
@click.option("--rename", multiple=True, type=_Rename(), metavar="OLD=NEW",
              help="Replace the beginning OLD of names by NEW, such as 'app.model.=model.'; repeatable.")  # fmt: skip
@_ONLY
@click.option("--takeover", is_flag=True, help="Also where a job may still be writing to the run: it is superseded.")
@common
@click.pass_obj
def adopt(
    settings: Settings, source: str, run: str, step: int | None, rename: tuple[tuple[str, str], ...],
    only: tuple[str, ...], takeover: bool, client: str | None, options: dict[str, Any],
) -> int:  # fmt: skip
    """Commit a checkpoint that others wrote as a step of the run at RUN_URL, from which a job then resumes.

    SRC is a plain DCP folder, safetensors (a file, or a folder with an index), or a folder of ours; it is only read.
    Its checksums are compared first, all of it is written, fingerprinted, read back and compared with the source,
    and then committed. Names are the entries of the State that will resume: State(model=…, optim=…) wants "model.…"
    and "optim.…". Values that belong to one object ("optim.param_groups.0.lr", "sched.last_epoch") become one value
    again. What the step lacks (random streams, data position) starts fresh when a job resumes, and is reported.

    \b
    Examples:  ckpt adopt /data/dcp/step-41000 s3://bucket/run42 --step 41000
               ckpt adopt /data/llama s3://bucket/tune1 --rename =model.
    """
    from ckpt.foreign.adopt import adopt as commit
    from ckpt.foreign.source import Names

    address = Address.parse(run, client=client, options=options)
    if address.step is not None:
        raise click.UsageError(f"say the step with --step {address.step}")
    place = locate(_at(source, address))
    if place.kind == "run" and place.attempt is None:
        raise Refused(f"{place.where} is a run: its steps are where they belong", hint="give one of its steps' folders")
    store = open_store(address.url, client=client, **options)
    with render.progress("adopt") as progress:
        opened = open_source(place, None)
        progress.expect(3 * sum(t.nbytes for k, t in opened.tensors.items()))
        done = commit(opened, store, step=step, names=Names(only, rename), takeover=takeover,
                      advance=progress.advance)  # fmt: skip
    next_line = address.paste("validate", done.step, "--level full")
    if settings.json:
        print(render.as_json("ckpt.adopt/1", {
            "source": opened.where, "kind": opened.kind, "checked_against": opened.proof, "url": store.url,
            **asdict(done), "next": [next_line],
        }))  # fmt: skip
        return 0
    render.print_lines(map(render.safe, [
        f"step {done.step} of {store.url} is committed: {render.plural(done.tensors, 'tensor')}, "
        f"{render.plural(done.values, 'value')}, {render.size(done.bytes)}",
        f"  from         {opened.kind} {opened.where}",
        f"  checked      {opened.proof}; then every tensor of both was read again and compared",
        f"  fingerprint  {done.fingerprint}",
        *([f"  joined       {', '.join(done.joined)}"] if done.joined else []),
        f"next: {next_line}",
    ]))  # fmt: skip
    return 0


@click.command(epilog=STATUSES)
@click.argument("url", metavar="URL[@STEP]")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--to", required=True, type=click.Choice(["safetensors", "torch", "dcp"]), help="The format to write.")
@_ONLY
@click.option("--strip", metavar="PREFIX", default="", help="Take this beginning off the names that have it: 'model.'.")
@click.option("--max-shard", type=_Size(), default="5GiB", show_default=True, metavar="SIZE",
              help="Of safetensors: no larger file, but for a tensor that is larger itself.")  # fmt: skip
@common
@click.pass_obj
def export(
    settings: Settings, url: str, out: Path, to: Any, only: tuple[str, ...], strip: str, max_shard: int,
    client: str | None, options: dict[str, Any],
) -> int:  # fmt: skip
    """Write a step in a format that others read, to the local path OUT, which must not exist yet.

    URL is a run (its newest usable step, or the one after "@"), or any checkpoint that adopt takes. OUT appears whole
    or not at all, after every tensor in it was read back and its fingerprint compared with the step's.

    \b
    To  safetensors  a folder: model.safetensors, or shards and an index; OUT ending in .safetensors is one file.
                     Tensors only: an optimizer's state and values are refused by name.
        torch        one file for torch.load(OUT, weights_only=True): the nested state as it was saved
        dcp          a folder for torch.distributed.checkpoint.load

    \b
    Examples:  ckpt export s3://bucket/run42@41000 /data/llama --to safetensors --only 'model.*' --strip model.
               ckpt export s3://bucket/run42 /data/newest.pt --to torch
    """
    from ckpt.foreign.export import export as write
    from ckpt.foreign.source import Names

    address = Address.parse(url, client=client, options=options)
    place = locate(address)
    names = Names(only, ((strip, ""),) if strip else ())
    with render.progress(f"export to {to}") as progress:
        opened = open_source(place, address.step)
        chosen = names.choose(opened)
        progress.expect(2 * sum(t.nbytes for k, t in opened.tensors.items() if k in chosen))
        done = write(opened, out, to=to, names=names, max_shard_bytes=max_shard, advance=progress.advance)
    if settings.json:
        print(render.as_json("ckpt.export/1", {
            "source": opened.where, "kind": opened.kind, "checked_against": opened.proof, **asdict(done),
        }))  # fmt: skip
        return 0
    alike = [", ".join(group) for group in done.alike]
    render.print_lines(map(render.safe, [
        f"{done.out}: {render.plural(done.tensors, 'tensor')}, {render.plural(done.values, 'value')}, "
        f"{render.size(done.bytes)} in {render.plural(done.files, 'file')}",
        f"  from     {opened.kind} {opened.where}",
        f"  checked  {opened.proof}; then every tensor was read back and compared",
        *(f"  alike    {names} have the same content (tied?); each was written" for names in alike[:5]),
        *([f"  alike    and {len(alike) - 5} more groups"] if len(alike) > 5 else []),
    ]))  # fmt: skip
    return 0


def _at(text: str, run: Address) -> Address:
    """The address of a source: with the storage options of the run where it is of the same kind of store."""
    same_kind = text.partition("://")[0] == run.url.partition("://")[0] if "://" in text else "://" not in run.url
    options = run.options if same_kind else {}
    return Address(url=text, client=run.client if same_kind else None, options=options)


def open_source(place: Place, step: int | None) -> Source:
    """What to copy from. Raises ``NotFound`` for an attempt that was never committed."""
    if place.kind == "plain DCP":
        from ckpt.foreign.plain import PlainDcp

        return PlainDcp(place.store, place.prefix)
    if place.kind == "safetensors":
        from ckpt.foreign.hub import Safetensors

        return Safetensors(place.store, place.prefix, place.name)
    from ckpt.engine.reader import ObjectReader
    from ckpt.foreign.step import Step

    if place.kind == "folder":
        return Step(place.store, place.prefix, ObjectReader.in_run(place.store, place.prefix, None).manifest)
    attempt = select(place, step)
    if place.listing is None or attempt not in place.listing.commits:
        raise NotFound(f"{attempt} was never committed: it may be unfinished", hint=f"ckpt ls {place.store.url} --all")
    return Step(place.store, attempt.prefix, place.catalog.candidate(attempt).manifest)
