"""``elastic plan``: how far a job can grow, and what a deadline needs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from elastic import units
from elastic.commands.economics.options import (
    BYTES,
    DURATION,
    LARGE,
    SHARE,
    USD,
    Between,
    devices,
    duration,
    read,
    refuse,
    shared,
    write,
)
from elastic.economics.inputs import BadInput, positive, share


@click.command("plan", short_help="How far a job can grow, and what a deadline needs.")
@shared
@click.option("--sizes", metavar="FROM:TO", help="Device counts to show, like 1024:131072; default: around --gpus.")
@click.option(
    "--marginal", type=SHARE, default=0.5, show_default=True, help="The next node must still add this share of itself."
)
@click.option(
    "--stall-exponent",
    type=Between(-3, 3),
    default=0.0,
    help="The stall grows with nodes to this power (-1: each node writes its share).",
)
@click.option("--persist-exponent", type=Between(-3, 3), default=0.0, help="The same for the upload.")
@click.option(
    "--measured",
    multiple=True,
    metavar="DEVICES:STEP|URL",
    help="Step time at a size, same global batch, twice or more: 1024:9.8s, or a run to read it off.",
)
@click.option("--params", type=LARGE, help="Parameters of the model, like 405B.")
@click.option("--tokens", type=LARGE, help="Tokens to train on, like 15.6T.")
@click.option("--deadline", type=DURATION, help="Finish within this time: how many devices?")
@click.option("--mfu", type=SHARE, help="Model flops utilisation of undisturbed training; assumed 40 %.")
@click.option("--peak", type=LARGE, help="Operations per second of a device; assumed 989T (H100, bf16 dense).")
@click.option("--checkpoint", type=BYTES, help="Size of a checkpoint; default 14 bytes a parameter.")
@click.option(
    "--storage-points",
    type=Between(0.001, 99),
    default=1.0,
    show_default=True,
    help="Points of goodput that uploading may cost.",
)
@click.option(
    "--manual-share", type=SHARE, default=0.0, help="Share of failures that need a person (Llama 3: 3 of 419)."
)
@click.option(
    "--person-hours", type=Between(0, 10_000), default=1.0, show_default=True, help="Hours a person spends on one."
)
@click.option("--person-usd", type=USD, default=100.0, show_default=True, help="What that hour costs.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write the curves as one page.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON, schema elastic.plan/1.")
def command(**o: Any) -> None:
    """How goodput falls with size: what the next node still adds, the sensible size, the wall.

    Rate and costs are those at --gpus (or --nodes); --sizes chooses the sizes shown. With --params and --tokens also
    days, device-hours, money, and the devices that a --deadline needs.

    \b
    Examples:
      elastic plan --gpus 16384 --rate 3.79/1000nd --stall 2s --persist 1min --restart 3min
      elastic plan --gpus 16384 --rate 3.79/1000nd --save 60s --restart 15min --html wall.html
      elastic plan --from s3://bucket/run42 --sizes 64:8192
      elastic plan --gpus 1024 --stall 5s --persist 2min --restart 15min --price 2.5 \\
          --params 405B --tokens 15.6T --deadline 60d

    Exit status: 0, or 2 when the question cannot be answered as asked.
    """
    from elastic.commands.economics import show_plan
    from elastic.commands.economics.basis import rests_on
    from elastic.economics import budget
    from elastic.economics.posterior import rate_of_job
    from elastic.economics.scale import Efficiency, Scaling

    asked = read(o)
    try:
        if asked.job.nodes is None:
            raise BadInput(
                "nodes", "a plan starts from a size: give --gpus (or --nodes), the size that rate and costs belong to"
            )
        steps = _measured(o, asked.job.devices_per_node)
        scaling = Scaling(
            rates=asked.rates,
            costs=asked.costs,
            job=asked.job,
            stall_exponent=o["stall_exponent"],
            persist_exponent=o["persist_exponent"],
            efficiency=Efficiency.measured(steps) if steps else Efficiency(),
        )
        training = None
        if (o["params"] is None) != (o["tokens"] is None) or (o["deadline"] is not None and o["params"] is None):
            raise BadInput("params", "--params and --tokens belong together, and --deadline needs both: give them")
        if o["checkpoint"] is not None:
            positive("checkpoint", o["checkpoint"], "its size, like 5.67TB")
        share("manual_share", o["manual_share"], "the share of failures that need a person")
        share("marginal", o["marginal"], "what the next node must still add")
        if o["deadline"] is not None:
            positive("deadline_s", o["deadline"], "the time to finish within")
        if o["params"] is not None:
            training = budget.Training(
                parameters=o["params"], tokens=o["tokens"], peak_flops=989e12 if o["peak"] is None else o["peak"],
                mfu=0.4 if o["mfu"] is None else o["mfu"],
                bytes_per_parameter=o["checkpoint"] / o["params"] if o["checkpoint"] else budget.BYTES_PER_PARAMETER,
            )  # fmt: skip
        people = {
            "manual_share": o["manual_share"],
            "person_hours": o["person_hours"],
            "person_usd_per_hour": o["person_usd"],
        }
        size = training.checkpoint_bytes if training else o["checkpoint"]
        question = show_plan.Question(
            scaling=scaling, training=training, deadline_s=o["deadline"], marginal=o["marginal"], checkpoint_bytes=size,
            storage_points=o["storage_points"], people=people,
            rests_on=rests_on(rate_of_job(asked.rates, asked.job.nodes), asked.costs, asked),
            notes=asked.notes, sizes=_sizes(o["sizes"], asked.job.nodes, asked.job.devices_per_node),
        )  # fmt: skip
        result = show_plan.answer(question)
        if o["html"]:
            write({o["html"]: show_plan.page(question, result)})
        click.echo(json.dumps(result, indent=2, allow_nan=False) if o["as_json"] else show_plan.text(question, result))
    except BadInput as error:
        refuse(error)


def _measured(o: dict[str, Any], per_node: int) -> dict[float, float]:
    out = {}
    for text in o["measured"]:
        if "/" in text:
            from elastic.commands.economics.from_run import step_at

            world, seconds = step_at(text, o)
            out[world / per_node] = seconds
            continue
        size, _, step = text.partition(":")
        try:
            out[devices(size) / per_node] = duration(step)
        except units.BadUnit as error:
            raise BadInput("measured", f"--measured {text!r}: {error}; write it like 1024:9.8s") from None
    return out


def _sizes(text: str | None, nodes: int, per_node: int) -> list[int]:
    if text is None:
        return sorted({max(1, round(nodes * 2.0**k)) for k in range(-3, 5)})
    match = re.fullmatch(r"\s*([^:]+):([^:]+)\s*", text)
    try:
        if match is None:
            raise units.BadUnit("two device counts are needed")
        low, high = (max(1, round(devices(part) / per_node)) for part in match.groups())
    except units.BadUnit as error:
        raise BadInput("nodes", f"--sizes {text!r}: {error}; write it like 1024:131072") from None
    if low > high:
        raise BadInput("nodes", f"--sizes {text!r} runs downwards: write the smaller count first")
    out = [low]
    while out[-1] * 2 < high:
        out.append(out[-1] * 2)
    return sorted({*out, high})
