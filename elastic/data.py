"""Sample order as a pure function: which samples a step trains on depends on seed and position alone.

All epochs are one endless sequence of slots; slot g holds sample ``order(seed, g // size)[g % size]``, where
an order is a keyed permutation that any single slot can be asked of. A step takes the next ``batch`` slots,
whatever the number of ranks; a batch may reach over the end of an epoch. So every sample comes exactly once
in an epoch, and one number, the samples trained on, says where the run is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from ckpt.errors import Mismatch, Refused
from elastic.membership import rank_and_world

_U64 = np.uint64
_ROUNDS = 8
_CHUNK = 4096  # slots worked out at a time: numpy's cost a call, shared by many steps
Array = NDArray[np.uint64]


class Share(list[int]):
    """The samples of a micro-batch; they stand in consecutive slots of the endless order, from ``slot`` on."""

    slot = 0


class ElasticSampler(Sampler[list[int]]):
    """Batch sampler whose order does not depend on the number of ranks: ``DataLoader(batch_sampler=...)``.

    ``batch`` is the *global* batch in samples; each rank's share of a step is a contiguous part of it. Without
    ``micro``, ``batch`` must be a multiple of the world size. ``micro`` is how many samples a rank takes at once at
    most (``for batch, weight in step.micros``): the global batch then stays what it is on any number of ranks, also
    where the shares are uneven. Every rank takes as many micro-batches; one that would be empty holds the first sample
    of the global batch, with weight 0. With ``per_rank``, ``batch`` is that of one rank: the global batch then grows
    and shrinks with the ranks, each sample still comes once an epoch, and the learning rate is yours to scale
    (``global_batch``).

    Iterating is endless, starts at ``position`` and never moves it: workers and prefetching may run ahead. Only
    ``advance`` moves it; :class:`elastic.Run` calls it when a step is complete. Rank and world size are those of the
    process group at the time of iterating.
    """

    def __init__(
        self, data: int | Sized, batch: int, *, seed: int = 0, micro: int | None = None, per_rank: bool = False
    ) -> None:
        self.size = data if isinstance(data, int) else len(data)
        self.batch, self.seed, self.micro, self.per_rank = batch, seed, micro, per_rank
        self._position = 0
        if self.size < 1 or batch < 1:
            raise Refused(f"a data set of {self.size} samples in batches of {batch}: both must be at least 1")
        if micro is not None and micro < 1:
            raise Refused(f"micro={micro}: give at least 1 sample")

    @property
    def position(self) -> int:
        """Samples trained on since the start of the run, all ranks and epochs together."""
        return self._position

    @property
    def epoch(self) -> int:
        """Epochs that are complete."""
        return self._position // self.size

    def advance(self, steps: int = 1) -> None:
        """Count ``steps`` more steps as trained on."""
        self._position += steps * (self.global_batch if self.per_rank else self.batch)

    @property
    def global_batch(self) -> int:
        """Samples that all ranks of the moment take together in a step."""
        return self._global(rank_and_world()[1])

    def _global(self, world: int) -> int:
        return self.batch * world if self.per_rank else self.batch

    def __iter__(self) -> Iterator[list[int]]:
        return self.share(*rank_and_world())

    def weights(self, rank: int, world: int) -> list[float]:
        """The weight of each micro-batch of a rank's share: its part of the global batch, times the ranks."""
        return [(last - first) * world / self._global(world) for first, last in self._cuts(rank, world)]

    def _cuts(self, rank: int, world: int) -> list[tuple[int, int]]:
        """Where each micro-batch of a rank begins and ends in the global batch; as many on every rank."""
        batch = self._global(world)
        if self.micro is None and batch % world:
            near = sorted({batch - batch % world, batch + -batch % world} - {0})
            raise Refused(
                f"a batch of {self.batch} samples cannot be shared evenly by {world} ranks",
                hint=f"use {_either(_divisors(self.batch))} ranks, or a batch of {_either(near)}, "
                "or micro=…, which weighs uneven shares",
            )
        largest = -(-batch // world)
        count = 1 if self.micro is None else -(-largest // self.micro)
        whole, more = divmod(batch, world)
        first = rank * whole + min(rank, more)
        mine = whole + (rank < more)
        edges = [first + mine * n // count for n in range(count + 1)]
        return list(pairwise(edges))

    def share(self, rank: int, world: int) -> Iterator[list[int]]:
        """What ``rank`` of ``world`` trains on from ``position`` on, a list a micro-batch, endlessly."""
        cuts = [np.arange(first, last) if first < last else np.arange(1) for first, last in self._cuts(rank, world)]
        own, ends = np.concatenate(cuts), np.cumsum([len(c) for c in cuts])[:-1]
        steps = max(1, _CHUNK // len(own))
        firsts = [int(c[0]) for c in cuts]
        start = self._position
        batch = self._global(world)
        offsets = np.arange(steps)[:, None] * batch + own
        while True:
            for row in sample_at(self.seed, self.size, start + offsets):
                for first, part in zip(firsts, np.split(row, ends), strict=True):
                    share = Share(part.tolist())
                    share.slot = start + first
                    yield share
                start += batch

    def state_dict(self) -> dict[str, int]:
        """Seed, size, batch and position, as plain numbers; the same on every rank."""
        state = {"seed": self.seed, "size": self.size, "batch": self.batch, "position": self._position}
        return state | ({"per_rank": True} if self.per_rank else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over seed and position; ``Mismatch`` when they were counted on another data set or batch."""
        if self.per_rank != bool(state.get("per_rank")):
            raise Mismatch("the batch was saved as one of all ranks, and is one of each rank here, or the other way",
                           hint=f"build the sampler with per_rank={not self.per_rank}")  # fmt: skip
        for name, live in (("size", self.size), ("batch", self.batch)):
            if state[name] != live:
                raise Mismatch(
                    f"the sample order was saved with another {name}",
                    facts=[("saved", f"{state[name]} samples"), ("here", f"{live} samples")],
                    hint=f"build the sampler with {name} {state[name]}, or begin a new run",
                )
        self.seed, self._position = int(state["seed"]), int(state["position"])


def sample_at(seed: int, size: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """The samples in the given slots of the endless order, as an array of the same shape.

    Each epoch is a Feistel network over the smallest even number of bits that holds ``size``, keyed by seed
    and epoch; a result that is no sample is fed in again until it is one, which keeps it a permutation of the
    samples.
    """
    flat = slots.reshape(-1)
    keys = _mix(_mix(np.full(1, seed % 2**64, _U64)) ^ (flat // size).astype(_U64))
    value = (flat % size).astype(_U64)
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    todo = np.arange(len(value))
    while len(todo):
        value[todo] = _feistel(value[todo], keys[todo], half)
        todo = todo[value[todo] >= size]
    return value.astype(np.int64).reshape(slots.shape)


def _feistel(value: Array, keys: Array, half: int) -> Array:
    bits, mask = _U64(half), _U64((1 << half) - 1)
    left, right = value >> bits, value & mask
    for n in range(_ROUNDS):
        left, right = right, left ^ (_mix((keys + _U64(n)) ^ (right << _U64(32))) & mask)
    return (left << bits) | right


def _mix(x: Array) -> Array:
    """One step of splitmix64 (Steele, Lea, Flood 2014), element by element."""
    x = x + _U64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, min(n, 4096) + 1) if n % d == 0]


def _either(numbers: list[int]) -> str:
    return " or ".join(part for part in (", ".join(map(str, numbers[:-1])), str(numbers[-1])) if part)
