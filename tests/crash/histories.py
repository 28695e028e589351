"""Histories: a run with something in it, a start that a fault strikes, and the starts that come after it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

import ckpt
import ckpt.catalog
import ckpt.engine.reader
import ckpt.engine.writer
import ckpt.format.manifest
import ckpt.retention
import ckpt.store
from ckpt.errors import Incomplete
from ckpt.format import layout
from ckpt.format.layout import Attempt
from ckpt.store.memory import MemoryStore
from tests.crash.checks import Checker
from tests.crash.jobs import Job, token
from tests.crash.world import Fault, Point, Truth, World, faults_at

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """What there is before the start that a fault strikes: ``steps`` saved by one start, and damage to the newest."""

    name: str
    steps: int
    keep: int
    grace_s: float = 0.0
    damage: str | None = None  # "flip" a bit of the newest step, or one of its objects is "gone", or one that it
    # refers to is "lost"
    conditional_put: bool = True
    falling: bool = False  # without it, later starts have smaller random ids
    unfinished: bool = False  # a start before died between its manifest and its commit record
    incremental: bool = False  # a tensor that changes at steps 3, 7, … only is referred to


SCENARIOS = (
    Scenario("first start", 0, 2),
    Scenario("goes on, keeps 1", 2, 1),
    Scenario("goes on, keeps 2 with grace", 4, 2, grace_s=HOUR_S / 2),
    Scenario("newest step has a flipped bit", 2, 2, damage="flip"),
    Scenario("newest step lacks an object", 2, 2, damage="gone"),
    Scenario("an attempt was left unfinished", 2, 2, unfinished=True),
    Scenario("no conditional put, ids rise", 2, 1, conditional_put=False),
    Scenario("no conditional put, ids fall", 2, 1, conditional_put=False, falling=True),
    Scenario("incremental, keeps 1", 4, 1, incremental=True),
    Scenario("incremental, what it refers to is lost", 4, 4, damage="lost", incremental=True),
)


@dataclass(frozen=True, slots=True)
class History:
    """One fault in the second start, and what the starts after it do.

    ``during`` is what a start does while the struck one stands still: "resumes" or "saves". ``rots``: the newest
    step is damaged just before. ``second`` strikes the start that comes next; ``overlap`` pauses that start in turn
    until the first has ended.
    """

    scenario: Scenario
    ranks: int
    fault: Fault
    during: str = "saves"
    rots: bool = False
    second: Fault | None = None
    overlap: bool = False
    seed: int = 0

    def __str__(self) -> str:
        parts = [f"{self.scenario.name}, {self.ranks} ranks: {self.fault}"]
        if self.fault.pauses:
            parts.append(f"meanwhile{' the newest step rots and' if self.rots else ''} another start {self.during}")
        if self.second:
            parts.append(f"then {self.second}{', until the first has ended' if self.overlap else ''}")
        return "; ".join(parts)


class Clock(datetime):
    """The catalog's clock: an hour passes from start to start."""

    hours = 0

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return datetime(2026, 1, 1, tzinfo=tz) + timedelta(hours=cls.hours)


class NothingWorks(AssertionError):
    """Not even a start that nothing disturbs does its work."""


