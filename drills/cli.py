"""The command ``drills``. Modules that do the work are imported by the command that needs them."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

import click

from drills.commands.book import describe, heal, list_
from drills.commands.run import STATUS, report, run


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=STATUS)
@click.version_option(package_name="torchrelay", message="%(package)s %(version)s")
def cli() -> None:
    """Prove that a training job survives what is done to it.

    A drill runs your command undisturbed, runs it again while something goes wrong, and compares the two bit for
    bit: every tensor and value of the checkpoints, losses, samples, random streams, data position.

    \b
    Example:
      drills run kill-any-rank --seed 7 -- \\
        torchrun --nproc-per-node 2 --max-restarts 3 train.py {url} --log-file {log}
    """


for command in (list_, describe, run, report, heal):
    cli.add_command(command)


def _interrupted(number: int, frame: object) -> NoReturn:
    """Leave through the ordinary way out, so that what was started is ended."""
    signal.signal(number, signal.SIG_IGN)  # once is enough: the second one must not cut the clean-up short
    raise SystemExit(128 + number)


def main() -> None:
    """Run the command line; errors of the tool's own tree become text and exit status."""
    before = {number: signal.signal(number, _interrupted) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        _run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run() -> None:
    from ckpt.errors import CkptError

    try:
        cli.main(prog_name="drills", standalone_mode=False)
    except CkptError as e:
        print(e, file=sys.stderr)
        sys.exit(e.exit_status)
    except click.exceptions.Exit as e:
        sys.exit(e.exit_code)
    except click.ClickException as e:
        e.show()
        sys.exit(e.exit_code)
    except (click.Abort, KeyboardInterrupt):
        print("interrupted; everything that the drill had started was ended", file=sys.stderr)
        sys.exit(130)
    except Exception:  # Python would leave with 1, which here means that the job failed its drill
        import traceback

        traceback.print_exc()
        sys.exit(70)
