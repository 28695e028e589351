"""The command ``doctor``."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import asdict
from typing import Any

import click

from elastic.commands.economics.options import DURATION

_MARKS = {"good": "ok", "warning": "WARN", "wrong": "WRONG", "not verified": "?"}
_STATUS = {"good": 0, "warning": 0, "not verified": 3, "wrong": 1}


@click.command("doctor", short_help="Whether the time-outs of a job heal it, or kill it.")
@click.option("--nodes", default=1, type=click.IntRange(min=1), help="Hosts; default 1.")
@click.option("--step", "step_s", type=DURATION, help="The longest usual step (p99).")
@click.option("--save", "save_s", type=DURATION, help="A save, to its commit.")
@click.option("--load", "load_s", type=DURATION, help="From the script's start to its first step.")
@click.option("--collective", "collective_s", type=DURATION, help="Process-group time-out; default 30min (gloo's).")
@click.option("--hang-timeout", "hang_s", type=DURATION, help="Of elastic launch; default: learned from steps.")
@click.option("--quiet-timeout", "quiet_s", type=DURATION, help="Of elastic launch; default 10min.")
@click.option("--shutdown-timeout", "shutdown_s", type=DURATION, help="Of elastic launch; default 30s.")
@click.option("--scheduler-grace", "scheduler_s", type=DURATION, help="From the scheduler's SIGTERM to its SIGKILL.")
@click.option("--keep-alive", "keep_alive_s", type=DURATION, help="keep_alive_interval; default 1s.")
@click.option("--attempts", "keep_alive_attempts", type=click.IntRange(min=1),
              help="keep_alive_max_attempt; default 5.")  # fmt: skip
@click.option("--last-call", "last_call_s", type=DURATION, help="last_call_timeout; default 3s.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON, schema elastic.doctor/1.")
def command(as_json: bool, **given: Any) -> None:
    """Check the order of a job's time-outs: step, hang, process group, save, load, keep-alive, scheduler.

    Time-outs that are each reasonable may together kill a healthy job, split it in two, or let it stand still for half
    an hour. What is not given is the default of elastic launch, or not verified.

    \b
    Examples:
      elastic doctor --step 4s --save 40s --load 2min --scheduler-grace 90s
      elastic doctor --nodes 16 --keep-alive 1s --attempts 2 --last-call 1s

    \b
    Exit status: 0 good, warnings included · 1 an order that does harm · 2 usage · 3 not all could be verified.
    """
    from elastic.launch import timeouts

    times = timeouts.Times(**{k: v for k, v in given.items() if v is not None})
    findings = timeouts.check(times)
    verdict = timeouts.worst(findings)
    if as_json:
        record = {"schema": "elastic.doctor/1", "verdict": verdict, "times": asdict(times),
                  "findings": [asdict(f) for f in findings]}  # fmt: skip
        click.echo(json.dumps(record, indent=2))
        sys.exit(_STATUS[verdict])
    width = max(len(f.rule) for f in findings)
    for f in findings:
        click.echo(f"{_MARKS[f.verdict]:<6}{f.rule:<{width}}  {f.found}")
        if f.fix is not None:
            click.echo(textwrap.fill(f.why, 110, initial_indent=" " * 8, subsequent_indent=" " * 8))
            click.echo(f"        next  {f.fix}")
    if any(f.verdict == timeouts.UNKNOWN for f in findings):
        click.echo("? not verified: give the times that are missing, such as --step, --save, --load, --scheduler-grace")
    sys.exit(_STATUS[verdict])
