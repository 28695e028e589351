"""Records as text for people and as JSON for programs. The only place that knows of colour and width."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckpt.errors import CkptError
from ckpt.tools.describe import Branch, Entry
from ckpt.tools.report import Coverage, Finding, Progress, Report

STYLES = {"committed": "green", "good": "green", "damaged": "bold red", "bad": "bold red", "partial": "yellow",
          "unknown": "yellow", "not verified": "yellow"}  # fmt: skip
PLAIN_WIDTH = 10_000  # a pipe has no width: nothing is cut or wrapped there
NOTES_WIDTH = 24  # room for the last column of a table
LINE_EVERY_S = 10.0


def console(*, stderr: bool = False) -> Console:
    """A console for this moment's stream; NO_COLOR and COLUMNS are honoured."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS", "").isdigit() else PLAIN_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=True)


def as_json(schema: str, body: Mapping[str, Any]) -> str:
    """One JSON document; records become objects."""
    return json.dumps({"schema": schema, **_plain(body)}, indent=2)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {k: _plain(v) for k, v in asdict(value).items()}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def safe(text: str) -> str:
    """The text without characters that could move a terminal's cursor: names come from files."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def size(n: int | None) -> str:
    """Bytes in binary units: ``1.25 GiB``."""
    if n is None:
        return "-"
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= factor:
            return f"{n / factor:,.2f} {unit}"
    return f"{n} B"


def plural(n: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def moment(created: str | None) -> str:
    """A record's time in UTC, to the second."""
    if created is None:
        return "-"
    return datetime.fromisoformat(created).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def age_s(created: str | None) -> float | None:
    """Seconds since a record's time."""
    return None if created is None else round((datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds(), 1)


def age(created: str | None) -> str:
    """How long ago: ``5 min ago``."""
    seconds = age_s(created)
    if seconds is None:
        return "-"
    if seconds < 0:
        return "in the future"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return f"{int(seconds)} s ago"


def facts(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Aligned ``Key: value`` lines."""
    rows = [(k, safe(v)) for k, v in pairs]
    width = max((len(k) for k, _ in rows), default=0) + 1
    return (f"{k + ':':<{width}} {v}" for k, v in rows)


def print_lines(lines: Iterable[str]) -> None:
    """Plain lines on stdout."""
    for line in lines:
        sys.stdout.write(line + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on stdout, states coloured; only the last column is folded where the width is too small.

    A name that ends in ">" is of a right-aligned column, one in "?" of a column that a narrow terminal leaves out.
    """
    out = console()
    cells = [[safe(cell) for cell in row] for row in rows]
    widths = [max(len(c) for c in column) + 2 for column in zip(*cells, [c.rstrip(">?") for c in columns], strict=True)]
    shown = [n for n, name in enumerate(columns) if "?" not in name or sum(widths[:-1]) + NOTES_WIDTH <= out.width]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for n in shown:
        right = ">" in columns[n]
        last = n == len(columns) - 1
        table.add_column(
            columns[n].rstrip(">?"), justify="right" if right else "left", no_wrap=not last, overflow="fold"
        )
    for row in cells:
        table.add_row(*(Text(row[n], style=STYLES.get(row[n], "")) for n in shown))
    out.width = max(out.width, sum(widths[n] for n in shown[:-1]) + NOTES_WIDTH // 2)  # cells are never cut
    with out.capture() as captured:
        out.print(table, soft_wrap=False)
    print_lines(line.rstrip() for line in captured.get().splitlines())


def shape(dims: Sequence[int] | None) -> str:
    """A shape as Python writes it."""
    return "-" if dims is None else str(tuple(dims))


def entry_lines(entries: Sequence[Entry]) -> Iterator[str]:
    """One entry a line: dtype or kind, shape, bytes, name."""
    rows = [
        (e.dtype or e.kind, shape(e.shape), "-" if e.bytes is None else str(e.bytes), safe(e.name)) for e in entries
    ]
    widths = [max((len(r[n]) for r in rows), default=0) for n in range(3)]
    return (f"{d:<{widths[0]}}  {s:<{widths[1]}}  {b:>{widths[2]}}  {name}" for d, s, b, name in rows)


def tree_lines(branches: Sequence[Branch], indent: str = "") -> Iterator[str]:
    """The tree of names: groups with their sums, leaves with shape, dtype and bytes."""
    for n, b in enumerate(branches):
        last = n == len(branches) - 1
        yield f"{indent}{'└─ ' if last else '├─ '}{safe(b.label)}  {_about(b)}"
        yield from tree_lines(b.children, indent + ("   " if last else "│  "))


def _about(b: Branch) -> str:
    if b.entry is None:
        tensors = f"{plural(b.tensors, 'tensor')}, {size(b.bytes)}" if b.tensors else ""
        return "; ".join(filter(None, [tensors, plural(b.values, "value") if b.values else ""]))
    if b.entry.dtype is None:
        return {"per_rank": "value of one rank", "replicated": "value, the same on all ranks"}.get(
            b.entry.kind, "value"
        )
    return f"{shape(b.entry.shape)} {b.entry.dtype}, {size(b.entry.bytes)}"


def cut(lines: Iterable[str], limit: int) -> Iterator[str]:
    """At most ``limit`` lines (0: all), and how many there are besides."""
    more = 0
    for n, line in enumerate(lines):
        if limit and n >= limit:
            more += 1
        else:
            yield line
    if more:
        yield f"… showing {limit} of {limit + more}; --limit 0 shows all"


def report_lines(report: Report) -> Iterator[str]:
    """A verdict, and under it each damage with what was expected and found."""
    name = f"step {report.step}" if report.step is not None else safe(report.where)
    what = f"{plural(report.objects, 'object')}, {size(report.bytes)}"
    if report.verdict == "good" and report.level == "quick":
        about = f"{what}: all there in the right size; their bytes were not read (--level full does)"
    elif report.verdict == "good" and report.level == "load":
        proven = f"{plural(report.tensors_proven, 'tensor')} loaded and proven"
        about = f"{what}: {proven}, {plural(report.values_decoded, 'value')} decoded in {report.seconds:.1f} s"
    elif report.verdict == "good":
        hashed = f"{plural(report.blocks_hashed, 'block')}, {size(report.bytes_hashed)} hashed"
        about = f"{what}: {hashed} in {report.seconds:.1f} s"
    elif report.verdict == "bad":
        about = f"{report.findings_total} damaged"
    else:
        about = safe(report.reason or "")
    yield f"{report.verdict}: {name} ({report.level}): {about}"
    if report.coverage is not None:
        yield f"  {_coverage(report.coverage)}"
    for f in report.findings:
        yield from _finding_lines(f)
    if report.findings_total > len(report.findings):
        yield f"  … and {report.findings_total - len(report.findings)} more like these"
    for hint in report.hints:
        yield f"  hint, no damage: {safe(hint)}"
    for text in report.unverified:
        yield f"  not verified: {safe(text)}"


def _coverage(c: Coverage) -> str:
    part = f"part {c.subset[0]} of {c.subset[1]}: " if c.subset else ""
    before = f", {c.before} found good before (the oldest {age(c.oldest)})" if c.before else ""
    return f"{part}{plural(c.pieces, 'piece')}: {c.now} validated now{before}, {c.left} left"


def _finding_lines(f: Finding) -> Iterator[str]:
    yield f"  {safe(f.object)}: {safe(f.what)}"
    item = f.item if f.block is None else f"{f.item}, block {f.block}"
    pairs = [("item", item), ("bytes", f"{f.span[0]}-{f.span[1]}" if f.span else None), ("expected", f.expected),
             ("found", f.found), ("written by", None if f.rank is None else f"rank {f.rank}")]  # fmt: skip
    for label, value in pairs:
        if value is not None:
            yield f"    {label:<10}  {safe(value)}"


def error_text(error: CkptError) -> str:
    """An error as it is printed."""
    clean = type(error)(safe(error.message), facts=[(k, safe(v)) for k, v in error.facts],
                        hint=safe(error.hint) if error.hint else None)  # fmt: skip
    return str(clean)


def error_json(error: CkptError) -> str:
    """An error as a document."""
    return as_json("ckpt.error/1", {
        "code": error.code, "error": type(error).__name__, "message": error.message, "facts": error.facts,
        "next": error.hint, "exit_status": error.exit_status,
    })  # fmt: skip


@contextmanager
def progress(label: str) -> Iterator[Progress]:
    """Progress on stderr: a bar on a terminal, else a line every ten seconds."""
    if sys.stderr.isatty():
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
                   TransferSpeedColumn(), TimeRemainingColumn())  # fmt: skip
        with Bar(*columns, console=console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=0)
            known = [0]

            def expect(n: int) -> None:
                known[0] += n
                bar.update(task, total=known[0])

            yield Progress(expect=expect, advance=lambda n: bar.advance(task, n))
        return
    lines = _Lines(label)
    yield Progress(expect=lines.expect, advance=lines.advance)


class _Lines:
    def __init__(self, label: str) -> None:
        self.label, self.total, self.done, self.last = label, 0, 0, time.monotonic()

    def expect(self, n: int) -> None:
        self.total += n

    def advance(self, n: int) -> None:
        self.done += n
        if time.monotonic() - self.last >= LINE_EVERY_S:
            self.last = time.monotonic()
            sys.stderr.write(f"{self.label}: {size(self.done)} of {size(self.total)}\n")
