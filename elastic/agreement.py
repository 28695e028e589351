"""What all ranks know at a step boundary: the largest of what each had to say one boundary before.

Every boundary posts one asynchronous maximum over a few integers, on a gloo group of its own, and reads the
one posted a boundary earlier. Nobody waits for a round trip, and all ranks act on the same answer at the same
step.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from ckpt.errors import RankFailed, Refused
from elastic.membership import collective_timeout, rank_and_world

STOP_ASKED, STOP_SIGNAL = 1, 2
SAVE_CLOCK, SAVE_ASKED, SAVE_OVERDUE = 1, 2, 3


class Flags(NamedTuple):
    """What one rank has to say, or the maximum over all ranks. Each field is 0 where there is nothing to say."""

    stop: int = 0
    """``STOP_ASKED`` by the training code, ``STOP_SIGNAL`` by a signal."""
    save: int = 0
    """``SAVE_CLOCK``: due by the clock, which only rank 0 reads; ``SAVE_ASKED`` by the training code;
    ``SAVE_OVERDUE``: saves have failed for so long that training is to wait for one."""
    failed: int = 0
    """Where the save in the background has failed: what this rank makes of it (see ``elastic.tolerance``)."""
    stall_us: int = 0
    """How long the last save stopped training on that rank, in microseconds."""
    long: int = 0
    """1 where the last step was so long that a round of its own, at the next boundary, costs nothing."""
    stride: int = 0
    """How many steps are to pass until the next boundary at which the ranks agree."""
    busy: int = 0
    """1 while the rank has batches of an evaluation left."""
    turns: int = 0
    """Batches taken and evaluations begun so far, which are as many on every rank, and their negative."""
    turns_least: int = 0

    def check_turns(self) -> None:
        """Of a maximum: raise ``Refused`` where the ranks have not taken the same turns."""
        if self.turns != -self.turns_least:
            raise Refused(
                f"ranks do not keep step: one has taken {self.turns} batches and evaluations, another "
                f"{-self.turns_least}",
                hint="call step.next_batch() and run.evaluation() on every rank, as often; "
                "a rank with nothing to evaluate enters it with ev.batches([])",
            )


NOTHING = Flags()


def together(a: Flags, b: Flags) -> Flags:
    """What was said in two rounds, each of which has been checked for turns: those are of one round alone."""
    return Flags(*map(max, a, b))._replace(turns=0, turns_least=0)


class Agreement:
    """Agreement of all ranks of the default process group; made, used and closed by all of them, on one thread.

    Two ranks may reach the same boundary as far apart in time as ``elastic.init(timeout_s=...)`` allows. With one
    rank there is nothing to wait for: an answer is the rank's own flags, at once.
    """

    def __init__(self) -> None:
        self._world = rank_and_world()[1]
        self._group: dist.ProcessGroup | None = None
        self._vector = torch.zeros(len(NOTHING), dtype=torch.int64)
        self._numbers = self._vector.numpy()
        self._work: dist.Work | None = None
        if self._world > 1:
            self._group = dist.new_group(backend="gloo", timeout=collective_timeout())

    @property
    def alone(self) -> bool:
        """Whether this is the only rank."""
        return self._group is None

    @property
    def posted(self) -> bool:
        """Whether flags of this rank are on their way."""
        return self._work is not None

    def check_same(self, what: str, value: int) -> None:
        """Wait for all ranks, and raise ``Refused`` on all of them when they do not give the same value."""
        if self._group is None:
            return
        both = torch.tensor([value, -value], dtype=torch.int64)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
        most, least = int(both[0]), -int(both[1])
        if most != least:
            raise Refused(f"{what} is {least} on one rank and {most} on another", hint="give the same on every rank")

    def from_rank_0(self, numbers: list[float]) -> list[float]:
        """Wait for rank 0, and return its numbers; as many on every rank, and nothing posted meanwhile."""
        if self._group is None:
            return numbers
        both = torch.tensor(numbers, dtype=torch.float64)
        try:
            dist.broadcast(both, 0, group=self._group)
        except RuntimeError as error:
            raise _rank_failed(error) from error
        return [float(x) for x in both]

    def post(self, mine: Flags) -> None:
        """Send this rank's flags for the next ``take``; returns at once."""
        if self._work is not None:  # of a loop that was left: it may still be under way
            self._vector = torch.zeros_like(self._vector)
            self._numbers = self._vector.numpy()
        self._numbers[:] = mine
        if self._group is not None:
            self._work = dist.all_reduce(self._vector, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def take(self, mine: Flags) -> Flags:
        """The maximum over all ranks of what was posted last; with one rank, ``mine``.

        Raises ``RankFailed`` when a rank has died or did not come in time.
        """
        if self._group is None:
            return mine
        work, self._work = self._work, None
        if work is None:
            return NOTHING
        try:
            work.wait()
        except RuntimeError as error:
            raise _rank_failed(error) from error
        return Flags(*self._numbers.tolist())

    def exchange(self, mine: Flags) -> Flags:
        """The maximum over all ranks of what they say now; waits for them."""
        self.post(mine)
        return self.take(mine)

    def close(self) -> None:
        """Leave. What is still in flight, after an exception, is left to end by itself."""
        if self._work is not None and not self._work.is_completed():
            atexit.register(_end_without, self._work)
        elif self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = self._work = None


def _rank_failed(error: RuntimeError) -> RankFailed:
    return RankFailed(
        "a rank did not come to the end of this step",
        facts=[("gloo", str(error).splitlines()[0])],
        hint="read the output of the rank that ended first",
    )


def _end_without(work: dist.Work, patience_s: float = 2.0) -> None:
    # gloo's threads are joined when the interpreter ends, so a collective that no peer answers, because it
    # hangs, would keep this process from ending for as long as the group's timeout, and its launcher from
    # restarting.
    end = time.monotonic() + patience_s
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.01)
    if not work.is_completed():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
