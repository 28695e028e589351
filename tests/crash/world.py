"""A bucket with the faults of a real one, and a truth that never forgets what was written to it.

``FaultStore`` is what one rank of one job holds. Every storage call is a point, numbered per rank, at which one
``Fault`` can strike. A LIST is read page by page and a DELETE of several keys goes key by key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.errors import Unreachable
from ckpt.format import layout
from ckpt.format.layout import Attempt, Epoch
from ckpt.store.contract import Buffer, Entry
from ckpt.store.memory import MemoryStore

READ_KINDS = ("before", "error", "outage", "pause")
WRITE_KINDS = (
    "before",  # the process dies before the call
    "after",  # it dies after the call
    "error",  # the call fails and does nothing
    "outage",  # it and every later call of the job fail
    "unknown",  # the call is done, the answer is an error
    "again",  # the call is done, the answer is lost, the client's retry repeats it
    "echo",  # the call is done, and a copy of the request that got stuck lands once more, later
    "late dies",  # the process dies, what it sent lands later
    "late errs",  # the client gives up, what it sent lands later
    "pause",  # the process stands still here while another start does all its work
    "pause again",  # the call is done, then a pause, then the client's retry repeats it
)
RANK_KINDS = ("stall",)  # one rank stands still, the others give up on it, then another start works
DATA_KINDS = ("lies",)  # the call succeeds and the bytes are lost: only of objects that the commit checks


class Died(BaseException):
    """The process is gone; nothing that it would still do happens."""


@dataclass(frozen=True, slots=True)
class Point:
    """One storage call of one rank: the ``at``-th."""

    rank: int
    at: int
    op: str
    key: str
    pages: int = 0

    @property
    def writes(self) -> bool:
        return self.op in ("put", "create", "delete")

    def __str__(self) -> str:
        return f"rank {self.rank}, call {self.at}: {self.op} {self.key}"


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at a point. ``land`` counts calls until a late write lands; ``page`` is where a LIST halts."""

    point: Point
    kind: str
    land: int = 10**9
    page: int = 0

    @property
    def lands(self) -> bool:
        """Whether something is on its way afterwards."""
        return self.kind in ("late dies", "late errs", "echo")

    @property
    def pauses(self) -> bool:
        return self.kind in ("pause", "pause again", "stall")

    def __str__(self) -> str:
        more = f", lands {self.land} calls later" if self.lands and self.land < 10**9 else ""
        return f"{self.kind!r} at {self.point}{f' page {self.page}' if self.page else ''}{more}"


@dataclass(slots=True)
class Truth:
    """Everything that ever became visible in a run's records."""

    commits: set[Attempt] = field(default_factory=set)
    bases: dict[Epoch, Attempt | None] = field(default_factory=dict)
    claims: set[Epoch] = field(default_factory=set)
    collected: set[Attempt] = field(default_factory=set)  # lost data before they were committed

    def note_deleted(self, key: str) -> None:
        attempt = layout.parse_step_key(key)
        if attempt is not None and attempt not in self.commits:
            self.collected.add(attempt)

    def note(self, key: str, data: bytes) -> None:
        if (attempt := layout.parse_record_key(key, layout.COMMITS)) is not None:
            self.commits.add(attempt)
        elif (epoch := layout.parse_epoch_key(key)) is not None and not epoch[1]:
            self.claims.add(epoch[0])
        elif epoch is not None:
            name = json.loads(data)["attempt"]
            self.bases.setdefault(epoch[0], layout.parse_attempt(name) if name else None)

    def line(self) -> list[Attempt]:
        """What the newest start that recorded its base builds on and has added, newest first."""
        out: list[Attempt] = []
        epoch, top = max(self.bases, default=None), None
        while epoch is not None:
            base = self.bases.get(epoch)
            own = sorted((c for c in self.commits if c.epoch == epoch), key=lambda c: (c.step, c.counter), reverse=True)
            out += [c for c in own if (top is None or (c.step, c.counter) <= (top.step, top.counter))
                    and (base is None or c.step > base.step)]  # fmt: skip
            epoch, top = (base.epoch, base) if base else (None, None)
        return out

    def copy(self) -> Truth:
        return Truth(set(self.commits), dict(self.bases), set(self.claims), set(self.collected))

    def key(self) -> Hashable:
        sets = frozenset(self.commits), frozenset(self.claims), frozenset(self.collected)
        return *sets, frozenset(self.bases.items())


@dataclass(slots=True)
class World:
    """One run's storage, what is on its way to it, and the truth about it."""

    store: MemoryStore
    truth: Truth = field(default_factory=Truth)
    flying: list[tuple[int, Callable[[], Any]]] = field(default_factory=list)

    def fork(self, seed: int = 0) -> World:
        """An independent copy; nothing is on its way in it."""
        return World(self.store.fork(seed), self.truth.copy())

    def key(self) -> Hashable:
        """Equal for worlds in which the same would happen."""
        assert not self.flying
        return frozenset(self.store.objects.items()), self.truth.key()

    def tick(self) -> None:
        """One storage call passes: what is due lands."""
        if self.flying:
            self.flying = [(n - 1, do) for n, do in self.flying]
            self.land(lambda n: n <= 0)

    def land(self, due: Callable[[int], bool] = lambda _: True) -> None:
        """Let what is due land, in order; by default all of it."""
        landing = [do for n, do in self.flying if due(n)]
        self.flying = [(n, do) for n, do in self.flying if not due(n)]
        for do in landing:
            do()


