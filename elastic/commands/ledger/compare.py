"""``elastic compare``: is the larger cluster worth it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from elastic.commands.ledger.source import events_of, reachable, reader, write_whole


@click.command("compare", short_help="Runs side by side: efficiency, and time to the same quality.")
@click.argument("urls", nargs=-1, required=True, metavar="RUN...")
@reachable
@click.option("--metric", help="Metric of quality, as given to run.metric; default: the one validation metric of all.")
@click.option("--to", "target", type=float, help="The value to reach; default: the best that all runs have reached.")
@click.option("--higher", is_flag=True, help="Higher values of the metric are better, as for an accuracy.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path),
              help="Write speed against devices as a picture; the metric over time as NAME-quality.svg.")  # fmt: skip
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write tables and pictures as one page.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON, schema elastic.compare/1.")
def command(urls: tuple[str, ...], **o: Any) -> None:
    """Runs side by side: how well more devices are used, and which run reaches the same quality first.

    A RUN is a URL, or NAME=URL. Efficiency is the speed a device relative to the run with the fewest devices; "all
    hours" counts down time and lost work, too. Since more tokens a second are no gain where more tokens are needed,
    the time, device-time and tokens to the same value of a metric are given beside it.

    Training code logs what it takes: run.log(tokens=…) or run.log(samples=…) in a step, on each rank its own, and
    run.metric(val_loss=…) after an evaluation.

    \b
    Examples:
      elastic compare runs/n1 runs/n2 runs/n4
      elastic compare small=s3://b/run7 large=s3://b/run9 --metric val_loss --to 2.5
      elastic compare runs/* --metric accuracy --higher --html compare.html

    Exit status: 0; 2 for a question that cannot be answered as asked, 4 where a run has no ledger, 5 for storage.
    """
    from elastic.commands.ledger import show_compare
    from elastic.ledger.compare import compare
    from elastic.ledger.goodput import account

    named = [_named(url) for url in urls]
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        named = [(url if names.count(name) > 1 else name, url) for name, url in named]
    runs, notes = [], []
    for name, url in named:
        found, bad = events_of(url, reader(url, o).read())
        runs.append((name, account(found.events)))
        notes += [f"{name}: {note}" for note in bad]
    try:
        c = compare(runs, metric=o["metric"], target=o["target"], higher=o["higher"], notes=tuple(notes))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    for path, content in _files(c, o).items():
        write_whole(path, content)
        click.echo(f"wrote {path}", err=True)
    if o["as_json"]:
        click.echo(json.dumps(show_compare.record(c), indent=2, allow_nan=False))
        return
    click.echo(show_compare.text(c))


def _named(run: str) -> tuple[str, str]:
    name, equals, url = run.partition("=")
    if equals and "/" not in name and name:
        return name, url
    return run.rstrip("/").rpartition("/")[2] or run, run


def _files(c: Any, o: dict[str, Any]) -> dict[Path, str]:
    if not (o["svg"] or o["html"]):
        return {}
    from elastic.commands.ledger import plots_compare, show_compare
    from elastic.commands.ledger.page_goodput import environment, picture

    files: dict[Path, str] = {}
    if o["svg"]:
        speed, quality = (draw(c, 760, alone=True) for draw in (plots_compare.speed, plots_compare.quality))
        if speed is None and quality is None:
            raise click.UsageError("--svg: there is nothing to draw for runs of one size without a metric in common")
        if speed is not None:
            files[o["svg"]] = speed + "\n"
        if quality is not None:
            files[o["svg"].with_name(f"{o['svg'].stem}-quality.svg") if speed is not None else o["svg"]] = (
                quality + "\n"
            )
    if o["html"]:
        files[o["html"]] = environment().get_template("compare.html.j2").render(
            c=c, verdict=show_compare.verdict(c), colours=plots_compare.COLOURS,
            speed=picture(plots_compare.speed, c), quality=picture(plots_compare.quality, c),
        )  # fmt: skip
    return files
