"""``elastic status``: how a run stands now, once or live."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click

from elastic.commands.economics.options import DURATION
from elastic.commands.ledger.source import events_of, reachable, reader


@click.command("status", short_help="How a run stands now: step, speed, what is durable, whether it lives.")
@click.argument("url")
@reachable
@click.option("--watch", is_flag=True, help="Keep looking until the run ends; a line each time where no terminal is.")
@click.option("--every", type=DURATION, default="5s", show_default=True, help="How often --watch looks.")
@click.option(
    "--json", "as_json", is_flag=True, help="Everything as JSON, schema elastic.status/1; a line with --watch."
)
def command(url: str, **o: Any) -> None:
    """How the run at URL stands now: where it is, how fast, what is durable, and whether it still lives.

    Only reads; a run is never disturbed. A run gives a sign of life after a quarter of its up-time, at most
    after 5 minutes; one that has said nothing for twice as long is called silent, which may mean dead, hanging or
    cut off from its storage.

    \b
    Examples:
      elastic status s3://bucket/run42
      elastic status runs/gpt --watch --every 2s
      elastic status runs/gpt --json | jq .durable_step

    Exit status: 0 running, finished or stopped; 1 failed and nobody has gone on; 3 silent; 4 where no ledger is;
    5 for storage.
    """
    from elastic.commands.ledger import show_status
    from elastic.ledger.status import Status, status

    source = reader(url, o)

    def look() -> tuple[Status, tuple[str, ...]]:
        found, notes = events_of(url, source.read())
        return status(found.events, now=time.time()), tuple(notes)

    def say(s: Status, notes: tuple[str, ...], *, brief: bool) -> str:
        if o["as_json"]:
            return json.dumps(show_status.record(s, url, notes), indent=None if brief else 2, allow_nan=False)
        return show_status.line(s) if brief else show_status.text(s, notes)

    if o["watch"] and sys.stdout.isatty() and not o["as_json"]:
        s = _live(url, look, o["every"])
    else:
        s, notes = look()
        click.echo(say(s, notes, brief=o["watch"]))
        while o["watch"] and s.state in LIVES:
            time.sleep(o["every"])
            s, notes = look()
            click.echo(say(s, notes, brief=True))
    click.get_current_context().exit(show_status.EXIT_STATUS[s.state])


LIVES = ("running", "starting", "silent", "restarting")
"""States that --watch goes on from."""


def _live(url: str, look: Any, every_s: float) -> Any:
    """Redraw in place until the run ends or Ctrl-C; the last picture stays."""
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    from elastic.commands.ledger.show_status import COLOURS, facts

    def drawn(s: Any, notes: tuple[str, ...]) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_row(Text("run", "dim"), Text(url))
        for n, (name, words) in enumerate(facts(s)):
            grid.add_row(Text(name, "dim"), Text(words, COLOURS[s.state] if n == 0 else ""))
        for note in (*notes, *s.account.notes):
            grid.add_row(Text("!", "yellow"), Text(note))
        return grid

    s, notes = look()
    with Live(drawn(s, notes), console=Console(highlight=False), auto_refresh=False) as live:
        while s.state in LIVES:
            try:
                time.sleep(every_s)
            except KeyboardInterrupt:
                break
            s, notes = look()
            live.update(drawn(s, notes), refresh=True)
    return s
