"""The commands ``newest-valid`` and ``quarantine``."""

from __future__ import annotations

import sys
from typing import Any

import click

from ckpt.tools import marks, render
from ckpt.tools.options import STATUSES, Settings, common
from ckpt.tools.report import Level
from ckpt.tools.target import Address, locate


@click.command("newest-valid", epilog=STATUSES)
@click.argument("url")
@click.option("--level", type=click.Choice(["quick", "full"]), default="quick", show_default=True,
              help="quick: records, presence, sizes.  full: every block of every object is hashed.")  # fmt: skip
@common
@click.pass_obj
def newest_valid(settings: Settings, url: str, level: Level, client: str | None, options: dict[str, Any]) -> int:
    """Print the number of the newest valid step: the one that a restart resumes from.

    Nothing else goes to stdout; newer steps that are damaged or quarantined are named on stderr. Exit status 4
    where no step is valid. Nothing is changed.

    \b
    Example:  step=$(ckpt newest-valid s3://bucket/run42 --level full) || exit
    """
    address = Address.parse(url, client=client, options=options)
    if address.step is not None:
        raise click.UsageError(f"newest-valid chooses a step: leave @{address.step} out")
    place = locate(address)
    with render.progress(f"newest-valid {level}") as progress:
        found = marks.newest_valid(place, level, progress)
    for attempt, why in found.skipped:
        sys.stderr.write(render.safe(f"skipped {attempt}: {why}") + "\n")
    if settings.json:
        print(render.as_json("ckpt.newest-valid/1", {
            "url": place.store.url, "step": found.attempt.step, "attempt": str(found.attempt),
            "epoch": str(found.attempt.epoch), "level": level, "objects": found.report.objects,
            "bytes": found.report.bytes, "where": found.report.where,
            "skipped": [{"step": a.step, "attempt": str(a), "reason": why} for a, why in found.skipped],
        }))  # fmt: skip
    else:
        print(found.attempt.step)
    return 0


@click.command(epilog=STATUSES)
@click.argument("url", metavar="URL@STEP")
@click.option("--reason", metavar="TEXT", help="Why the step must not be used; goes into the record.")
@click.option("--lift", is_flag=True, help="Delete the step's mark, once a full validation finds it good.")
@click.option("--force", is_flag=True,
              help="Also the only usable step; with --lift: without the validation.")  # fmt: skip
@common
@click.pass_obj
def quarantine(
    settings: Settings, url: str, reason: str | None, lift: bool, force: bool, client: str | None,
    options: dict[str, Any],
) -> int:  # fmt: skip
    """Mark a step so that no restart chooses it; or lift such a mark.

    The step's data stay, and no running job is disturbed: the mark is heeded by the next restart, and by readers.

    \b
    Examples:  ckpt quarantine s3://bucket/run42@42000 --reason "loss spike from 41800"
               ckpt quarantine s3://bucket/run42@42000 --lift
    """
    if lift == (reason is not None):
        raise click.UsageError("give --reason TEXT to mark a step, or --lift to lift its mark")
    address = Address.parse(url, client=client, options=options)
    place = locate(address)
    if reason is not None:
        done = marks.put_mark(place, address.step, reason, force=force)
    else:
        with render.progress("validate full") as progress:
            done = marks.lift_mark(place, address.step, force=force, progress=progress)
    run = address.of_run(place)
    step = done.attempt.step
    follows = _follows(done, lift)
    next_line = run.paste("ls") if lift else run.paste("quarantine", step, "--lift")
    if settings.json:
        print(render.as_json("ckpt.quarantine/1", {
            "url": place.store.url, "step": step, "attempt": str(done.attempt), "reason": done.reason,
            "quarantined": not lift, "counts": done.counts,
            "newest_valid": done.newest.step if done.newest else None, "next": [next_line],
        }))  # fmt: skip
    else:
        what = f"no longer quarantined: step {step}" if lift else f"quarantined: step {step} ({done.reason})"
        newest = done.newest.step if done.newest else "none: a restart has nothing to resume from"
        undo = "see" if lift else "undo"
        render.print_lines(map(render.safe, [what, follows, f"newest valid step now: {newest}",
                                             f"{undo}: {next_line}"]))  # fmt: skip
    return 0


def _follows(done: marks.Marked, lift: bool) -> str:
    if not lift:
        return "no restart chooses it any more; its data stay"
    if not done.counts:
        return "it is off the line that counts, so no restart chooses it: a newer start builds on an older step"
    if done.newest == done.attempt:
        return "the next restart resumes from it"
    if done.newest is None or done.newest < done.attempt:
        return "it counts again, but its records or sizes are wrong: a restart falls back past it"
    return "it counts again, as an older step: retention may delete it"
