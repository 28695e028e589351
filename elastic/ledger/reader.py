"""Reads a run's ledger back: all epochs, all ranks or one, in one order."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckpt.errors import ObjectMissing
from ckpt.format.layout import LEDGER
from ckpt.store.contract import Store
from elastic.ledger.events import Event, decode

_NAME = re.compile(r"(?P<epoch>.+)-r(?P<rank>\d+)-\d+\.jsonl")


@dataclass(frozen=True, slots=True)
class Ledger:
    """Events in order of epoch, then time; ``problems`` name the lines that could not be read."""

    events: tuple[Event, ...]
    problems: tuple[str, ...] = ()
    objects: int = 0
    """How many were read."""


def read(store: Store, *, rank: int | None = None, since: str = "") -> Ledger:
    """The events of the run at ``store``, of one rank or all, from the epoch ``since`` on.

    Storage errors are raised, a container that is not there included; unreadable lines are only reported.
    """
    events, problems, objects = [], [], 0
    for entry in store.list(LEDGER):
        name = _NAME.fullmatch(entry.key.removeprefix(LEDGER))
        if name is None or name["epoch"] < since or rank not in (None, int(name["rank"])):
            continue
        try:
            text = bytes(store.get(entry.key)).decode(errors="replace")
        except ObjectMissing as error:  # deleted since it was listed
            problems.append(f"{entry.key}: {error.message}")
            continue
        objects += 1
        for number, line in enumerate(text.splitlines(), 1):
            try:
                events.append(decode(line))
            except ValueError as error:
                problems.append(f"{entry.key} line {number}: {error}")
    events.sort(key=lambda e: (e.epoch, e.time, e.rank, e.mono_s))
    return Ledger(tuple(events), tuple(problems), objects)