class OneByOne:
    """In the place of a thread pool, so that storage calls have one order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> OneByOne:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, work: Callable[..., Any], items: Iterable[Any]) -> Iterator[Any]:
        return map(work, items)

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args))
        except BaseException as e:
            future.set_exception(e)
        return future


@contextmanager
def laboratory() -> Iterator[pytest.MonkeyPatch]:
    """The process as histories need it: clock and random ids are ours, a rank's storage calls have one order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ckpt.retention, "datetime", Clock)
        patch.setattr(ckpt.format.manifest, "datetime", Clock)
        patch.setattr(ckpt.catalog, "secrets", SimpleNamespace(token_hex=token))
        patch.setattr(ckpt.store, "uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=token())))
        patch.setattr(ckpt.engine.reader, "ThreadPoolExecutor", OneByOne)
        patch.setattr(ckpt.engine.writer, "ThreadPoolExecutor", OneByOne)
        patch.setattr(ckpt.load._log, "disabled", True)
        patch.setattr(ckpt.save._log, "disabled", True)
        Clock.hours = 0
        yield patch


def start(world: World, scenario: Scenario, number: int, ranks: int, **how: Any) -> Job:
    """One start of the run, an hour after the one before."""
    Clock.hours += 1
    return Job(world=world, number=number, ranks=ranks, keep=ckpt.Latest(scenario.keep), grace_s=scenario.grace_s,
               falling=scenario.falling, incremental=scenario.incremental, **how)  # fmt: skip


def flip(world: World, attempt: Attempt) -> None:
    """Flip one bit in the middle of a step's first data object."""
    key = f"{attempt.prefix}__0_0.distcp"
    data = bytearray(world.store.get(key))
    data[len(data) // 2] ^= 1
    world.store.put(key, [data])


@dataclass(slots=True)
class Prepared:
    """A scenario's storage, and the calls of a start on it that nothing disturbs."""

    world: World
    damaged: set[Attempt]
    absent: set[Attempt]
    reported: dict[Attempt, int]
    owner: Any
    points: list[Point]


def prepare(scenario: Scenario, ranks: int) -> Prepared:
    """Build the storage of a scenario with the real code, and record a start's storage calls."""
    Clock.hours = 0
    world = World(MemoryStore("memory://crash", conditional_put=scenario.conditional_put).fork(0))
    damaged: set[Attempt] = set()
    reported: dict[Attempt, int] = {}
    if scenario.steps:
        job = start(world, scenario, 1, ranks, saves=scenario.steps).run()
        assert not job.errors, job.errors
        reported = job.reported
        newest = max(reported)
        if scenario.damage == "flip":
            flip(world, newest)
        elif scenario.damage == "gone":
            world.store.delete([f"{newest.prefix}__0_0.distcp"])
        damaged = {newest} if scenario.damage else set()
        if scenario.damage == "lost":
            holder = sorted(reported)[-2]  # the newest step refers to it
            world.store.delete([f"{holder.prefix}__0_0.distcp"])
            damaged.add(holder)
    if scenario.unfinished:
        points = start(world.fork(1), scenario, 1, ranks, stride=2).run().points
        at_commit = next(p for p in points if p.op == "create" and p.key.startswith(layout.COMMITS))
        job = start(world, scenario, 1, ranks, stride=2, fault=Fault(at_commit, "before")).run()
        assert job.struck
    probe = start(world.fork(1), scenario, 2, ranks, stride=2).run()
    if probe.errors:
        raise NothingWorks(f"a start that nothing disturbs fails: {probe.errors[0]}")
    absent = set() if scenario.damage == "flip" else damaged
    return Prepared(world, damaged, absent, reported, max(world.truth.claims, default=None), probe.points)


@dataclass(frozen=True, slots=True)
class Effect:
    """What one start did, or one look found: to be repeated where the same start meets the same storage."""

    objects: dict[str, bytes]
    truth: Truth
    check: Checker
    found: list[str]
    hours: int


class Bench:
    """Plays histories. What happened before in the same storage is not played again; storages are built once."""

    def __init__(self) -> None:
        self.prepared = cache(prepare)
        self.histories = 0
        self._effects: dict[Hashable, Effect] = {}

    def play(self, h: History) -> list[str]:
        """Play a history to its end; what it violates."""
        self.histories += 1
        return _Play(h, self).run()

    def once(self, what: Hashable, world: World, check: Checker, do: Callable[[], None]) -> None:
        """Do something to a world, or repeat what it did before to the same one."""
        if world.flying:
            return do()
        key = (what, world.key(), check.key(), Clock.hours)
        if (effect := self._effects.get(key)) is None:
            known = len(check.violations)
            do()
            if world.flying:
                return None
            self._effects[key] = Effect(dict(world.store.objects), world.truth.copy(), check.copy(),
                                        check.violations[known:], Clock.hours)  # fmt: skip
            return None
        world.store.objects.clear()
        world.store.objects.update(effect.objects)
        world.truth, Clock.hours = effect.truth.copy(), effect.hours
        check.take(effect.check.copy(), effect.found)
        return None


class _Play:
    """One history."""

    def __init__(self, h: History, bench: Bench) -> None:
        self.h, self._bench = h, bench
        p = bench.prepared(h.scenario, h.ranks)
        self.world = p.world.fork()
        Clock.hours = 1
        self.check = Checker(self.world, h.scenario.keep, set(p.damaged), absent=p.absent,
                             reported=dict(p.reported))  # fmt: skip
        if p.owner is not None:
            self.check.owners[p.owner] = 1
        self._number = 2

    def run(self) -> list[str]:
        h = self.h
        if h.fault.pauses:
            self._struck()
        else:
            self._bench.once(("struck", h.scenario, h.ranks, h.fault), self.world, self.check, self._struck)
        self._look("after the fault")
        if h.fault.lands or (h.second and not h.fault.pauses):
            self._next(h.second)
            self.world.land()
            self._look("after everything landed")
        if self.check.can_resume():
            self._next()
            self._look("at the end")
            self.check.tidy(grace=h.scenario.grace_s > 0)
        return self.check.violations

    def _look(self, when: str) -> None:
        self._bench.once(("look", when), self.world, self.check, lambda: self.check.look(when))

    def _struck(self) -> None:
        """The start that the fault strikes."""
        had = self.check.before()
        between: list[Truth] = []
        loose: list[Callable[[], None]] = []

        def pause() -> None:
            between.append(self.world.truth.copy())
            if self.h.rots and (line := self.world.truth.line()) and line[0] not in self.check.damaged:
                flip(self.world, line[0])
                self.check.rots(line[0])
            if self.h.overlap:
                loose.append(self._beside())
            else:
                self._next(self.h.second, saves=0 if self.h.during == "resumes" else 1)
                self._look("while the first start stands still")

        job = start(self.world, self.h.scenario, 2, self.h.ranks, stride=2, fault=self.h.fault, pause=pause).run()
        for finish in loose:
            finish()
        also = (Incomplete,) if self.h.fault.kind == "lies" else ()
        self.check.ran(job, had_steps=had, undisturbed=False, can_resume=self.check.can_resume(), also=also)
        if not job.struck:
            self.check.violations.append(f"harness: {self.h.fault} was never met")
        if between and not self.h.overlap and not self.h.second and not _may_slip(self.h, job):
            own = {c for c in self.world.truth.commits - between[0].commits
                   if str(c.epoch) == job.outcomes[0].epoch and c.epoch in between[0].claims}  # fmt: skip
            if own:
                self.check.violations.append(f"a start that was replaced long ago committed {min(own)}")

    def _next(self, fault: Fault | None = None, *, saves: int = 1) -> None:
        """The start after it, disturbed by ``fault``."""
        self._number += 1

        def do() -> None:
            had, can = self.check.before(), self.check.can_resume()
            # without a conditional put a late claim of the same number can outrank this one: a start is lost, no step
            outranked = bool(self.world.flying) and not self.h.scenario.conditional_put
            job = start(self.world, self.h.scenario, self._number, self.h.ranks, saves=saves, fault=fault).run()
            self.check.ran(job, had_steps=had, undisturbed=fault is None and not outranked, can_resume=can)

        what = (self._number, self.h.scenario, self.h.ranks, saves, fault)
        self._bench.once(what, self.world, self.check, do)

    def _beside(self) -> Callable[[], None]:
        """A start on a thread of its own until it pauses in turn; returns what lets it go on to its end."""
        paused, go_on = threading.Event(), threading.Event()
        had, can = self.check.before(), self.check.can_resume()

        def pause() -> None:
            paused.set()
            assert go_on.wait(60)

        self._number += 1
        job = start(self.world, self.h.scenario, self._number, self.h.ranks, fault=self.h.second, pause=pause)

        def work() -> None:
            job.run()
            paused.set()

        thread = threading.Thread(target=work)
        thread.start()
        assert paused.wait(60)

        def finish() -> None:
            go_on.set()
            thread.join()
            self.check.ran(job, had_steps=had, undisturbed=not job.struck, can_resume=can)

        return finish


def _may_slip(h: History, job: Job) -> bool:
    """Whether the pause was between the look at the epochs and the commit record, where nobody can look again."""
    points = job.stores[h.fault.point.rank].trace
    here = h.fault.point.at
    return any(p.key.startswith("commits/") and p.op == "create" for p in points[here : here + 2])


CLAIM_CALLS = 5  # a start's epoch is claimed by its fifth call at the earliest: three to try the store, a LIST, a PUT
SECOND_KINDS = ("before", "after", "error", "outage", "unknown")


def single(
    bench: Bench, scenario: Scenario, ranks: int, *, land: int | None = 1, lean: bool = False, seed: int = 0
) -> Iterator[History]:
    """Every fault at every point of a start.

    ``land``: how many landing times of a late write are tried besides "at the end" (None: all). ``lean`` leaves out
    repetitions of pauses, no point and no kind.
    """
    p = bench.prepared(scenario, ranks)
    total = len(p.points)
    rng = random.Random(f"{seed} {scenario.name} {ranks}")
    for point in sorted(p.points, key=lambda q: (q.at, q.rank)):
        times = range(1, total + 1) if land is None else sorted(rng.sample(range(1, total), land))
        for fault in faults_at(point, ranks, [*times, 10**9], lean=lean):
            if not fault.pauses:
                yield History(scenario, ranks, fault)
                continue
            short = lean and (ranks > 1 or not (point.writes or (point.op == "list" and fault.page == 0)))
            if short and fault.page:
                continue
            for during in ("saves",) if short else ("resumes", "saves"):
                yield History(scenario, ranks, fault, during)
                if not scenario.damage and not short:
                    yield History(scenario, ranks, fault, during, rots=True)


def double(bench: Bench, scenario: Scenario, ranks: int) -> Iterator[History]:
    """A fault at every point of a start, and one at every call of the start that recovers or that works meanwhile."""
    calls = max(len([q for q in bench.prepared(scenario, ranks).points if q.rank == 0]), 40) + 8
    for first in single(bench, scenario, ranks, land=0, lean=True):
        meanwhile = first.fault.kind == "pause" and first.fault.page == 0 and first.during == "saves" and not first.rots
        if meanwhile or first.fault.kind in ("before", "after", "unknown", "late dies"):
            for at in range(calls):
                for kind in SECOND_KINDS:
                    yield replace(first, second=Fault(Point(0, at, "?", "?"), kind))


def overlapping(bench: Bench, scenario: Scenario, ranks: int) -> Iterator[History]:
    """A start pauses at every point, the next one at every call of its own, then the first ends, then the next.

    Where a step rots meanwhile, the next start has claimed its epoch: before that the first may still delete the rest.
    """
    calls = max(len([q for q in bench.prepared(scenario, ranks).points if q.rank == 0]), 40) + 8
    for first in single(bench, scenario, ranks, lean=True):
        if first.fault.kind == "pause" and first.during == "saves":
            for at in range(CLAIM_CALLS if first.rots else 0, calls):
                yield replace(first, second=Fault(Point(0, at, "?", "?"), "pause"), overlap=True)
