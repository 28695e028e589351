"""``elastic failures``: every end of a run, what it cost, and how long each phase of the way back took."""

from __future__ import annotations

import json
from typing import Any

import click

from elastic.commands.economics.options import duration
from elastic.commands.ledger.source import events_of, reachable, reader
from elastic.ledger.recoveries import BUDGETS_S, PHASES
from elastic.units import BadUnit


@click.command("failures", short_help="What ended a run, what it cost, and the way back phase by phase.")
@click.argument("url")
@reachable
@click.option("--budget", "budgets", multiple=True, metavar="PHASE=TIME",
              help="Warn where a phase takes longer, like detect=5s or total=2min; repeat for others.")  # fmt: skip
@click.option("--last", type=click.IntRange(1), help="Only the last so many.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON, schema elastic.failures/1.")
def command(url: str, **o: Any) -> None:
    """What ended the run at URL and was followed by another start: whose failure, what was lost, the way back.

    The way back is timed from the end of training to the first new step, by phase:

    \b
      detect      a rank is gone, until a survivor says so
      stop        until the last old process has said its last
      respawn     the agent: rendezvous, and spawning the new processes
      import      a new process exists, until it asks for its process group
      join        until all ranks have met (elastic.init)
      build       until the run is entered: model, optimizer, data
      load        choosing, reading and verifying the checkpoint
      first step  until the first new step is complete

    A phase that is longer than its budget is warned about. What the ledger cannot know is said to be unknown:
    a process that dies alone, for one, is noticed by nobody in the run.

    \b
    Examples:
      elastic failures s3://bucket/run42
      elastic failures runs/gpt --budget detect=5s --budget total=2min --last 5

    Exit status: 0, also with warnings; 2 for a question that cannot be answered as asked, 4 where no ledger is,
    5 for storage.
    """
    from elastic.commands.ledger import show_failures
    from elastic.ledger.goodput import account
    from elastic.ledger.recoveries import recoveries

    budgets = dict(BUDGETS_S) | dict(_budget(text) for text in o["budgets"])
    found, notes = events_of(url, reader(url, o).read())
    whole = account(found.events)
    back = recoveries(whole)
    shown = back[-o["last"] :] if o["last"] else back
    told = show_failures.Told(url=url, account=whole, all=tuple(back), shown=tuple(shown), budgets=budgets,
                              notes=tuple(notes))  # fmt: skip
    if o["as_json"]:
        click.echo(json.dumps(show_failures.record(told), indent=2, allow_nan=False))
        return
    click.echo(show_failures.text(told))


def _budget(text: str) -> tuple[str, float]:
    phase, equals, limit = text.partition("=")
    if not equals or phase not in BUDGETS_S:
        raise click.UsageError(f"--budget {text}: write PHASE=TIME with one of {', '.join([*PHASES, 'total'])}")
    try:
        return phase, duration(limit)
    except BadUnit as error:
        raise click.UsageError(f"--budget {phase}: {error}") from None
