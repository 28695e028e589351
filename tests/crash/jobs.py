"""Jobs of several ranks in one process, with the real code of Checkpoints and a group without sleeping.

One rank runs at a time and hands over when it waits for another, so a history is the same each time. Time is not
measured: a rank that ended is missed at once, and a deadline passes when nobody can go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import ckpt
from ckpt.checkpoints import Checkpoints
from ckpt.engine.group import Alone, Group, StoreGroup
from ckpt.errors import CkptError, RankFailed, Superseded
from ckpt.format.layout import Attempt, parse_attempt
from ckpt.policy import Keep
from tests.crash.world import Died, Fault, FaultStore, Point, World


class Turns:
    """Who runs; also the key-value store over which the ranks of one job meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._turn = 0
        self._waiting: dict[int, str] = {}
        self._gone: set[int] = set()
        self._stalled: set[int] = set()
        self._too_late: set[int] = set()

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(k in self._values for k in keys)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def clone(self) -> Turns:
        return self

    def wait(self, rank: int, key: str) -> bool:
        """Wait for a key; False when who should write it is gone, or everybody waits: the deadline passes."""
        with self._changed:
            self._waiting[rank] = key
            if not self._ready(rank):
                self._hand_over(rank)
                self._until(rank)
            del self._waiting[rank]
            self._too_late.discard(rank)
            return key in self._values

    def stall(self, rank: int) -> None:
        """Stand still until all others have ended."""
        with self._changed:
            self._stalled.add(rank)
            self._hand_over(rank)
            self._until(rank)
            self._stalled.discard(rank)

    def begin(self, rank: int) -> None:
        with self._changed:
            self._until(rank)

    def end(self, rank: int) -> None:
        with self._changed:
            self._gone.add(rank)
            self._hand_over(rank)

    def _until(self, rank: int) -> None:
        if not self._changed.wait_for(lambda: self._turn == rank, timeout=60):
            raise AssertionError(f"rank {rank} never got its turn")

    def _ready(self, rank: int) -> bool:
        key = self._waiting.get(rank)
        if key is None or key in self._values:
            return True
        side, _, writer = key.rpartition("/")
        return (int(writer) if side.endswith("/in") else 0) in self._gone

    def _hand_over(self, rank: int) -> None:
        others = [(rank + n) % self.size for n in range(1, self.size + 1)]
        live = [r for r in others if r not in self._gone and r not in self._stalled]
        able = [r for r in live if self._ready(r)]
        if not able and live:
            able = [min(live)]
            self._too_late.add(able[0])
        self._turn = next(iter([*able, *self._stalled]), -1)
        self._changed.notify_all()


class TurnGroup(StoreGroup):
    """The real group over ``Turns``; only the waiting is another."""

    def __init__(self, turns: Turns, rank: int, prefix: str = "run") -> None:
        super().__init__(turns, rank, turns.size, prefix)
        self._turns = turns

    def channel(self, name: str) -> TurnGroup:
        return TurnGroup(self._turns, self.rank, f"{self._prefix}/{name}")

    def _arrived(self, key: str, end: float) -> bool:
        return self._turns.wait(self.rank, key)


class Streams:
    """In the place of the random streams: tells from which save it was restored."""

    def __init__(self) -> None:
        self.content = 0

    def capture(self) -> dict[str, int]:
        return {"seed": self.content}

    def restore(self, saved: dict[str, int]) -> None:
        self.content = saved["seed"]

    def derive(self, seed: int, step: int, rank: int) -> None:
        self.content = seed

    def again(self) -> None: ...


FROZEN = 7  # what the second tensor holds in jobs that save incrementally; no save has this number


