"""A validation in parts: cut in pieces, under a budget, with a memory of what was found good before. No torch.

The memory is small records below ``scrub/<attempt>/`` in the run: each names pieces that were good at one level, of one
manifest. They are never overwritten, and what cannot be read is ignored, so that two scrubs at once do no harm.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from ckpt.errors import CkptError
from ckpt.format.blocks import Item
from ckpt.format.layout import Attempt
from ckpt.format.manifest import ObjectRecord, utc_now
from ckpt.store.contract import Store
from ckpt.tools.report import Coverage, Level

PIECE_BYTES = 64 << 20  # a budget ends between two pieces
RECORD_EVERY_S = 30.0  # what a killed scrub forgets
_MAX_RECORD_BYTES = 4 << 20
_SCHEMA = "ckpt.scrub/1"


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks of one object that follow one another; none for an object that has no index, which is read whole."""

    record: ObjectRecord
    number: int
    blocks: tuple[tuple[Item, int], ...]

    @property
    def name(self) -> str:
        """The same in every scrub of the step."""
        return f"{self.record.name}#{self.number}"

    @property
    def span(self) -> tuple[int, int]:
        """Its bytes in the object."""
        if not self.blocks:
            return 0, self.record.bytes
        (first, n), (last, m) = self.blocks[0], self.blocks[-1]
        return first.block_range(n)[0], last.block_range(m)[1]


def cut(record: ObjectRecord, items: Sequence[Item]) -> list[Piece]:
    """All blocks of an object in pieces of about ``PIECE_BYTES``, each block in exactly one."""
    pieces: list[Piece] = []
    blocks: list[tuple[Item, int]] = []
    start = 0
    for item in items:
        if blocks and blocks[-1][0].start + blocks[-1][0].length != item.start:  # what lies between is not referred to
            pieces.append(Piece(record, len(pieces), tuple(blocks)))
            blocks = []
        start = start if blocks else item.start
        for n in range(item.block_count):
            blocks.append((item, n))
            end = item.block_range(n)[1]
            if end - start >= PIECE_BYTES:
                pieces.append(Piece(record, len(pieces), tuple(blocks)))
                blocks, start = [], end
    if blocks or not pieces:
        pieces.append(Piece(record, len(pieces), tuple(blocks)))
    return pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much to validate. ``subset`` (n, t): the n-th of t parts. ``max_age_s``: leave out what was found good within
    that time; without it, what was ever found good, unless ``subset`` alone is given. ``until``: ``time.monotonic``.
    """

    subset: tuple[int, int] | None = None
    max_age_s: float | None = None
    until: float | None = None

    @property
    def over(self) -> bool:
        """Whether no further piece may begin."""
        return self.until is not None and time.monotonic() >= self.until

    def part(self, names: Sequence[str]) -> list[str]:
        """The pieces of the subset: every t-th, so that the parts are disjoint and together all."""
        if self.subset is None:
            return list(names)
        n, of = self.subset
        return list(names[n - 1 :: of])


@dataclass
class Scrub:
    """The validation of one attempt under a budget. Thread-safe from ``begin`` on."""

    store: Store
    attempt: Attempt | None
    level: Level
    budget: Budget
    problem: str | None = None  # why nothing is remembered
    _manifest: str = ""
    _known: dict[str, str] = field(default_factory=dict)
    _part: list[str] = field(default_factory=list)
    _done: int = 0
    _fresh: list[str] = field(default_factory=list)
    _written: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, manifest_digest: str, names: Sequence[str]) -> list[str]:
        """Which of the step's pieces to validate now, those first that a record says nothing about."""
        self._manifest, self._written = manifest_digest, time.monotonic()
        self._part = self.budget.part(names)
        known = self._recall() if self.attempt is not None else {}
        if self.attempt is None:
            self.problem = "nothing is remembered of a folder outside a run"
        if self.budget.max_age_s is not None:
            now, age_s = datetime.now(UTC), self.budget.max_age_s
            known = {k: t for k, t in known.items() if (now - datetime.fromisoformat(t)).total_seconds() <= age_s}
        elif self.budget.until is None:
            known = {}  # a subset alone: its part is validated
        self._known = {k: t for k, t in known.items() if k in set(self._part)}
        return [name for name in self._part if name not in self._known]

    def good(self, name: str) -> None:
        """A piece was validated and is good; remembered within ``RECORD_EVERY_S``, or at the ``end``."""
        with self._lock:
            self._done += 1
            self._fresh.append(name)
            late = time.monotonic() - self._written >= RECORD_EVERY_S
            names = self._take() if late else []
        self._remember(names)

    def bad(self) -> None:
        """A piece was validated and is damaged: it will be validated again."""
        with self._lock:
            self._done += 1

    def end(self) -> Coverage:
        """Remember the rest."""
        with self._lock:
            names = self._take()
        self._remember(names)
        return Coverage(pieces=len(self._part), now=self._done, before=len(self._known),
                        subset=self.budget.subset, oldest=min(self._known.values(), default=None))  # fmt: skip

    def _take(self) -> list[str]:
        names, self._fresh, self._written = self._fresh, [], time.monotonic()
        return names

    # --- records ----------------------------------------------------------------------------------------------

    @property
    def _folder(self) -> str:
        assert self.attempt is not None
        return self.attempt.scrub_prefix

    def _remember(self, names: list[str]) -> None:
        if not names or self.attempt is None or self.problem:
            return
        record = {"schema": _SCHEMA, "attempt": str(self.attempt), "level": self.level, "created": utc_now(),
                  "manifest": self._manifest, "good": names}  # fmt: skip
        key = f"{self._folder}{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(6)}.json"
        try:
            self.store.put(key, [(json.dumps(record) + "\n").encode()])
        except CkptError as e:  # a scrub of a store that may only be read is a scrub all the same
            self.problem = f"nothing is remembered: {e.message}"

    def _recall(self) -> dict[str, str]:
        """When each piece was last found good, by whatever records can be read."""
        known: dict[str, str] = {}
        for entry in self.store.list(self._folder):
            if not entry.key.endswith(".json") or entry.size > _MAX_RECORD_BYTES:
                continue
            try:
                record = json.loads(self.store.get(entry.key, max_bytes=_MAX_RECORD_BYTES))
                created = record["created"]
                mine = (_SCHEMA, str(self.attempt), self.level, self._manifest)
                if mine != tuple(record[k] for k in ("schema", "attempt", "level", "manifest")):
                    continue
                age_s = (datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds()
                for name in record["good"] if age_s > -300 else ():  # a clock may be a little ahead, not a year
                    if isinstance(name, str):
                        known[name] = max(created, known.get(name, ""))
            except (CkptError, ValueError, TypeError, KeyError, RecursionError):
                continue  # torn, foreign, or gone: what it would have said is validated again
        return known


def within_budget(
    scrub: Scrub | None,
    manifest_digest: str,
    pieces: Mapping[str, tuple[int, Callable[[], bool]]],
    expect: Callable[[int], None],
) -> Iterator[Callable[[], None]]:
    """What to do of the pieces, by name with their bytes: all of it without a scrub. Each says whether it is good."""
    names = list(pieces) if scrub is None else scrub.begin(manifest_digest, list(pieces))
    expect(sum(pieces[name][0] for name in names))

    def run(name: str) -> None:
        if scrub is None:
            pieces[name][1]()
        elif not scrub.budget.over:
            if pieces[name][1]():
                scrub.good(name)
            else:
                scrub.bad()

    return (partial(run, name) for name in names)
