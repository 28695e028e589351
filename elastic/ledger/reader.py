"""Reads a run's ledger back: all epochs, all ranks or one, in one order. It never writes, and takes no lock."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckpt.errors import ObjectMissing
from ckpt.format.layout import LEDGER
from ckpt.store.contract import Entry, Store
from elastic.ledger.events import Event, decode

_NAME = re.compile(r"(?P<epoch>.+)-r(?P<rank>\d+)-\d+\.jsonl")
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Ledger:
    """Events in order of epoch, then time; ``problems`` name the lines that could not be read."""

    events: tuple[Event, ...]
    problems: tuple[str, ...] = ()
    objects: int = 0
    """How many were read."""
    bytes: int = 0
    """How large they are together."""


class Reader:
    """Reads a ledger that grows: what was read is kept, and only objects that are new or have grown are fetched."""

    def __init__(self, store: Store, *, rank: int | None = None, since: str = "") -> None:
        self._store, self._rank, self._since = store, rank, since
        self._parts: dict[str, tuple[int, list[Event], list[str]]] = {}

    def read(self) -> Ledger:
        """The events as of now. Storage errors are raised, a container that is not there included."""
        wanted = [e for e in self._store.list(LEDGER) if self._wants(e.key)]
        new = [e for e in wanted if self._parts.get(e.key, (-1,))[0] != e.size]
        if len(new) > 1:
            with ThreadPoolExecutor(min(_AT_ONCE, len(new))) as pool:
                texts = pool.map(self._fetch, new)
                self._take(new, texts)
        else:
            self._take(new, map(self._fetch, new))
        for key in self._parts.keys() - {e.key for e in wanted}:
            del self._parts[key]
        parts = [self._parts[e.key] for e in wanted]
        events = sorted((e for _, some, _ in parts for e in some), key=lambda e: (e.epoch, e.time, e.rank, e.mono_s))
        gone = sum(size < 0 for size, _, _ in parts)
        return Ledger(tuple(events), tuple(p for _, _, some in parts for p in some), len(parts) - gone,
                      sum(max(0, size) for size, _, _ in parts))  # fmt: skip

    def _wants(self, key: str) -> bool:
        name = _NAME.fullmatch(key.removeprefix(LEDGER))
        return name is not None and name["epoch"] >= self._since and self._rank in (None, int(name["rank"]))

    def _fetch(self, entry: Entry) -> bytes | str:
        try:
            return bytes(self._store.get(entry.key))
        except ObjectMissing as error:  # deleted since it was listed
            return error.message

    def _take(self, entries: list[Entry], texts: Iterator[bytes | str]) -> None:
        for entry, text in zip(entries, texts, strict=True):
            events: list[Event] = []
            problems: list[str] = []
            if isinstance(text, str):
                self._parts[entry.key] = (-1, events, [f"{entry.key}: {text}"])
                continue
            for number, line in enumerate(text.decode(errors="replace").splitlines(), 1):
                try:
                    events.append(decode(line))
                except ValueError as error:
                    problems.append(f"{entry.key} line {number}: {error}")
            self._parts[entry.key] = (entry.size, events, problems)


def read(store: Store, *, rank: int | None = None, since: str = "") -> Ledger:
    """The events of the run at ``store``, of one rank or all, from the epoch ``since`` on.

    Storage errors are raised, a container that is not there included; unreadable lines are only reported.
    """
    return Reader(store, rank=rank, since=since).read()
