"""Tables for the terminal: rich where there is one, aligned text where there is none."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from drills.checks import Check, Verdict, overall
from drills.history import Record
from drills.report.story import replay_line, tell
from drills.scenario import Scenario

_COLOUR = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.BROKE: "magenta", Verdict.UNKNOWN: "yellow"}


def show(record: Record, scenario: Scenario, checks: Sequence[Check], *, report: str) -> None:
    """Print the verdict, the story and the table of checks to stdout."""
    facts = head(record, scenario, checks)
    foot = [("report", report), ("replay", replay_line(record.plan, record.moment))]
    if sys.stdout.isatty():
        _show_rich(facts, checks, foot, overall(checks, record))
    else:
        print("\n".join([*_aligned(facts), "", *table(checks), "", *_aligned(foot)]))


def head(record: Record, scenario: Scenario, checks: Sequence[Check]) -> list[tuple[str, str]]:
    """What a person wants to know first, as (label, sentence)."""
    story = tell(record, scenario, checks)
    facts = [
        ("drill", f"{scenario.name}, seed {record.plan.seed}"),
        ("verdict", overall(checks, record).upper()),
        ("done", story.done), ("back", story.back), ("lost", story.lost), ("same", story.same),
    ]  # fmt: skip
    if record.advice:
        facts.append(("next", record.advice))
    if story.broke:
        facts.insert(2, ("broke", f"{story.broke} (this is the drill's failure, not the target's)"))
    if story.meant:
        facts.insert(2, ("meant", story.meant))
    return facts


def table(checks: Sequence[Check]) -> list[str]:
    """The checks as aligned text: one line each, the reason below where there is one to give."""
    rows = [("check", "verdict", "value", "target"), *((c.name, c.verdict.value, c.value, c.target) for c in checks)]
    widths = [max(len(r[i]) for r in rows) for i in range(3)]
    lines = []
    for row, check in zip(rows, [None, *checks], strict=True):
        lines.append("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]).rstrip())
        if check and check.detail and check.verdict is not Verdict.PASS:
            lines += [f"{'':<{widths[0]}}  {text}" for text in check.detail.splitlines()]
    return lines


def _aligned(facts: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(label) for label, _ in facts)
    return [f"{label:<{width}}  {text}" for label, text in facts]


def _show_rich(
    facts: Sequence[tuple[str, str]], checks: Sequence[Check], foot: Sequence[tuple[str, str]], verdict: Verdict
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    grid = Table.grid(padding=(0, 2))
    for label, text in facts:
        grid.add_row(Text(label, "dim"), Text(text, f"bold {_COLOUR[verdict]}" if label == "verdict" else ""))
    console.print(grid)
    grid = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("check", "verdict", "value", "target"):
        grid.add_column(name)
    for c in checks:
        value = Text(c.value)
        if c.detail and c.verdict is not Verdict.PASS:
            value.append(f"\n{c.detail}", "dim")
        grid.add_row(Text(c.name), Text(c.verdict.value, _COLOUR[c.verdict]), value, Text(c.target))
    console.print(grid)
    for label, text in foot:
        console.print(Text(f"{label}  ", "dim").append(text), soft_wrap=True)
