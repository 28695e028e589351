"""Reads a run's ledger back: all epochs, all ranks, in one order."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.format.layout import LEDGER
from ckpt.store.contract import Store
from elastic.ledger.events import Event, decode


@dataclass(frozen=True, slots=True)
class Ledger:
    """Events in order of epoch, then time; ``problems`` name the lines that could not be read."""

    events: tuple[Event, ...]
    problems: tuple[str, ...] = ()


def read(store: Store) -> Ledger:
    """All events of the run at ``store``. Storage errors are raised; unreadable lines only reported."""
    events, problems = [], []
    for entry in store.list(LEDGER):
        if not entry.key.endswith(".jsonl"):
            continue
        text = bytes(store.get(entry.key)).decode(errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            try:
                events.append(decode(line))
            except ValueError as error:
                problems.append(f"{entry.key} line {number}: {error}")
    events.sort(key=lambda e: (e.epoch, e.time, e.rank, e.mono_s))
    return Ledger(tuple(events), tuple(problems))
