"""What the loop hands out: one step, the unit of commit, and the micro-batches that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.errors import Refused


@dataclass(frozen=True, slots=True)
class Micro:
    """A part of this rank's share of a step, to be run by itself. Unpacks to (batch, weight)."""

    batch: Any
    weight: float
    """Factor for the *mean* loss over the part's samples. The sum over parts of the weighted gradients, averaged over
    ranks as DDP and FSDP do, is then the mean over the global batch, also where shares are uneven. 0 for a part that is
    there only because every rank runs as many: its sample is one that counts elsewhere."""
    last: bool
    """Whether this is the last of the step: gradients need to be exchanged in its backward only."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.batch, self.weight))


@dataclass(slots=True)
class Step:
    """One step of the loop, the unit of commit. Unpacks: ``for step, batch in run.steps(until=...)``."""

    number: int
    """Steps completed before this one: the first step of a fresh run is 0."""
    first: Any
    weights: Sequence[float] = (1.0,)
    _next: Callable[[], Any] | None = None
    _taken: int = 0
    _more: int = 0

    @property
    def batch(self) -> Any:
        """This rank's batch; None where the state has no ``data``. ``Refused`` where it comes in micro-batches."""
        if len(self.weights) != 1 or self.weights[0] != 1.0:
            raise Refused("this sampler gives micro-batches, which have weights",
                          hint="for step in run.steps(…): for batch, weight in step.micros: …")  # fmt: skip
        return self.first

    @property
    def micros(self) -> Iterator[Micro]:
        """The micro-batches of this rank's share, each fetched when asked for; as many on every rank. Once a step.

        ``ElasticSampler(data, batch, micro=...)`` says how large they may be; without it there is one, of weight 1.
        """
        if self._taken:
            raise Refused(f"the micro-batches of step {self.number} were taken before")
        for n, weight in enumerate(self.weights):
            self._taken = n + 1
            batch = self.first if n == 0 or self._next is None else self._next()
            yield Micro(batch, weight, n + 1 == len(self.weights))

    def next_batch(self) -> Any:
        """One more batch, for a step that trains on several; every rank takes as many in a step."""
        if len(self.weights) != 1:
            raise Refused("this sampler gives micro-batches; a step of them takes one global batch",
                          hint="ElasticSampler without micro=…, or a larger batch")  # fmt: skip
        if self._next is None:
            raise Refused("the state has no data to take a batch from", hint="ckpt.State(…, data=loader)")
        self._more += 1
        return self._next()

    @property
    def batches(self) -> int:
        """Global batches that the step has taken by now."""
        return 1 + self._more

    def check_taken(self) -> None:
        """The body is done: refuse a step of which micro-batches were left, for they would count as trained on."""
        if len(self.weights) > 1 and self._taken != len(self.weights):
            raise Refused(f"step {self.number} took {self._taken} of {len(self.weights)} micro-batches",
                          hint="run each: for batch, weight in step.micros; run.stop() ends the loop")  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        return iter((self.number, self.batch))