class Content:
    """A state of two tensors, a value and a stream per rank, all of which hold one number: the save they are from.

    With ``frozen`` the second tensor holds the same in all saves but for a change before every fourth step: 3, 7, ….
    """

    def __init__(self, frozen: bool = False) -> None:
        self._frozen = frozen
        self._net = torch.nn.Module()
        for name in ("one", "two"):
            self._net.register_buffer(name, torch.zeros(2, dtype=torch.int64))
        self.state = ckpt.State(net=self._net, value=0)
        self._streams = Streams()
        self.state.rng = self._streams  # type: ignore[assignment]

    def fill(self, number: int) -> None:
        for name, tensor in self._net.named_buffers():
            tensor.fill_(-(FROZEN + (number // 10 % 1000 + 1) // 4) if self._frozen and name == "two" else number)
        self.state["value"] = self._streams.content = number

    def numbers(self) -> set[int]:
        """What it holds: one number, or it is a mix. A frozen tensor counts as the number whose step it fits."""
        one, two = ({int(n) for n in t} for t in self._net.buffers())
        if len(two) == 1 and min(two) < 0:
            step = {number // 10 % 1000 for number in one}
            two = one if step and {-(FROZEN + (s + 1) // 4) for s in step} == two else two
        return one | two | {int(self.state["value"]), self._streams.content}


_coordinating = threading.local()  # the job whose rank 0 runs on this thread


def token(nbytes: int = 16) -> str:
    """A random id of the job whose rank 0 asks."""
    job: Job = _coordinating.job
    return job.token(nbytes)


@dataclass(slots=True)
class Outcome:
    """What one rank of a job saw."""

    epoch: str | None = None
    resumed: ckpt.Resumed | None = None
    reported: list[tuple[Attempt, int]] = field(default_factory=list)  # what Pending.wait returned, and its content
    loaded: set[int] = field(default_factory=set)
    error: BaseException | None = None


@dataclass(slots=True, kw_only=True)
class Job:
    """One start of the run: resume, then ``saves`` saves, every ``stride`` steps. ``number`` tells starts apart."""

    world: World
    number: int
    ranks: int
    keep: Keep | None
    grace_s: float = 0.0
    saves: int = 1
    stride: int = 1
    fault: Fault | None = None
    pause: Callable[[], None] | None = None
    falling: bool = False  # its random ids are smaller than those of earlier starts
    incremental: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    stores: list[FaultStore] = field(default_factory=list)
    _tokens: int = 0

    def run(self) -> Job:
        before, _coordinating.job = getattr(_coordinating, "job", None), self
        try:
            return self._run()
        finally:
            _coordinating.job = before

    def token(self, nbytes: int) -> str:
        """What is random in a real job: different in each, and here the same each time a history is played."""
        self._tokens += 1
        number = 0xFFFF - self.number if self.falling else self.number
        return f"{number:04x}{self._tokens:04x}".ljust(2 * nbytes, "0")[: 2 * nbytes]

    def _run(self) -> Job:
        turns = Turns(self.ranks)
        self.outcomes = [Outcome() for _ in range(self.ranks)]
        self.stores = [FaultStore(self.world, r, self.fault, self.pause, lambda r=r: turns.stall(r))
                       for r in range(self.ranks)]  # fmt: skip
        if self.ranks == 1:
            self._rank(0, Alone())
            return self
        threads = [threading.Thread(target=self._in_turn, args=(r, turns), name=f"job {self.number} rank {r}")
                   for r in range(1, self.ranks)]  # fmt: skip
        for t in threads:
            t.start()
        self._in_turn(0, turns)
        for t in threads:
            t.join()
        return self

    @property
    def points(self) -> list[Point]:
        return [p for store in self.stores for p in store.trace]

    @property
    def struck(self) -> bool:
        return any(s.struck for s in self.stores)

    @property
    def reported(self) -> dict[Attempt, int]:
        """Steps that any rank was told are committed, with their content."""
        return dict(pair for o in self.outcomes for pair in o.reported)

    @property
    def errors(self) -> list[BaseException]:
        return [o.error for o in self.outcomes if o.error is not None]

    def _in_turn(self, rank: int, turns: Turns) -> None:
        turns.begin(rank)
        try:
            self._rank(rank, TurnGroup(turns, rank))
        finally:
            turns.end(rank)

    def _rank(self, rank: int, group: Group) -> None:
        outcome = self.outcomes[rank]
        try:
            self._train(self.stores[rank], group, outcome)
        except (CkptError, Died) as e:
            outcome.error = e

    def _train(self, store: FaultStore, group: Group, outcome: Outcome) -> None:
        content = Content(self.incremental)
        run = Checkpoints(store, group, keep=self.keep, deadline_s=1.0, grace_s=self.grace_s,
                          allow_fallback=False, incremental=self.incremental)  # fmt: skip
        outcome.resumed = resumed = run.resume(content.state)
        outcome.epoch = run.epoch
        outcome.loaded = content.numbers() if resumed.attempt else set()
        for n in range(1, self.saves + 1):
            step = resumed.step + n * self.stride
            for attempt in range(2):
                content.fill(number := (self.number * 1000 + step) * 10 + attempt)
                try:
                    run.save(step, content.state)
                    saved = run.wait()
                except (Superseded, RankFailed):
                    raise
                except CkptError as e:  # the policy of a job that trains on: try once more
                    outcome.error = e
                    continue
                outcome.error = None
                assert saved is not None
                name = parse_attempt(saved.attempt)
                assert name is not None
                outcome.reported.append((name, number))
                break


def number_of(content: Any) -> tuple[int, int]:
    """Start and step of a content number."""
    return int(content) // 10_000, int(content) // 10 % 1000
