"""The command ``drills``. Modules that do the work are imported by the command that needs them."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from drills.history import Record
    from drills.scenario import Scenario

_STATUS = """
\b
Exit status:
  0   pass: all that was asked for was checked and is good
  1   fail: the job did not survive the drill as it should
  2   usage: the command, a drill or an option is wrong; nothing was started
  3   not verified: something could not be checked; the table says what and why
  70  harness broke: the drill itself failed; says nothing about the job
  130 / 143  interrupted; everything that the drill had started was ended
"""


def _seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """A duration such as 90s, 5m or 1h, in seconds."""
    if value is None:
        return None
    m = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", value.strip())
    if m is None or float(m[1]) <= 0:
        raise click.BadParameter(f"{value!r} is not a duration; write 90s, 5m or 1h", ctx, param)
    return float(m[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[m[2]]


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=_STATUS)
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


@cli.command("list")
@click.option("--json", "as_json", is_flag=True, help="JSON, schema drills.list/1.")
def list_(as_json: bool) -> None:
    """List the drills of the book."""
    from drills.book import BOOK

    if as_json:
        rows = [{"name": s.name, "summary": s.summary, "meant_to_fail": bool(s.meant_to_fail)} for s in BOOK.values()]
        click.echo(json.dumps({"schema": "drills.list/1", "drills": rows}, indent=1))
        return
    width = max(map(len, BOOK))
    for s in BOOK.values():
        click.echo(f"{s.name:<{width}}  {s.summary}")


@cli.command()
@click.argument("name")
def show(name: str) -> None:
    """Show what a drill does, when, and what it is judged by."""
    from drills.book import find
    from drills.checks import CHECKS
    from drills.target import EXAMPLE

    s = find(name)
    t = s.targets
    facts = [
        ("does", s.summary), ("proves", s.proves), ("faults", ", ".join(f.name for f in s.faults)),
        ("when", "after the first committed step" if s.when.after == "commit" else "from the first step on"),
        ("targets", f"noticed {t.detect_s:g} s, restarted {t.restart_s:g} s, first new step {t.first_step_s:g} s"),
        *([("meant to fail", s.meant_to_fail)] if s.meant_to_fail else []),
    ]  # fmt: skip
    for label, text in facts:
        click.echo(f"{label:<14}{text}")
    click.echo("checks")
    for check, judge in CHECKS.items():
        if check != "oracle sees" or s.meant_to_fail:
            click.echo(f"  {check:<22}{(judge.__doc__ or '').splitlines()[0]}")
    click.echo(f"{'example':<14}{EXAMPLE.replace('kill-any-rank', name)}")


@cli.command(epilog=_STATUS)
@click.argument("name")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--seed", type=int, default=None, help="Draws step and rank; without it a random one is taken and printed."
)
@click.option("--at-step", type=click.IntRange(1), default=None, help="Strike after this step instead of a drawn one.")
@click.option("--rank", type=click.IntRange(0), default=None, help="Strike this rank instead of a drawn one.")
@click.option(
    "--after",
    type=click.Choice(["commit", "start"]),
    default=None,
    help="From where on a step may be drawn: the first committed step (default), or the start.",
)
@click.option("--nproc", type=click.IntRange(1), default=None, help="Fills the placeholder {nproc} of the command.")
@click.option(
    "--control-runs",
    type=click.IntRange(1, 5),
    default=1,
    show_default=True,
    help="2 finds out whether the target itself is deterministic.",
)
@click.option(
    "--recover-within",
    callback=_seconds,
    metavar="DURATION",
    default=None,
    help="Target for the first new step (120s).",
)
@click.option(
    "--budget",
    callback=_seconds,
    metavar="DURATION",
    default="10m",
    show_default=True,
    help="Hard limit for all runs together.",
)
@click.option(
    "--resubmit",
    type=click.IntRange(0, 20),
    default=0,
    show_default=True,
    help="Start the command again after it has ended with an error, as a scheduler would.",
)
@click.option("--skip", multiple=True, metavar="CHECK", help="Leave a check out (names: drills show NAME). Repeatable.")
@click.option(
    "--url-base",
    default=None,
    metavar="URL",
    help="Where the runs keep their checkpoints, each drill below a folder of its own (default: the run folder).",
)
@click.option(
    "--storage-option",
    "storage_options",
    multiple=True,
    metavar="KEY=VALUE",
    help="For reading checkpoints back through fsspec. The target gets its own from its environment.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="Run folder (default out/NAME-TIME). That of an earlier drill is replaced.",
)
@click.option("--json", "json_file", default=None, metavar="FILE", help="Also write the JSON there; - prints it.")
@click.option("--html", "html_file", default=None, metavar="FILE", help="Also write the HTML page there.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
def run(name: str, command: tuple[str, ...], **options: Any) -> None:
    """Hold the drill NAME on COMMAND.

    COMMAND is what you would type, after a double dash, with {url} where the target keeps its checkpoints and
    {log} for the file to which every rank appends a JSON line a step: step, rank, world, loss, samples, pid, t.
    It has to resume by itself when it is started again on the same {url}.

    \b
    Example:
      drills run kill-any-rank --seed 7 --out out/demo -- \\
        torchrun --nproc-per-node 2 --max-restarts 3 train.py {url} --steps 60 --log-file {log}
    """
    from drills.book import find
    from drills.report.progress import Narrator
    from drills.runner import hold
    from drills.target import check_command

    scenario = find(name)
    folder = options["out"] or Path("out") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    plan = _plan(scenario, command, folder.absolute(), options)
    check_command(plan.command, plan.nproc)
    _prepare(folder)
    silent = (lambda event: None) if options["quiet"] else Narrator()
    record = hold(plan, scenario, folder, silent)
    _finish(record, scenario, options["json_file"], options["html_file"])


@cli.command(epilog=_STATUS)
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--json", "json_file", default=None, metavar="FILE", help="Also write the JSON there; - prints it.")
@click.option("--html", "html_file", default=None, metavar="FILE", help="Also write the HTML page there.")
def report(folder: Path, json_file: str | None, html_file: str | None) -> None:
    """Judge a saved run folder again, and write its report anew.

    \b
    Example:
      drills report out/demo --json -
    """
    from drills.book import find
    from drills.history import load

    record = load(folder)
    _finish(record, find(record.plan.drill), json_file, html_file)


def _plan(scenario: Scenario, command: tuple[str, ...], folder: Path, options: dict[str, Any]) -> Any:
    """The plan from the command line; here strings become values."""
    import random
    from dataclasses import replace

    from drills.checks import CHECKS
    from drills.errors import Usage
    from drills.scenario import Plan
    from drills.schedule import When

    if unknown := [c for c in options["skip"] if c not in CHECKS]:
        raise Usage(f"there is no check called {unknown[0]!r}", facts=[("checks", ", ".join(CHECKS))])
    bad = [o for o in options["storage_options"] if "=" not in o]
    if bad:
        raise Usage(f"--storage-option {bad[0]!r} is not KEY=VALUE")
    base = options["url_base"]
    targets = scenario.targets
    if options["recover_within"]:
        targets = replace(targets, first_step_s=options["recover_within"])
    return Plan(
        drill=scenario.name, command=command, targets=targets, skip=tuple(options["skip"]), nproc=options["nproc"],
        seed=random.SystemRandom().randrange(10_000) if options["seed"] is None else options["seed"],
        url_base=f"{base.rstrip('/')}/{scenario.name}-{uuid.uuid4().hex[:8]}" if base else f"file://{folder}/store",
        when=When(after=options["after"] or scenario.when.after, at_step=options["at_step"], rank=options["rank"]),
        control_runs=options["control_runs"], budget_s=options["budget"], resubmit=options["resubmit"],
        storage_options=tuple((k, v) for k, _, v in (o.partition("=") for o in options["storage_options"])),
        default_url=base is None,
    )  # fmt: skip


def _prepare(folder: Path) -> None:
    """An empty run folder; only that of an earlier drill is ever emptied."""
    from drills.errors import Usage
    from drills.history import FILE

    if folder.exists() and any(folder.iterdir()):
        if not (folder / FILE).is_file():
            raise Usage(f"{folder} is not empty and not the folder of a drill", hint="give another --out")
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)


def _finish(record: Record, scenario: Scenario, json_file: str | None, html_file: str | None) -> NoReturn:
    """Judge, write the report, print the result, leave with the status."""
    from drills.checks import EXIT_STATUS, judge, overall
    from drills.report.document import document
    from drills.report.html import page
    from drills.report.render import show

    checks = judge(record, scenario)
    text = json.dumps(document(record, scenario, checks), indent=1)
    html = page(record, scenario, checks)
    for path, body in ((record.folder / "report.json", text + "\n"), (record.folder / "report.html", html),
                       (json_file if json_file != "-" else None, text + "\n"), (html_file, html)):  # fmt: skip
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(body, encoding="utf-8")
    if json_file == "-":
        print(text)
    else:
        show(record, scenario, checks, report=str(record.folder / "report.html"))
    sys.exit(EXIT_STATUS[overall(checks, record)])


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
