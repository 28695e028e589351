"""``drills run`` and ``drills report``: hold a drill, or a book of them, on a command; judge a saved one again."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from drills.checks import Check
    from drills.history import Record
    from drills.scenario import Plan, Scenario

STATUS = """
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


@click.command(epilog=STATUS)
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
@click.option(
    "--skip", multiple=True, metavar="CHECK", help="Leave a check out (names: drills describe NAME). Repeatable."
)
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
    "--seeds",
    type=click.IntRange(1),
    default=None,
    metavar="N",
    help="Hold it N times, with the seeds 1 to N.",
)
@click.option(
    "--controls",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    metavar="DIR",
    help="Keep control runs there, and take them from there, for drills of the same command [default: .controls "
    "beside the run folder].",
)
@click.option("--fresh-control", is_flag=True, help="Hold a control run of its own, and keep none.")
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
    """Hold the drill NAME on COMMAND; "book" holds every drill that means something there, FILE.toml one of yours.

    COMMAND is what you would type, after a double dash, with {url} where the target keeps its checkpoints and
    {log} for the file to which every rank appends a JSON line a step: step, rank, world, loss, samples, pid, t.
    It has to resume by itself when it is started again on the same {url}. For drills of S3 give --url-base s3://...
    and --storage-option endpoint_url=http://...: the target is led through a proxy by AWS_ENDPOINT_URL_S3, or by
    {endpoint} in the command.

    \b
    Example:
      drills run kill-any-rank --seed 7 --out out/demo -- \\
        torchrun --nproc-per-node 2 --max-restarts 3 train.py {url} --steps 60 --log-file {log}
      drills run book --seeds 3 --nproc 2 --out out/book -- \\
        torchrun --nproc-per-node {nproc} --max-restarts 3 train.py {url} --steps 60 --log-file {log}
    """
    if name == "book" or options["seeds"]:
        from drills.commands.campaign import campaign

        campaign(name, command, options)
    from drills.book import find

    scenario = find(name)
    folder = options["out"] or Path("out") / f"{scenario.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    record = hold_one(name, scenario, command, folder, options)
    finish(record, scenario, options["json_file"], options["html_file"])


def hold_one(name: str, scenario: Scenario, command: tuple[str, ...], folder: Path, options: dict[str, Any]) -> Record:
    """Check what was asked for, and hold one drill in ``folder``."""
    from drills.report.progress import Narrator
    from drills.runner import hold
    from drills.target import check_command

    plan = make_plan(name, scenario, command, folder.absolute(), options)
    check_command(plan.command, plan.nproc)
    _prepare(folder)
    silent = (lambda event: None) if options["quiet"] else Narrator()
    return hold(plan, scenario, folder, silent)


@click.command(epilog=STATUS)
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
    from drills.toml import from_dict

    record = load(folder)
    scenario = from_dict(record.scenario) if record.scenario else find(record.plan.drill)
    finish(record, scenario, json_file, html_file)


def make_plan(name: str, scenario: Scenario, command: tuple[str, ...], folder: Path, options: dict[str, Any]) -> Plan:
    """The plan from the command line; here strings become values."""
    import random
    from dataclasses import replace

    from drills.checks import CHECKS
    from drills.errors import Usage
    from drills.scenario import Plan

    if unknown := [c for c in options["skip"] if c not in CHECKS]:
        raise Usage(f"there is no check called {unknown[0]!r}", facts=[("checks", ", ".join(CHECKS))])
    bad = [o for o in options["storage_options"] if "=" not in o]
    if bad:
        raise Usage(f"--storage-option {bad[0]!r} is not KEY=VALUE")
    base = options["url_base"]
    targets = scenario.targets
    if options["recover_within"]:
        targets = replace(targets, first_step_s=options["recover_within"])
    first = scenario.strikes[0].when
    shelf = options["controls"] or folder.parent / ".controls"
    return Plan(
        drill=name, command=command, targets=targets, skip=tuple(options["skip"]), nproc=options["nproc"],
        seed=random.SystemRandom().randrange(10_000) if options["seed"] is None else options["seed"],
        url_base=f"{base.rstrip('/')}/{scenario.name}-{uuid.uuid4().hex[:8]}" if base else f"file://{folder}/store",
        when=replace(first, after=options["after"] or first.after, at_step=options["at_step"] or first.at_step,
                     rank=first.rank if options["rank"] is None else options["rank"]),
        control_runs=options["control_runs"], budget_s=options["budget"], resubmit=options["resubmit"],
        storage_options=tuple((k, v) for k, _, v in (o.partition("=") for o in options["storage_options"])),
        default_url=base is None, controls=None if options["fresh_control"] else str(shelf.absolute()),
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


def finish(record: Record, scenario: Scenario, json_file: str | None, html_file: str | None) -> NoReturn:
    """Judge, write the report, print the result, leave with the status."""
    from drills.checks import EXIT_STATUS, overall
    from drills.report.render import show

    text, checks = write_report(record, scenario, json_file, html_file)
    if json_file == "-":
        print(text)
    else:
        show(record, scenario, checks, report=str(record.folder / "report.html"))
    sys.exit(EXIT_STATUS[overall(checks, record)])


def write_report(
    record: Record, scenario: Scenario, json_file: str | None = None, html_file: str | None = None
) -> tuple[str, list[Check]]:
    """Judge, and write the report into the run folder and where else it was asked for; its JSON, and the checks."""
    from drills.checks import judge
    from drills.report.document import document
    from drills.report.html import page

    checks = judge(record, scenario)
    text = json.dumps(document(record, scenario, checks), indent=1)
    html = page(record, scenario, checks)
    for path, body in ((record.folder / "report.json", text + "\n"), (record.folder / "report.html", html),
                       (json_file if json_file != "-" else None, text + "\n"), (html_file, html)):  # fmt: skip
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(body, encoding="utf-8")
    return text, checks