class FaultStore:
    """The store of one rank of one job."""

    def __init__(self, world: World, rank: int, fault: Fault | None = None, pause: Callable[[], None] | None = None,
                 stall: Callable[[], None] | None = None) -> None:  # fmt: skip
        self.url, self._inner, self._world = world.store.url, world.store, world
        self.rank, self._pause, self._stall = rank, pause, stall
        self._fault = fault if fault is not None and fault.point.rank == rank else None
        self.trace: list[Point] = []
        self.dead = self.down = False
        self.struck = False

    def put(self, key: str, data: Sequence[Buffer]) -> None:
        whole = b"".join(data)

        def do() -> None:
            self._inner.put(key, [whole])
            self._world.truth.note(key, whole)

        self._call("put", key, do)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        def do() -> bool:
            created = self._inner.put_if_absent(key, data)
            if created:
                self._world.truth.note(key, data)
            return created

        return bool(self._call("create", key, do))

    def get(self, key: str, *, max_bytes: int = 1 << 28) -> bytes:
        return self._call("get", key, lambda: self._inner.get(key, max_bytes=max_bytes))  # type: ignore[no-any-return]

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        return self._call("ranges", key, lambda: self._inner.get_ranges(key, ranges))  # type: ignore[no-any-return]

    def list(self, prefix: str = "") -> list[Entry]:
        fault = self._fault
        if fault is None or fault.page == 0 or fault.point.at != len(self.trace):
            found: list[Entry] = self._call("list", prefix, lambda: self._inner.list(prefix))
            self.trace[-1] = replace(self.trace[-1], pages=len(found))
            return found
        # pages come in the order of keys; what lands behind the place where the listing stands is missed
        first = sorted(self._inner.list(prefix), key=lambda e: e.key)[: fault.page]
        rest: list[Entry] = self._call("list", prefix, lambda: self._inner.list(prefix))
        return first + [e for e in rest if not first or e.key > first[-1].key]

    def delete(self, keys: Iterable[str]) -> None:
        def do(key: str) -> None:
            self._inner.delete([key])
            self._world.truth.note_deleted(key)

        for key in keys:
            self._call("delete", key, lambda key=key: do(key))

    # --- the point ------------------------------------------------------------------------------------------

    def _call(self, op: str, key: str, do: Callable[[], Any]) -> Any:
        if self.dead:
            raise Died
        self._world.tick()
        at = len(self.trace)
        self.trace.append(Point(self.rank, at, op, key))
        if self.down:
            raise Unreachable(f"{key}: the outage goes on")
        fault = self._fault
        if fault is None or fault.point.at != at:
            return do()
        assert fault.point.op == "?" or (fault.point.op, fault.point.key.partition("/")[0]) == (
            op,
            key.partition("/")[0],
        ), (fault, op, key)
        self.struck = True
        return self._strike(fault, key, do)

    def _strike(self, fault: Fault, key: str, do: Callable[[], Any]) -> Any:
        if fault.kind in ("after", "unknown", "again", "pause again"):
            do()
        if fault.lands:
            self._world.flying.append((fault.land, do))
        if fault.kind in ("before", "after", "late dies"):
            self.dead = True
            raise Died
        if fault.kind in ("error", "outage", "unknown", "late errs"):
            self.down = fault.kind == "outage"
            raise Unreachable(f"{key}: no answer in time")
        if fault.kind == "stall" and self._stall is not None:
            self._stall()
        if fault.kind in ("pause", "pause again", "stall") and self._pause is not None:
            self._pause()
        return True if fault.kind == "lies" else do()


def kinds_at(point: Point, ranks: int) -> tuple[str, ...]:
    """The faults that make sense at a point."""
    if not point.writes:
        return READ_KINDS
    checked = point.op == "put" and point.key.startswith("steps/") and not point.key.endswith(layout.MANIFEST)
    return WRITE_KINDS + (RANK_KINDS if ranks > 1 else ()) + (DATA_KINDS if checked else ())


def faults_at(point: Point, ranks: int, land: Iterable[int] = (10**9,), *, lean: bool = False) -> Iterator[Fault]:
    """Every fault of a point; late writes once for each landing time, pauses of a LIST at every page.

    ``lean`` pauses a LIST before its first page, in the middle, and after its last.
    """
    for kind in kinds_at(point, ranks):
        if Fault(point, kind).lands:
            yield from (Fault(point, kind, n) for n in land)
        elif kind == "pause" and point.op == "list":
            pages = {0, point.pages // 2, point.pages} if lean else range(point.pages + 1)
            yield from (Fault(point, kind, page=n) for n in pages)
        else:
            yield Fault(point, kind)
