"""The command ``ckpt``: finds the subcommand, runs it, and turns what it raises into a text and an exit status."""

from __future__ import annotations

import importlib
import io
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

import click

from ckpt.errors import CkptError, Damaged, Refused, StorageError, Unsafe
from ckpt.tools.options import STATUSES, Settings

COMMANDS = {
    "ls": "ckpt.tools.commands.show:ls",
    "inspect": "ckpt.tools.commands.show:inspect",
    "diff": "ckpt.tools.commands.diff:diff_",
    "validate": "ckpt.tools.commands.validate:validate",
    "newest-valid": "ckpt.tools.commands.marks:newest_valid",
    "quarantine": "ckpt.tools.commands.marks:quarantine",
    "prune": "ckpt.tools.commands.prune:prune",
    "doctor": "ckpt.tools.commands.doctor:doctor",
    "adopt": "ckpt.tools.commands.moving:adopt",
    "export": "ckpt.tools.commands.moving:export",
}
BUG = 70


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of ``COMMANDS``."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, epilog=STATUSES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="torchrelay", prog_name="ckpt")
def ckpt() -> None:
    """Look at checkpoints, check them, choose and prune them, on any storage, without torch.

    URL is a path, or file://, s3://, gs://, az:// or any URL that fsspec knows. The result goes to stdout,
    progress and errors to stderr. NO_COLOR and COLUMNS are honoured.

    \b
    Examples:
      ckpt ls s3://bucket/run42
      ckpt inspect s3://bucket/run42@42000 --tree
      ckpt validate s3://bucket/run42 --level full
      ckpt prune s3://bucket/run42 --keep latest:3,every:1000
      ckpt doctor s3://bucket/run42
    """


def run(args: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status. Never raises."""
    settings = Settings()
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 (closed by the caller: as long as the process)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a name that the terminal cannot show is no reason to fail
    try:
        status = ckpt.main(args=args, prog_name="ckpt", standalone_mode=False, obj=settings)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (else the interpreter complains when it ends)
        return 0
    except OSError as error:  # of a path that was given, or of the output itself
        where = error.filename or "the output"
        return _report(StorageError(f"{where}: {error.strerror or error}", hint="give another place"), settings)
    except CkptError as error:
        error.hint = error.hint or _next(error, sys.argv[1:] if args is None else args)
        return _report(error, settings)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        sys.stderr.write("interrupted\n")
        return 130
    except Exception as error:
        return _report_bug(error, settings)
    return status if isinstance(status, int) else 0


def _next(error: CkptError, words: Sequence[str]) -> str | None:
    """What to do where the error itself does not know: it does not know the command and its URL."""
    command, *rest = words or ("ls",)
    url = next((w for w in rest if not w.startswith("-")), "URL")
    if isinstance(error, Refused):
        return f"ckpt {command} --help"
    if isinstance(error, Unsafe):
        return "do not load it with anything that unpickles; get the checkpoint from its source again"
    if isinstance(error, Damaged):
        return shlex.join(["ckpt", "ls", url, "--all"] if command == "validate" else ["ckpt", "validate", url])
    return shlex.join(["ckpt", "doctor", url]) if isinstance(error, StorageError) else None


def _report(error: CkptError, settings: Settings) -> int:
    from ckpt.tools import render

    with suppress(OSError):
        sys.stdout.flush()
    sys.stderr.write(render.error_text(error) + "\n")
    if settings.json:
        with suppress(OSError):
            sys.stdout.write(render.error_json(error) + "\n")
            sys.stdout.flush()
    return error.exit_status


def _report_bug(error: Exception, settings: Settings) -> int:
    sys.stdout.flush()
    if settings.debug:
        sys.stderr.write(traceback.format_exc())
    text = str(error).splitlines()[0][:300] if str(error) else "no message"
    sys.stderr.write(f"ckpt failed by a fault of its own: {type(error).__name__}: {text!a}\n")
    if not settings.debug:
        sys.stderr.write("  next  run it again with --debug and report what it prints; nothing was changed\n")
    if settings.json:
        from ckpt.tools import render

        body = {"code": "C-0", "error": type(error).__name__, "message": text, "exit_status": BUG}
        sys.stdout.write(render.as_json("ckpt.error/1", body) + "\n")
    return BUG


def main() -> None:
    """Entry point of the script ``ckpt``."""
    sys.exit(run())
