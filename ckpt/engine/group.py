"""The ranks of one job as the commit protocol sees them: one exchange at a time, with a deadline and names.

No collective is used: an exchange goes through the process group's key-value store, so that a rank which is dead
or stuck is named after the deadline instead of holding everybody for the group's 30 minutes.
"""

from __future__ import annotations

import os
import pickle
import secrets
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist

from ckpt.errors import CkptError, RankFailed, Refused

T = TypeVar("T")
R = TypeVar("R")


class KeyValues(Protocol):
    """The part of ``torch.distributed.Store`` that a group uses."""

    def set(self, key: str, value: bytes, /) -> None:
        """Write a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Read a value, waiting for it."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Delete a value."""
        ...

    def clone(self) -> KeyValues:
        """The same store over a connection of its own."""
        ...


class Group(Protocol):
    """What save, load and commit need of the ranks of a job."""

    rank: int
    size: int

    def exchange(
        self, phase: str, local: Callable[[], T], decide: Callable[[list[T]], R | Scattered[R]], *, deadline_s: float
    ) -> R:
        """Run ``local`` on every rank and ``decide`` on rank 0 over all results; everybody gets its answer.

        Called by all ranks in the same order. Raises the same error on every rank: the one that ``decide`` raised,
        the first rank's own ``CkptError``, or ``RankFailed`` naming the ranks that raised or stayed silent.
        """
        ...

    def channel(self, name: str) -> Group:
        """A group over the same ranks whose exchanges are numbered apart, for use on another thread."""
        ...


class Scattered(list[R]):
    """What ``decide`` returns to give each rank an answer of its own, in the order of ranks."""


class Alone:
    """A group of one."""

    rank, size = 0, 1

    def exchange(
        self, phase: str, local: Callable[[], T], decide: Callable[[list[T]], R | Scattered[R]], *, deadline_s: float
    ) -> R:
        """Run both parts here."""
        answer = decide([local()])
        return answer[0] if isinstance(answer, Scattered) else answer

    def channel(self, name: str) -> Alone:
        """Nothing to keep apart."""
        return self


class StoreGroup:
    """A group over ``torch.distributed``'s default process group."""

    def __init__(self, store: KeyValues, rank: int, size: int, prefix: str) -> None:
        # a clone has its own connection: a wait here never blocks a thread that sets up a communicator
        self._store = store.clone()
        self._parent, self.rank, self.size, self._prefix = store, rank, size, prefix
        self._count = 0
        self._done: list[str] = []

    def channel(self, name: str) -> StoreGroup:
        """A group whose exchanges are numbered apart."""
        return StoreGroup(self._parent, self.rank, self.size, f"{self._prefix}/{name}")

    def exchange(
        self, phase: str, local: Callable[[], T], decide: Callable[[list[T]], R | Scattered[R]], *, deadline_s: float
    ) -> R:
        """See ``Group.exchange``."""
        self._count += 1
        key = f"{self._prefix}/{self._count}"
        try:
            outcome = self._run(key, phase, local, decide, deadline_s)
        except dist.DistError as e:  # the store's host is gone, and with it the job
            raise RankFailed(f"{phase}: the job's key-value store does not answer: {str(e).splitlines()[0]}") from e
        if isinstance(outcome, _Failure):
            raise outcome.error()
        return outcome  # type: ignore[no-any-return]

    def _run(
        self,
        key: str,
        phase: str,
        local: Callable[[], T],
        decide: Callable[[list[T]], R | Scattered[R]],
        deadline_s: float,
    ) -> Any:
        mine = _attempt(local, self.rank)
        end = time.monotonic() + deadline_s  # what this rank does itself takes what it takes
        if self.rank != 0:
            self._store.set(f"{key}/in/{self.rank}", pickle.dumps(mine))
            # rank 0 gives up at the deadline and says so; a little later its own silence is the news
            if not self._arrived(f"{key}/out", end + 10.0):
                raise RankFailed(f"{phase}: rank 0, which coordinates, did not answer within {deadline_s + 10:.0f} s")
            answer = pickle.loads(self._store.get(f"{key}/out"))  # from our own rank 0
            if answer is Scattered:
                answer = pickle.loads(self._store.get(f"{key}/out/{self.rank}"))
                self._store.delete_key(f"{key}/out/{self.rank}")
            return answer
        outcome = self._decide(key, phase, mine, decide, end, deadline_s)
        if isinstance(outcome, Scattered):
            for r, answer in enumerate(outcome):
                if r != 0:
                    self._store.set(f"{key}/out/{r}", pickle.dumps(answer))
            self._store.set(f"{key}/out", pickle.dumps(Scattered))
            outcome = outcome[0]
        else:
            self._store.set(f"{key}/out", pickle.dumps(outcome))
        for old in self._done:  # everybody came to this exchange, so nobody reads the last one any more
            self._store.delete_key(old)
        self._done = [f"{key}/out", *(f"{key}/in/{r}" for r in range(1, self.size))]
        return outcome

    def _decide(
        self,
        key: str,
        phase: str,
        mine: Any,
        decide: Callable[[list[T]], R | Scattered[R]],
        end: float,
        deadline_s: float,
    ) -> Any:
        results = [mine]
        for r in range(1, self.size):
            if not self._arrived(f"{key}/in/{r}", end):
                silent = [r] + [n for n in range(r + 1, self.size) if not self._store.check([f"{key}/in/{n}"])]
                return _Failure(0, RankFailed(
                    f"{phase}: no word from {_ranks(silent)} within {deadline_s:.0f} s",
                    hint="look at what these ranks are doing; the last committed step is untouched"))  # fmt: skip
            results.append(pickle.loads(self._store.get(f"{key}/in/{r}")))
        failed = [f for f in results if isinstance(f, _Failure)]
        if failed:
            return failed[0].among(failed)
        return _attempt(lambda: decide(results), 0)

    def _arrived(self, key: str, end: float) -> bool:
        pause = 0.0005
        while not self._store.check([key]):
            if time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        return True


class _Failure:
    """An error on its way to the other ranks; the original where it can travel, else its text."""

    def __init__(self, rank: int, error: Exception) -> None:
        self.rank = rank
        if isinstance(error, CkptError):
            self._error = error
            return
        text = "".join(traceback.format_exception(error)).strip()
        self._error = RankFailed(f"rank {rank} failed: {type(error).__name__}: {error}",
                                 facts=[("trace", line) for line in text.splitlines()[-6:]])  # fmt: skip

    def among(self, all_failed: Sequence[_Failure]) -> _Failure:
        """The same failure, saying which ranks failed."""
        where = ("reported by", _ranks([f.rank for f in all_failed]))
        self._error.facts = [*self._error.facts, where]
        return self

    def error(self) -> CkptError:
        return self._error


def _attempt(do: Callable[[], Any], rank: int) -> Any:
    try:
        return do()
    except Exception as e:
        return _Failure(rank, e)


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def current_group() -> Group:
    """The group of the default process group, or a group of one where there is none. Called by all ranks.

    A random prefix, agreed by one broadcast, keeps its keys apart from what an earlier generation of the job may
    have left in a store that outlived it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise Refused(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but there is no process group: each rank would be alone",
                hint="call elastic.init() first",
            )
        return Alone()
    if dist.get_world_size() == 1:
        return Alone()
    world = dist.group.WORLD
    assert world is not None
    token = [secrets.token_hex(8)]
    dist.broadcast_object_list(token, src=0)
    return StoreGroup(
        cast(KeyValues, world.get_group_store()), dist.get_rank(), dist.get_world_size(), f"ckpt/{token[0]}"
    )
