"""``elastic goodput``: where the hours of a run went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from elastic.commands.economics.options import LARGE, USD
from elastic.commands.ledger.source import events_of, reachable, reader, write_whole


@click.command("goodput", short_help="Where the hours of a run went, by cause, start and rank.")
@click.argument("url")
@reachable
@click.option("--flops-per-step", type=LARGE, help="Operations of one step on all devices, like 3.2e15: gives MFU.")
@click.option("--flops-per-token", type=LARGE, help="Or those of one token (6 x parameters), with run.log(tokens=…).")
@click.option("--peak-flops", type=LARGE, help="What one device can do in a second, like 989T.")
@click.option("--price", type=USD, help="US dollars for one device for an hour.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write one page, with a time line.")
@click.option("--prom", type=click.Path(dir_okay=False, path_type=Path),
              help="Write a Prometheus text file, for node_exporter's textfile collector.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON, schema elastic.goodput/1.")
def command(url: str, **o: Any) -> None:
    """Where the hours of the run at URL went: its wall time by cause, by start and by rank.

    Reads the ledger that elastic.Run keeps beside the checkpoints, while the run goes on or afterwards; it
    never writes there. The causes add up to the wall time; what nothing explains is "other".

    \b
      training    steps that count          detect   until a failure was noticed
      evaluation  run.evaluation()          restart  old processes out, new ones in
      data        waiting for batches       load     choosing and reading a checkpoint
      save        standing still to save    wait     no job: machines, or somebody
      lost        steps done again          other    between steps, and unexplained
      rollback    given up on purpose

    Tokens and samples are counted where the training code logs what each rank has trained on in a step:
    run.log(tokens=batch.numel(), samples=len(batch)). They are summed over ranks; steps done again count once.

    \b
    Examples:
      elastic goodput s3://bucket/run42
      elastic goodput s3://bucket/run42 --html hours.html --price 2.5
      elastic goodput runs/gpt --flops-per-token 6e9 --peak-flops 989T
      elastic goodput runs/gpt --prom /var/lib/node_exporter/run42.prom

    Exit status: 0, 2 for a question that cannot be answered as asked, 4 where no ledger is, 5 for storage.
    """
    from elastic.commands.ledger import show_goodput
    from elastic.ledger.goodput import account
    from elastic.ledger.rates import mfu, rates

    flops = o["flops_per_step"] is not None or o["flops_per_token"] is not None
    if flops != (o["peak_flops"] is not None):
        raise click.UsageError("MFU needs both: --peak-flops, and --flops-per-step or --flops-per-token")
    if o["flops_per_step"] is not None and o["flops_per_token"] is not None:
        raise click.UsageError("--flops-per-step and --flops-per-token both say what a step takes: give one")
    found, notes = events_of(url, reader(url, o).read())
    whole = account(found.events)
    speed = rates(whole)
    share = None
    if flops:
        share = mfu(whole, speed, flops_per_step=o["flops_per_step"], flops_per_token=o["flops_per_token"],
                    peak_flops=o["peak_flops"])  # fmt: skip
    told = show_goodput.Told(url=url, account=whole, rates=speed, mfu=share, price=o["price"], notes=tuple(notes),
                             flops_given=flops)  # fmt: skip
    if o["html"]:
        from elastic.commands.ledger.page_goodput import page

        write_whole(o["html"], page(told))
        click.echo(f"wrote {o['html']}", err=True)
    if o["prom"]:
        from elastic.commands.ledger.prom import exposition

        write_whole(o["prom"], exposition(told))
        click.echo(f"wrote {o['prom']}", err=True)
    if o["as_json"]:
        click.echo(json.dumps(show_goodput.record(told), indent=2, allow_nan=False))
        return
    click.echo(show_goodput.text(told))
