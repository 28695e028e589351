"""All interleavings of a few programs on one store, storage call by storage call.

A program is run again from its beginning with the answers it got so far, until it makes a call that has none yet;
so real code needs no threads to be interleaved, and equal states are visited once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.errors import CkptError, ObjectMissing
from ckpt.store.contract import Buffer, Entry
from tests.crash.world import Truth

Objects = frozenset[tuple[str, bytes]]


MISSING = ObjectMissing("no such object")


class Next(Exception):
    """The call that a program makes next."""

    def __init__(self, op: str, key: str, data: bytes = b"") -> None:
        super().__init__(op, key)
        self.op, self.key, self.data = op, key, data


class Scripted:
    """A store that knows the answers to the first calls. A LIST is two pages, a DELETE goes key by key."""

    url = "memory://model"

    def __init__(self, answers: Sequence[Any]) -> None:
        self._answers = iter(answers)

    def _call(self, op: str, key: str, data: bytes = b"") -> Any:
        for answer in self._answers:
            if isinstance(answer, CkptError):
                raise answer
            return answer
        raise Next(op, key, data)

    def put(self, key: str, data: Sequence[Buffer]) -> None:
        self._call("put", key, b"".join(data))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return bool(self._call("create", key, data))

    def get(self, key: str, *, max_bytes: int = 0) -> bytes:
        return self._call("get", key)  # type: ignore[no-any-return]

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        raise NotImplementedError

    def list(self, prefix: str = "") -> list[Entry]:
        first, last = self._call("page", prefix)
        return [*first, *(self._call("rest", f"{prefix} {last}") if last else ())]

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._call("delete", key)


def answer(objects: Objects, call: Next, *, conditional: bool) -> tuple[Any, Objects]:
    """What a real store answers to a call, and what it holds afterwards."""
    held = dict(objects)
    if call.op == "get":
        return held.get(call.key, MISSING), objects
    if call.op == "page":
        keys = sorted(k for k in held if k.startswith(call.key))
        first = keys[: (len(keys) + 1) // 2] if len(keys) > 1 else keys
        return (tuple(Entry(k, len(held[k])) for k in first), first[-1] if first != keys else ""), objects
    if call.op == "rest":
        prefix, last = call.key.split(" ")
        return tuple(Entry(k, len(held[k])) for k in sorted(held) if k.startswith(prefix) and k > last), objects
    if call.op == "create" and call.key in held and conditional:
        return held[call.key] == call.data, objects
    if call.op == "delete":
        held.pop(call.key, None)
    else:
        held[call.key] = call.data
    return call.op == "create" or None, frozenset(held.items())


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """How far one program has come: its answers, what it told, and the call it makes next (None: it ended)."""

    answers: tuple[Any, ...]
    told: tuple[Any, ...]
    call: Next | None

    @property
    def ended(self) -> bool:
        return self.call is None


@dataclass(frozen=True, slots=True)
class State:
    """Storage, programs and what was ever visible. ``order`` holds (i, j): i had ended before j began."""

    objects: Objects
    places: tuple[Place, ...] = ()
    commits: frozenset[Any] = frozenset()
    bases: frozenset[Any] = frozenset()
    order: frozenset[tuple[int, int]] = frozenset()

    @property
    def truth(self) -> Truth:
        return Truth(set(self.commits), dict(self.bases))


Program = Callable[[Scripted, list[Any]], None]  # the list is what it tells


@dataclass(slots=True)
class Explorer:
    """Visits every state of some programs; ``check`` returns what is wrong with one."""

    programs: Sequence[Program]
    check: Callable[[State], str | None]
    conditional: bool = True
    running: int = 0  # the program whose code runs now
    states: int = 0
    _moves: dict[tuple[Place, Any], Place] = field(default_factory=dict)

    def run(self, begin: State) -> str | None:
        """The first violation with the history that leads to it, or None. ``begin`` has no places yet."""
        begin = replace(begin, places=tuple(self._at(n, ()) for n in range(len(self.programs))))
        known = {begin: (begin, "")}
        todo = [begin]
        for state in todo:  # grows: breadth first, so that the first violation is a shortest one
            if bad := self.check(state):
                steps, at = [], state
                while at != begin:
                    at, label = known[at]
                    steps.append(label)
                self.states = len(known)
                return f"{bad}: " + " | ".join(reversed(steps))
            for label, after in self._steps(state):
                if after not in known:
                    known[after] = (state, label)
                    todo.append(after)
        self.states = len(known)
        return None

    def _steps(self, state: State) -> Iterator[tuple[str, State]]:
        for n, place in enumerate(state.places):
            if (call := place.call) is None:
                continue
            got, objects = answer(state.objects, call, conditional=self.conditional)
            if (moved := self._moves.get((place, got))) is None:
                moved = self._moves[place, got] = self._at(n, (*place.answers, got))
            commits, bases = state.commits, state.bases
            if call.op == "put" or (call.op == "create" and got is True):
                truth = state.truth
                truth.note(call.key, call.data)
                commits, bases = frozenset(truth.commits), frozenset(truth.bases.items())
            order = state.order
            if not place.answers:
                order |= {(m, n) for m, p in enumerate(state.places) if p.ended}
            yield (
                f"{n}:{call.op} {call.key}",
                State(objects, (*state.places[:n], moved, *state.places[n + 1 :]), commits, bases, order),
            )

    def _at(self, n: int, answers: tuple[Any, ...]) -> Place:
        """Run a program up to the call after these answers."""
        told: list[Any] = []
        self.running = n
        try:
            self.programs[n](Scripted(answers), told)
        except Next as call:
            return Place(answers, tuple(told), call)
        except CkptError as e:
            told.append(type(e).__name__)
        return Place((None,), tuple(told), None)
