"""The enumeration finds what each rule of the protocol is for: with a rule switched off, a history goes wrong.

Run with ``-s`` to see the shortest history that breaks each weaker protocol.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import ckpt.catalog
import ckpt.load
import ckpt.save
from ckpt import catalog, retention
from ckpt.catalog import Catalog, Listing
from ckpt.engine.references import Previous
from ckpt.engine.writer import ObjectWriter, _Piece
from ckpt.errors import CkptError
from ckpt.format import layout
from ckpt.format.digest import digest
from ckpt.format.layout import Attempt, Epoch
from ckpt.format.manifest import Commit, Manifest, Mark, dump, utc_now
from ckpt.load import Loader
from tests.crash.histories import (
    SCENARIOS,
    Bench,
    History,
    NothingWorks,
    laboratory,
    overlapping,
    single,
)
from tests.crash.world import FaultStore

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]
RULES: dict[str, tuple[Mutation, Callable[[Bench], Iterator[History]]]] = {}


def shortest_first(bench: Bench) -> Iterator[History]:
    """One fault, one rank, all scenarios; the fewest calls before the fault first."""
    every = [single(bench, scenario, 1, lean=True) for scenario in SCENARIOS]
    return heapq.merge(*every, key=lambda h: h.fault.point.at)


def first_save(bench: Bench) -> Iterator[History]:
    """One fault in the first start of a run."""
    return single(bench, SCENARIOS[0], 1, lean=True)


def retaining(bench: Bench) -> Iterator[History]:
    """One fault in the retention of a start that keeps one step."""
    points = bench.prepared(SCENARIOS[1], 1).points
    committed = max(p.at for p in points if p.op == "create" and p.key.startswith("commits/"))
    return (h for h in single(bench, SCENARIOS[1], 1, lean=True) if h.fault.point.at > committed)


def unfinished(bench: Bench) -> Iterator[History]:
    """One fault in a start that finds an attempt which nobody finished."""
    return single(bench, SCENARIOS[5], 1, lean=True)


def late_commits(bench: Bench) -> Iterator[History]:
    """A commit record that lands after the next start has done its work."""
    for scenario in SCENARIOS[:3]:
        yield from (h for h in single(bench, scenario, 1, lean=True)
                    if h.fault.lands and h.fault.point.key.startswith("commits/"))  # fmt: skip


def reading(bench: Bench) -> Iterator[History]:
    """One fault in a start that goes on."""
    return single(bench, SCENARIOS[1], 1, lean=True)


def entangled(bench: Bench) -> Iterator[History]:
    """A start that pauses in its retention, and one that pauses after its choice."""
    for h in overlapping(bench, SCENARIOS[1], 1):
        if h.rots and "retire/" in h.fault.point.key:
            yield h


def referring(bench: Bench) -> Iterator[History]:
    """One fault in a start whose steps refer to older ones."""
    return heapq.merge(*(single(bench, s, 1, lean=True) for s in SCENARIOS[8:]), key=lambda h: h.fault.point.at)


def rule(broken: str, histories: Callable[[Bench], Iterator[History]] = shortest_first) -> Callable[[Mutation], None]:
    def register(mutate: Mutation) -> None:
        RULES[broken] = mutate, histories

    return register


def weaker_commit(*, record_first: bool = False, look_before: bool = True, look_after: bool = True) -> Any:
    def commit(
        store: Any, attempt: Attempt, base: Attempt | None, manifest: bytes, total: int, *_: Any, **__: Any
    ) -> None:
        record = Commit(attempt=str(attempt), step=attempt.step, base=str(base) if base else None,
                        manifest_digest=digest(manifest), manifest_bytes=len(manifest), total_bytes=total,
                        created=utc_now())  # fmt: skip
        if not record_first:
            store.put(attempt.prefix + layout.MANIFEST, [manifest])
        if look_before:
            catalog.check_not_superseded(store, attempt.epoch)
        store.put_if_absent(attempt.commit_key, dump("commit", record))
        if look_after:
            catalog.check_not_superseded(store, attempt.epoch)
        if record_first:
            store.put(attempt.prefix + layout.MANIFEST, [manifest])

    return commit


@rule("the commit record is written before the manifest", first_save)
def _(patch: Patch) -> None:
    patch.setattr(catalog, "commit", weaker_commit(record_first=True))


@rule("no look at the epochs before the commit record", first_save)
def _(patch: Patch) -> None:
    patch.setattr(catalog, "commit", weaker_commit(look_before=False))


@rule("no look at the epochs after the commit record", first_save)
def _(patch: Patch) -> None:
    patch.setattr(catalog, "commit", weaker_commit(look_after=False))


@rule("the highest step is chosen, not the newest start's line", first_save)
def _(patch: Patch) -> None:
    patch.setattr(catalog, "counted", lambda commits, *_: sorted(commits, reverse=True))


@rule("the epoch is claimed after the choice", first_save)
def _(patch: Patch) -> None:
    before: dict[int, Listing] = {}
    claim, listing = catalog.claim, Catalog.listing

    def late_claim(store: Any, **how: Any) -> Epoch:
        before[id(store)] = listing(Catalog(store))
        return claim(store, **how)

    patch.setattr(catalog, "claim", late_claim)
    patch.setattr(Catalog, "listing", lambda self: before.pop(id(self.store), None) or listing(self))


@rule("a start that was overtaken goes on choosing", first_save)
def _(patch: Patch) -> None:
    check = catalog.check_not_superseded
    patch.setattr(catalog, "check_not_superseded", lambda store, epoch, seen=None: seen or check(store, epoch))


@rule("no base record")
def _(patch: Patch) -> None:
    patch.setattr(catalog, "write_base", lambda *_, **__: None)


@rule("the base record is written before the step is loaded")
def _(patch: Patch) -> None:
    choose, write = Loader._choose, catalog.write_base
    written: set[Epoch] = set()

    def choose_and_write(self: Loader, epoch: Epoch | None, *rest: Any) -> Any:
        choice = choose(self, epoch, *rest)
        if epoch is not None and epoch not in written:
            written.add(epoch)
            write(self.catalog.store, epoch, choice.candidate.attempt if choice.candidate else None)
        return choice

    patch.setattr(Loader, "_choose", choose_and_write)
    patch.setattr(catalog, "write_base", lambda *_, **__: written.clear())


def in_retention(patch: Patch, name: str, owner: Any, instead: Callable[..., Any]) -> None:
    """Replace something, within retention only."""
    here, retire, real = threading.local(), retention.retire, getattr(owner, name)

    def flagged(*args: Any, **how: Any) -> Any:
        here.on = True
        try:
            return retire(*args, **how)
        finally:
            here.on = False

    for module in (retention, ckpt.save):
        patch.setattr(module, "retire", flagged)
    patch.setattr(owner, name, lambda *a, **k: (instead if getattr(here, "on", False) else real)(*a, **k))


@rule("retention does not look at the epochs", entangled)
def _(patch: Patch) -> None:
    in_retention(patch, "check_not_superseded", retention, lambda *_: None)


@rule("retention plans over all commit records")
def _(patch: Patch) -> None:
    in_retention(patch, "usable", Catalog, lambda _, listing: sorted(listing.commits - listing.retiring, reverse=True))


@rule("data are deleted before the commit record, without a retire record", retaining)
def _(patch: Patch) -> None:
    def retire(at: Catalog, epoch: Epoch, keep: Any, **_: Any) -> None:
        for a in retention.plan_retention(at.usable(at.listing()), keep):
            catalog.check_not_superseded(at.store, epoch)
            at.store.delete([e.key for e in at.store.list(a.prefix)])
            at.store.delete([a.commit_key])

    patch.setattr(ckpt.save, "retire", retire)


@rule("the retire record goes before the data", retaining)
def _(patch: Patch) -> None:
    def retire(at: Catalog, epoch: Epoch, keep: Any, **_: Any) -> None:
        for a in retention.plan_retention(at.usable(at.listing()), keep):
            mark = Mark(attempt=str(a), reason="", epoch=str(epoch), created=utc_now())
            at.store.put(a.retire_key, [dump("mark", mark)])
            catalog.check_not_superseded(at.store, epoch)
            at.store.delete([a.retire_key])
            at.store.delete([e.key for e in at.store.list(a.prefix)])
            at.store.delete([a.commit_key])

    patch.setattr(ckpt.save, "retire", retire)


@rule("a retirement stays though a later start builds on the step", retaining)
def _(patch: Patch) -> None:
    patch.setattr(Catalog, "_voided", lambda *_: False)
    patch.setattr(Catalog, "choices", Catalog.usable)


@rule("what is being retired is not chosen where nothing else is whole", entangled)
def _(patch: Patch) -> None:
    patch.setattr(Catalog, "choices", Catalog.usable)


@rule("the data of an unfinished attempt are deleted without a quarantine record", late_commits)
def _(patch: Patch) -> None:
    patch.setattr(retention, "quarantine", lambda *_: None)


@rule("the data of unfinished attempts stay", unfinished)
def _(patch: Patch) -> None:
    patch.setattr(ckpt.save, "collect_unfinished", lambda *_, **__: [])


@rule("where no step can be used a start begins from zero")
def _(patch: Patch) -> None:
    patch.setattr(Catalog, "saved_nothing", lambda *_: True)


@rule("a storage error counts as damage", reading)
def _(patch: Patch) -> None:
    patch.setattr(ckpt.load, "Damaged", CkptError)


@rule("a lost put_if_absent counts as won", first_save)
def _(patch: Patch) -> None:
    create = FaultStore.put_if_absent
    patch.setattr(FaultStore, "put_if_absent",
                  lambda self, key, data: create(self, key, data) or ".probe" not in key)  # fmt: skip


@rule("sizes are not checked before the commit", first_save)
def _(patch: Patch) -> None:
    patch.setattr(ObjectWriter, "_check_sizes", lambda *_: None)


@rule("a quarantined step is chosen again")
def _(patch: Patch) -> None:
    listing = Catalog.listing
    patch.setattr(Catalog, "listing", lambda self: replace(listing(self), quarantined=frozenset()))


@rule("the newer of two attempts at one step does not replace the older in retention", first_save)
def _(patch: Patch) -> None:
    def plan(usable: list[Attempt], keep: Any) -> list[Attempt]:
        kept = set(keep.choose([a.step for a in usable]))
        return [a for n, a in enumerate(usable) if n > 0 and a.step not in kept]

    patch.setattr(retention, "plan_retention", plan)


@rule("data that a kept step refers to are deleted", referring)
def _(patch: Patch) -> None:
    patch.setattr(retention, "held", lambda _: {})


@rule("a step is chosen without a look at what it refers to", referring)
def _(patch: Patch) -> None:
    differing = Manifest.differing_objects
    patch.setattr(Manifest, "differing_objects", lambda self, *how: [
        fact for fact in differing(self, *how) if "../.." not in fact[1]])  # fmt: skip


@rule("a tensor is referred to though it has changed", referring)
def _(patch: Patch) -> None:
    patch.setattr(_Piece, "is_same", lambda *_: True)
    patch.setattr(Previous, "check", lambda *_: None)  # the fingerprints would tell


@pytest.mark.parametrize("broken", RULES)
def test_a_broken_rule_is_found(broken: str) -> None:
    mutate, histories = RULES[broken]
    with laboratory() as patch:
        mutate(patch)
        bench = Bench()
        try:
            for history in histories(bench):
                if violations := [v for v in bench.play(history) if not v.startswith("harness")]:
                    break
            else:
                pytest.fail(f"{bench.histories} histories and no violation")
        except NothingWorks as e:
            history, violations = "without any fault", [str(e)]
    print(f"\n{broken}: found by history {bench.histories}\n    {history}\n    → {violations[0].splitlines()[0]}")
