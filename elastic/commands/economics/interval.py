"""``elastic interval``: how often to save."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from elastic import units
from elastic.commands.economics.options import DURATION, SHARE, Between, duration, read, refuse, shared, write
from elastic.economics.inputs import BadInput


@click.command("interval", short_help="How often to save, what it costs, what to fix first.")
@shared
@click.option("--step", type=DURATION, help="Time of one training step: the answer is then in whole steps.")
@click.option(
    "--align",
    type=Between(1, 1_000_000_000, whole=True),
    default=1,
    help="Make the interval a multiple of this many steps.",
)
@click.option("--current", metavar="TIME|STEPS", help="The interval in use, like 30min or 500steps, to compare with.")
@click.option("--work", type=DURATION, help="Training time of the whole job, without failures; default: long.")
@click.option("--final-save/--no-final-save", default=True, help="Whether a finite job ends with a save.")
@click.option(
    "--keep", type=Between(1, 1_000_000, whole=True), help="Checkpoints kept, checked against --late-detection."
)
@click.option(
    "--late-detection", type=DURATION, help="Mean time until a bad state is noticed by people (loss spike, evaluation)."
)
@click.option("--target-goodput", type=SHARE, help="Say what would reach this share of useful time, like 95%.")
@click.option("--plot", is_flag=True, help="Draw goodput against the interval.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write that picture to a file.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write picture and answer as one page.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON, schema elastic.interval/1.")
def command(**o: Any) -> None:
    """How often to save, what to expect of it, and what to fix first.

    Needs one cost of a save and one failure rate; everything else sharpens the forecast. Times carry units (40s, 90min,
    3.1h, 1h30m). Without a rate, the number of nodes is enough: 7 failures per 1,000 node-days are
    assumed, and said so.

    \b
    Examples:
      elastic interval --mtbf 6h --save 40s
      elastic interval --gpus 1024 --save 40s --restart 10min --step 3s
      elastic interval --gpus 16384 --rate 3.79/1000nd --stall 5s --persist 2min \\
          --detect 4min --reschedule 1min --load 10min --step 12.4s --price 2.5
      elastic interval --failures 3 --exposure 24h --bytes 2TB --bandwidth 50GB/s
      elastic interval --mtbf 3h --save 60s --tier memory:2s:0s:80%:1min --load 10min
      elastic interval --mtbf 2h --save 30s --notice-share 9/3     (spot: 9 saved, 3 did not)
      elastic interval --from s3://bucket/run42 --price 2.5 --html interval.html

    Exit status: 0, or 2 when the question cannot be answered as asked.
    """
    from elastic.commands.economics import show_interval
    from elastic.economics.interval import recommend

    asked = read(
        o,
        step_s=lambda o: o["step"],
        align_steps=o["align"],
        work_s=o["work"],
        final_save=o["final_save"],
        current_s=lambda o: _current(o["current"], o["step"]),
        keep=o["keep"],
        detection_latency_s=o["late_detection"],
    )
    try:
        plan = recommend(asked.rates, asked.costs, asked.job)
        if o["svg"] or o["html"]:
            from elastic.commands.economics import picture

            pages = {"svg": picture.svg(plan), "html": picture.page(plan, show_interval.text(plan, asked, None))}
            write({o[name]: content for name, content in pages.items() if o[name]})
        if o["as_json"]:
            click.echo(json.dumps(show_interval.record(plan, asked, o["target_goodput"]), indent=2, allow_nan=False))
            return
        click.echo(show_interval.text(plan, asked, o["target_goodput"]))
        if o["plot"]:
            click.echo(show_interval.plot(plan))
    except BadInput as error:
        refuse(error)


def _current(text: str | None, step_s: float | None) -> float | None:
    if text is None:
        return None
    if match := re.fullmatch(r"\s*([\d_,]+)\s*(?:steps?|it|its|iterations?)\s*", text):
        if step_s is None:
            raise click.UsageError(f"--current {text} needs --step, the time of one step")
        text = f"{float(match[1].replace(',', '').replace('_', '')) * step_s!r}s"
    try:
        return duration(text)
    except units.BadUnit as error:
        if "out of range" in str(error):
            raise click.UsageError(f"--current: {error}") from None
        raise click.UsageError(
            f"--current {text!r} is neither a time nor steps: write it like 30min or 500steps"
        ) from None
