"""The protocol as a small model, over the real catalog: a writer and the starts that replace it, at every interleaving.

Each LIST is two pages and each DELETE goes key by key. Loading is one GET; a start may find the newest step damaged.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt import catalog, retention
from ckpt.catalog import Catalog
from ckpt.errors import NotFound, ObjectMissing
from ckpt.format.layout import Attempt, Epoch
from ckpt.policy import Latest
from ckpt.store.memory import MemoryStore
from tests.crash.explore import Explorer, Objects, Program, Scripted, State
from tests.crash.histories import laboratory
from tests.crash.test_mutations import in_retention, weaker_commit

ONE = Epoch(1)
OLD, NEW = Attempt(10, ONE), Attempt(20, ONE)
ALL = bool(os.environ.get("TORCHRELAY_EXHAUSTIVE"))


@dataclass(frozen=True)
class Rules:
    """What is explored: how many are kept, and whether the second program finds the newest step damaged."""

    keep: int
    damage: bool = False


def works(store: Scripted, told: list[Any], epoch: Epoch, base: Attempt, step: int, keep: int) -> None:
    """Save one step, then retain."""
    attempt = Attempt(step, epoch)
    store.put(attempt.prefix + "data", [b"x"])
    catalog.commit(store, attempt, base, b"{}", 1)
    told.append(attempt)
    retention.retire(Catalog(store), epoch, Latest(keep), grace_s=0)


def writer(rules: Rules) -> Program:
    return lambda store, told: works(store, told, ONE, NEW, 30, rules.keep)


def start(rules: Rules, *, saves: bool) -> Program:
    def run(store: Scripted, told: list[Any]) -> None:
        epoch = catalog.claim(store, world_size=1)
        at, bad = Catalog(store), list[Attempt]()
        while True:
            listing = at.listing()
            catalog.check_not_superseded(store, epoch, listing.epochs)
            base = next((a for a in at.choices(listing) if a not in bad), None)
            if base is None:
                raise NotFound("nothing is left")
            try:
                store.get(base.prefix + "data")
            except ObjectMissing:
                if at.gone(base):
                    continue
                raise NotFound(f"{base} has no data") from None
            if not (rules.damage and not bad):
                break
            bad.append(base)
            told.append(("damaged", base))
            catalog.quarantine(store, base, "damaged", (), epoch)
        if base in listing.retiring:
            told.append(("last resort", base))
        catalog.write_base(store, epoch, base)
        if saves:
            works(store, told, epoch, base, base.step + 10, rules.keep)

    return run


def checker(rules: Rules) -> Callable[[State], str | None]:
    reader = MemoryStore("memory://model")
    seen: dict[Any, str | None] = {}

    def check(state: State) -> str | None:
        told = frozenset(t for p in state.places for t in p.told)
        key = state.objects, state.commits, state.bases, told
        if key not in seen:
            seen[key] = judge(state, told)
        return seen[key]

    def judge(state: State, told: frozenset[Any]) -> str | None:
        reader.objects.clear()
        reader.objects.update(state.objects)
        at = Catalog(reader)
        listing = at.listing()
        line, choices, usable = state.truth.line(), at.choices(listing), at.usable(listing)
        damaged = {t[1] for t in told if isinstance(t, tuple) and t[0] == "damaged"}
        good = [a for a in line if a not in damaged]
        first = next((a for a in choices if a not in damaged and f"{a.prefix}data" in reader.objects), None)
        if "NotFound" in told and not damaged:
            return "a start finds nothing"
        if off := [a for a in choices if a not in line]:
            return f"{off[0]} may be chosen and is not in the line {line}"
        if lost := [a for a in told if isinstance(a, Attempt) and a not in line and a not in damaged]:
            return f"{lost[0]} was reported and does not count"
        resort = any(t[0] == "last resort" for t in told if isinstance(t, tuple))
        if damaged and (resort or "NotFound" in told or max(dict(state.bases)) == ONE):
            return None  # a writer that keeps one step may have been deleting what is older than the damaged one
        if first != good[0]:
            return f"{first} is chosen, {good[0]} should be"
        if not damaged and (lost := [a for a in good[: rules.keep] if a not in usable]):
            return f"{lost[0]} is to be kept and cannot be used"
        return None

    return check


def explore(rules: Rules, programs: list[Program]) -> tuple[str | None, int]:
    store = MemoryStore("memory://model start").fork()
    there = (OLD, NEW) if rules.keep > 1 else (NEW,)
    catalog.write_base(store, ONE, None)
    store.put(ONE.claim_key, [b"{}"])
    for a in there:
        store.put(a.prefix + "data", [b"x"])
        catalog.commit(store, a, None, b"{}", 1)
    objects: Objects = frozenset(store.objects.items())
    begin = State(objects, (), frozenset(there), frozenset({(ONE, None)}))
    explorer = Explorer(programs, checker(rules))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "conditional_put_works", lambda _: True)
        patch.setattr(catalog, "secrets", SimpleNamespace(token_hex=lambda n: f"{explorer.running:0{2 * n}x}"))
        return explorer.run(begin), explorer.states


@pytest.mark.parametrize("damage", [False, True], ids=["", "newest damaged"])
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize(
    "starts", [1, pytest.param(2, marks=pytest.mark.skipif(not ALL, reason="set TORCHRELAY_EXHAUSTIVE=1"))]
)
def test_no_interleaving_breaks_the_protocol(starts: int, keep: int, damage: bool) -> None:
    with laboratory():
        rules = Rules(keep, damage)
        found, states = explore(rules, [writer(rules), *[start(rules, saves=n == 0) for n in range(starts)]])
    print(f"a writer and {starts} starts, keep {keep}, damage {damage}: {states} states")
    assert found is None


Patch = pytest.MonkeyPatch
WEAKER: dict[str, tuple[Rules, Callable[[Patch], None]]] = {
    "no look at the epochs after the commit": (
        Rules(2), lambda patch: patch.setattr(catalog, "commit", weaker_commit(look_after=False))),
    "the highest step counts": (
        Rules(2), lambda patch: patch.setattr(catalog, "counted", lambda commits, *_: sorted(commits, reverse=True))),
    "retention does not look at the epochs": (
        Rules(1, damage=True), lambda patch: in_retention(patch, "check_not_superseded", retention, lambda *_: None)),
}  # fmt: skip


@pytest.mark.parametrize("broken", WEAKER)
def test_a_weaker_protocol_is_found(broken: str) -> None:
    rules, mutate = WEAKER[broken]
    with laboratory() as patch:
        mutate(patch)
        found, states = explore(rules, [writer(rules), start(rules, saves=True)])
    assert found is not None
    print(f"{broken}, {states} states: {found}")
