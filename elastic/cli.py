"""The ``elastic`` command: a group whose commands are imported only when called.

To add one, write a click command in ``elastic/commands/`` and name it in :data:`COMMANDS`. An exception that carries
an ``exit_status`` ends the process with it and its text on stderr; anything unexpected is a bug and ends with 70.
"""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from typing import Any

import click

COMMANDS: dict[str, tuple[str, str]] = {
    "launch": ("elastic.commands.launch:command", "Start the ranks of a job and keep them going."),
    "interval": ("elastic.commands.economics.interval:command", "How often to save, what it costs, what to fix first."),
    "plan": ("elastic.commands.economics.plan:command", "How far a job can grow, and what a deadline needs."),
    "store": ("elastic.commands.store:command", "Hold the store where the hosts of a job meet."),
    "doctor": ("elastic.commands.doctor:command", "Whether the time-outs of a job heal it, or kill it."),
    "goodput": ("elastic.commands.ledger.goodput:command", "Where the hours of a run went, by cause, start and rank."),
    "failures": (
        "elastic.commands.ledger.failures:command",
        "What ended a run, what it cost, and the way back by phase.",
    ),
    "status": ("elastic.commands.ledger.status:command", "How a run stands now: step, speed, what is durable."),
    "compare": (
        "elastic.commands.ledger.compare:command",
        "Runs side by side: efficiency, and time to the same quality.",
    ),
}
"""name -> (module:attribute, what the command answers in one line)."""

EXIT_STATUS = """\b
Exit status:
  0   good                      5   storage or credentials
  1   damage, or a failed drill 6   busy, or superseded by a newer start
  2   usage                     70  a bug in the tool
  3   not verified              75  stopped on request, state saved
  4   nothing there"""


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when it is called or asked for help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of commands, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run, turning errors with an exit status into that status and bugs into 70."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, SystemExit, KeyboardInterrupt):
            raise
        except BrokenPipeError:
            sys.stderr.close()
            ctx.exit(0)
        except Exception as error:
            status = getattr(error, "exit_status", None)
            if not isinstance(status, int):
                traceback.print_exc()
                click.echo("This is a bug in elastic: please report it with the lines above.", err=True)
                status = 70
            else:
                click.echo(str(error), err=True)
            ctx.exit(status)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_STATUS,
)
@click.version_option(package_name="torchrelay", prog_name="elastic")
def cli() -> None:
    """Keep a training job going: when to save, what failures cost, how far it can grow.

    \b
    Try first:
      elastic interval --mtbf 6h --save 40s
    """


def main() -> None:
    """Entry point of the ``elastic`` script."""
    cli(prog_name="elastic")


if __name__ == "__main__":
    main()
