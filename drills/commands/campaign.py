"""Many drills in a row: the whole book, or one drill with many seeds. Resumable; a line a drill in results.jsonl."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from drills.commands.run import hold_one, write_report

if TYPE_CHECKING:
    from drills.scenario import Scenario

RESULTS = "results.jsonl"
_ORDER = ("harness broke", "fail", "not verified", "pass")


def campaign(name: str, command: tuple[str, ...], options: dict[str, Any]) -> NoReturn:
    """Hold every drill that the file of results does not have yet; print the table, leave with the worst status."""
    from drills.book import BOOK, find
    from drills.checks import EXIT_STATUS, Verdict

    scenarios = {n: s for n, s in BOOK.items() if not s.meant_to_fail} if name == "book" else {name: find(name)}
    given = 1 if options["seed"] is None else options["seed"]
    seeds = range(1, options["seeds"] + 1) if options["seeds"] else (given,)
    folder: Path = (
        options["out"] or Path("out") / f"{'book' if name == 'book' else name}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    options = {**options, "controls": options["controls"] or folder / ".controls"}
    results = read(folder / RESULTS)
    done = {(r["drill"], r["seed"]) for r in results if r["verdict"] != Verdict.BROKE}
    for seed in seeds:
        for drill, scenario in scenarios.items():
            if (scenario.name, seed) not in done:
                row = _one(drill, scenario, command, folder, {**options, "seed": seed})
                results.append(row)
                with (folder / RESULTS).open("a", encoding="utf-8") as f:
                    f.write(json.dumps(row) + "\n")
    rows = list({(r["drill"], r["seed"]): r for r in results}.values())  # of one held again, the last
    worst = min((r["verdict"] for r in rows), key=_ORDER.index, default="pass")
    document = {"schema": "drills.book/1", "verdict": worst, "results": rows}
    if options["json_file"]:
        text = json.dumps(document, indent=1)
        print(text) if options["json_file"] == "-" else Path(options["json_file"]).write_text(text + "\n")
    if options["json_file"] != "-":
        click.echo("\n".join(table(rows)))
    sys.exit(EXIT_STATUS[Verdict(worst)])


def _one(
    name: str, scenario: Scenario, command: tuple[str, ...], folder: Path, options: dict[str, Any]
) -> dict[str, Any]:
    place = folder / f"{scenario.name}-{options['seed']}"
    place.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    record = hold_one(name, scenario, command, place, options)
    document = json.loads(write_report(record, scenario)[0])
    bad = [c for c in document["checks"] if c["verdict"] != "pass"]
    phases = document["phases_s"] or {}
    why = "; ".join(document["broke"]) or document["ended_early"] or "; ".join(
        f"{c['name']}: {c['detail'] or c['value']}" for c in bad if c["value"] != "not reached")  # fmt: skip
    return {
        "drill": scenario.name, "seed": options["seed"], "verdict": document["verdict"], "why": why[:600],
        "first_step_s": phases.get("first_step"), "lost_steps": len((document["lost"] or {}).get("steps", ())),
        "seconds": round(time.monotonic() - began, 1), "folder": str(place), "t": time.time(),
    }  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    """The results so far; a line that was cut off is left out."""
    rows = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(text))
        except ValueError:
            continue
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A line a drill, the reason below where it did not pass, and the count."""
    width = max((len(r["drill"]) for r in rows), default=5)
    lines = [f"{'drill':<{width}}  seed  verdict        first step   took"]
    for r in rows:
        first = "-" if r["first_step_s"] is None else f"{r['first_step_s']:.1f} s"
        lines.append(f"{r['drill']:<{width}}  {r['seed']:>4}  {r['verdict']:<13}  {first:>10}  {r['seconds']:5.1f} s")
        if r["verdict"] != "pass":
            lines.append(f"{'':<{width}}        {r['why']}")
    counts = {v: sum(r["verdict"] == v for r in rows) for v in reversed(_ORDER)}
    return [*lines, "", ", ".join(f"{n} {v}" for v, n in counts.items() if n)]
