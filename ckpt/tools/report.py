"""What a validation finds: verdicts, damage, progress. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["quick", "full", "load"]
Verdict = Literal["good", "bad", "not verified"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One proven damage. ``object`` is a name in the folder or a record's key; ``span`` are bytes in it."""

    what: str
    object: str
    rank: int | None = None
    item: str | None = None
    block: int | None = None
    span: tuple[int, int] | None = None
    expected: str | None = None
    found: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How much of a step is known to be good: pieces of the part that was asked for. ``oldest`` is a time in UTC."""

    pieces: int
    now: int
    before: int
    subset: tuple[int, int] | None = None
    oldest: str | None = None

    @property
    def left(self) -> int:
        """Pieces that nobody has found good or bad."""
        return self.pieces - self.now - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome for one checkpoint. ``reason`` says why nothing could be verified; ``hints`` are no damage.

    ``unverified`` is what this level leaves open; ``ranks`` are those that wrote objects.
    """

    where: str
    attempt: str | None
    step: int | None
    level: Level
    verdict: Verdict
    reason: str | None = None
    findings: tuple[Finding, ...] = ()
    findings_total: int = 0
    hints: tuple[str, ...] = ()
    objects: int = 0
    bytes: int = 0
    bytes_hashed: int = 0
    blocks_hashed: int = 0
    seconds: float = 0.0
    tensors_proven: int = 0
    values_decoded: int = 0
    unverified: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    coverage: Coverage | None = None


@dataclass(slots=True)
class Progress:
    """What a long check tells: called from several threads, at every 32 MiB or so."""

    expect: Callable[[int], None] = lambda n: None  # bytes that will be read
    advance: Callable[[int], None] = lambda n: None


def overall(reports: Iterable[Report]) -> Verdict:
    """The verdict over several checkpoints: the worst one."""
    verdicts = {r.verdict for r in reports}
    return "bad" if "bad" in verdicts else "not verified" if "not verified" in verdicts or not verdicts else "good"
