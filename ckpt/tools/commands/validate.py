"""The command ``validate``."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import click

from ckpt.tools import render, survey
from ckpt.tools.junit import junit_xml
from ckpt.tools.options import STATUSES, Duration, Settings, common
from ckpt.tools.report import Level, Report
from ckpt.tools.scrub import Budget
from ckpt.tools.target import Address, locate

VERDICT_STATUS = {"good": 0, "bad": 1, "not verified": 3}


def _subset(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, int] | None:
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text or "")
    if text is None or (match and 1 <= int(match[1]) <= int(match[2])):
        return (int(match[1]), int(match[2])) if match else None
    raise click.BadParameter(f"{text!r} is not N/T with 1 ≤ N ≤ T, such as 2/7")


@click.command(epilog=STATUSES)
@click.argument("url", metavar="URL[@STEP]")
@click.option("--level", type=click.Choice(["quick", "full", "load"]), default="quick", show_default=True,
              help="quick: records, presence, sizes.  full: every block of every object is hashed.  load: every "
                   "tensor is loaded and its fingerprint compared, every value decoded: needs torch only.")  # fmt: skip
@click.option("--all", "every", is_flag=True, help="Every step that counts, not only down to the newest good one.")
@click.option("--subset", metavar="N/T", callback=_subset, help="Only the N-th of T parts; the T parts are all of it.")
@click.option("--max-age", "max_age_s", type=Duration(), metavar="TIME",
              help="Leave out what was found good at this level within that time, such as 7d.")  # fmt: skip
@click.option("--max-duration", "max_duration_s", type=Duration(), metavar="TIME",
              help="Begin nothing after that time, such as 10m; the next call goes on with the rest.")  # fmt: skip
@click.option("--junit", type=click.Path(dir_okay=False), metavar="FILE", help="Also write the outcome as JUnit XML.")
@common
@click.pass_obj
def validate(
    settings: Settings, url: str, level: Level, every: bool, subset: tuple[int, int] | None, max_age_s: float | None,
    max_duration_s: float | None, junit: str | None, client: str | None, options: dict[str, Any],
) -> int:  # fmt: skip
    """Check a checkpoint against its records and checksums.

    Every object, tensor and rank that differs from what was saved is named. URL is a run (the newest usable step,
    and older ones until one is good; or the step after "@"), an attempt's folder, or a folder that
    ckpt.ObjectWriter wrote. The verdict is good, bad, or not verified; of a plain DCP folder
    the CRC-32 is compared that torch stores, of safetensors, which have no checksums, only the structure. Nothing is
    changed and no code from a file is run. Checksums find accidents, not attackers.

    With --subset, --max-age or --max-duration, what was found good is remembered in small records below scrub/ in the
    run, so that a later call goes on where this one stops; else nothing at all is written. What the budget leaves is
    not verified (exit status 3).

    \b
    Examples:  ckpt validate s3://bucket/run42 --level full
               ckpt validate s3://bucket/run42 --level full --all --max-age 7d --max-duration 10m
               ckpt validate /data/run42@42000 --level load --json
    """
    address = Address.parse(url, client=client, options=options)
    if every and address.step is not None:
        raise click.UsageError(f"--all means every step, @{address.step} one: give one of them")
    budget = None
    if subset or max_age_s is not None or max_duration_s is not None:
        if level == "quick":
            raise click.UsageError("--subset, --max-age and --max-duration are for --level full and load")
        until = None if max_duration_s is None else time.monotonic() + max_duration_s
        budget = Budget(subset=subset, max_age_s=max_age_s, until=until)
    place = locate(address)
    with render.progress(f"validate {level}") as progress:
        outcome = survey.survey(place, step=address.step, level=level, every=every, progress=progress,
                                 each=lambda report: _print_report(settings, report), budget=budget)  # fmt: skip
    if junit is not None:
        _write(Path(junit), junit_xml(outcome))
    next_lines = _next(outcome, address, address.of_run(place))
    if settings.json:
        print(render.as_json("ckpt.validate/1", {
            "url": outcome.where, "level": outcome.level, "verdict": outcome.verdict,
            "newest_good": outcome.newest_good, "newest_good_level": outcome.newest_good_level,
            "checkpoints": outcome.reports, "next": next_lines,
        }))  # fmt: skip
    else:
        if outcome.is_run:
            proof = f" ({outcome.newest_good_level})" if outcome.newest_good_level else ""
            found = "none" if outcome.newest_good is None else str(outcome.newest_good)
            render.print_lines(["", f"newest good step: {found}{proof}"])
        render.print_lines(f"next: {line}" for line in next_lines)
    return VERDICT_STATUS[outcome.verdict]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise click.BadParameter(f"{path} cannot be written: {e.strerror}", param_hint="--junit") from None


def _print_report(settings: Settings, report: Report) -> None:
    if not settings.json:
        render.print_lines(render.report_lines(report))
        sys.stdout.flush()


def _next(outcome: survey.Survey, address: Address, run: Address) -> list[str]:
    """What to do now, as lines to paste."""
    if outcome.verdict == "good":
        return [] if outcome.level != "quick" else [address.paste("validate", address.step, "--level full")]
    if not outcome.is_run:
        return [address.paste("inspect")]
    lines = [run.paste("ls", flags="--all")]
    if outcome.level == "quick" or outcome.newest_good_level == "quick":
        lines.append(run.paste("validate", outcome.newest_good, "--level full"))
    elif outcome.newest_good is None:
        lines.append(run.paste("validate", flags="--level full --all"))
    return lines
