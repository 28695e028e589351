"""The command ``prune``."""

from __future__ import annotations

import sys
from typing import Any

import click

from ckpt import policy
from ckpt.tools import pruning, render
from ckpt.tools.options import STATUSES, Duration, Settings, common, shown_duration
from ckpt.tools.target import Address, locate


@click.command(epilog=STATUSES)
@click.argument("url")
@click.option("--keep", "text", required=True, metavar="POLICY",
              help="What stays: latest:N (the newest N), every:N (multiples of N), tail:B (ever fewer the older, about "
                   "B for each power of B of age); several, with commas, keep what any of them keeps.")  # fmt: skip
@click.option("--apply", "really", is_flag=True, help="Do it. Without this nothing is changed.")
@click.option("--grace", "grace_s", type=Duration(), default="10m", show_default=True,
              help="How long a retired step's data stay, so that readers can finish.")  # fmt: skip
@click.option("--abandoned", is_flag=True, help="Also what starts that are over left unfinished.")
@common
@click.pass_obj
def prune(
    settings: Settings, url: str, text: str, really: bool, grace_s: float, abandoned: bool, client: str | None,
    options: dict[str, Any],
) -> int:  # fmt: skip
    """Show which steps a policy would remove from the run at URL; with --apply, remove them.

    A removed step is first retired: its commit record goes, and its data after the grace period (by the running
    job's own retention, or by pruning again). The newest step and quarantined ones always stay; so do unfinished
    attempts, but for those of starts that are over where --abandoned is given. A running job is not disturbed; while
    a start is choosing its step, nothing is removed (exit status 6).

    \b
    Examples:  ckpt prune s3://bucket/run42 --keep latest:3,every:1000
               ckpt prune s3://bucket/run42 --keep latest:3,tail:2 --apply --grace 1h
    """
    keep = policy.parse(text)
    address = Address.parse(url, client=client, options=options)
    if address.step is not None:
        raise click.UsageError(f"prune looks at all steps: leave @{address.step} out")
    place = locate(address)
    plan = pruning.plan(place, keep, grace_s, abandoned=abandoned)
    done = pruning.apply(place, plan, keep, grace_s, abandoned=abandoned) if really else None
    flags = f"--keep {keep} --grace {shown_duration(grace_s)}{' --abandoned' * abandoned} --apply"
    nothing = all(line.fate == "keep" for line in plan.lines)
    more = [] if nothing or (done and not done.waiting) else [address.paste("prune", flags=flags)]
    if settings.json:
        names = None if done is None else {k: [str(a) for a in getattr(done, k)]
                                           for k in ("retired", "deleted", "waiting")}  # fmt: skip
        print(render.as_json("ckpt.prune/1", {
            "url": place.store.url, "keep": str(keep), "grace_s": grace_s, "applied": really, "done": names,
            "epoch": str(plan.epoch), "starting": str(plan.starting) if plan.starting else None,
            "retire_bytes": _bytes(plan, "retire"), "delete_bytes": _bytes(plan, "delete"),
            "keep_bytes": _bytes(plan, "keep"),
            "attempts": [{"step": x.attempt.step, "attempt": str(x.attempt), "fate": x.fate, "why": x.why,
                          "bytes": x.bytes} for x in plan.lines], "next": more,
        }))  # fmt: skip
    else:
        _print(place.store.url, plan, done, more)
    return 0


def _bytes(plan: pruning.Plan, fate: str) -> int:
    return sum(x.bytes for x in plan.lines if x.fate == fate)


def _print(url: str, plan: pruning.Plan, done: pruning.Done | None, more: list[str]) -> None:
    render.print_lines([f"{render.safe(url)}: {render.plural(len(plan.lines), 'attempt')}", ""])
    render.print_table(["step>", "fate", "size>", "attempt?", "why"],
                       [[str(x.attempt.step), x.fate, render.size(x.bytes), str(x.attempt), x.why]
                        for x in plan.lines])  # fmt: skip
    sums = []
    for fate, words in (("retire", "to retire"), ("delete", "to delete"), ("keep", "kept")):
        n = sum(x.fate == fate for x in plan.lines)
        sums.append(f"{n} {words} ({render.size(_bytes(plan, fate))})")
    render.print_lines(["", ", ".join(sums)])
    if done is None:
        render.print_lines(["nothing was changed" + (": this was a dry run" if more else ": nothing is to go")])
    else:
        waiting = f"; the data of {len(done.waiting)} go after the grace period" if done.waiting else ""
        render.print_lines([f"done: {len(done.retired)} retired, the data of {len(done.deleted)} deleted{waiting}"])
    if plan.starting is not None:
        sys.stderr.write(f"{plan.starting} is claimed and has not resumed: --apply is refused until it has\n")
    render.print_lines(f"next: {render.safe(line)}" for line in more)
