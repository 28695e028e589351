"""Batches of the loop, from whatever the state's ``data`` is, with a position that follows training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpt.errors import Refused
from ckpt.parts import keepers
from elastic.membership import rank_and_world
from elastic.stop import iterate

_END = object()
_HOW = "use DataLoader(dataset, batch_sampler=elastic.ElasticSampler(dataset, batch)), or leave data out of the state"


class Batches:
    """One batch a step. Where the source has a sampler with ``advance``, it is told of each completed step.

    Any iterable with ``state_dict`` and ``load_state_dict`` is a source, too, if its state is after what it has handed
    out: a step is complete before the next batch is asked for. A source without a position that can be saved is
    refused, and so is one that counts what it has handed to prefetching workers: after a restart, batches that nobody
    trained on would be missing. A source that ends is begun again. Without a source (None) every batch is None.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._iterator: Iterator[Any] | None = None
        self._sampler: Any = None
        self._to_skip = 0
        self._given: list[Any] = []  # of the step that is under way, by a source that has counted them
        self._again: list[Any] = []
        self.weights: tuple[float, ...] = (1.0,)
        """Of the micro-batches of one step, each of which ``next`` returns by itself."""
        if source is None:
            return
        if not hasattr(source, "__iter__"):
            raise Refused(f"data is a {type(source).__name__}, which cannot be iterated", hint=_HOW)
        by_sample = getattr(source, "sampler", None)
        if getattr(source, "batch_sampler", None) is not None and callable(getattr(by_sample, "advance", None)):
            raise Refused(
                f"data: {type(by_sample).__name__} is a batch sampler, but was passed as sampler=: each step would "
                "take several global batches and count one",
                hint="DataLoader(dataset, batch_sampler=elastic.ElasticSampler(dataset, batch))",
            )
        keeper = next((o for o in keepers(source) if hasattr(o, "state_dict") and hasattr(o, "load_state_dict")), None)
        if keeper is None:
            raise Refused(f"data is a {type(source).__name__} whose position cannot be saved", hint=_HOW)
        if hasattr(keeper, "advance"):
            self._sampler = keeper
        elif keeper is not source and getattr(source, "num_workers", None):
            raise Refused(
                f"{type(keeper).__name__} counts batches when workers fetch them, before they are trained on",
                hint=f"{_HOW}; or num_workers=0",
            )

    def begin(self) -> None:
        """Build the iterator, at the position of the moment; the batches of a step that was left come again."""
        if self._given:
            self._again, self._given = self._given + self._again, []
            return
        if hasattr(self._sampler, "weights"):
            self.weights = tuple(self._sampler.weights(*rank_and_world()))
        if self._source is not None:
            self._iterator = iterate(self._source)
        for _ in range(self._to_skip):
            self._fetch()
        self._to_skip = 0

    def next(self) -> Any:
        """The next batch."""
        batch = self._again.pop(0) if self._again else self._fetch()
        if self._sampler is None:
            self._given.append(batch)
        return batch

    def _fetch(self) -> Any:
        if self._iterator is None:
            return None
        batch = next(self._iterator, _END)
        if batch is _END:
            self._iterator = iterate(self._source)
            batch = next(self._iterator, _END)
        if batch is _END:
            raise Refused(f"data, a {type(self._source).__name__}, is empty")
        return batch

    def close(self) -> None:
        """Let the iterator go, and its worker processes with it."""
        self._iterator = None

    @property
    def none(self) -> bool:
        """Whether there is no source."""
        return self._source is None

    def advance(self, batches: int) -> None:
        """A step is complete that took so many batches.

        ``Refused`` where batches of a step that was left still wait: the source has counted them, so a save would
        lose them.
        """
        if self._again:
            left = batches + len(self._again)
            raise Refused(
                f"the step that was left had taken {left} batches, and the one in its place took {batches}: a save now "
                f"would lose {len(self._again)}",
                hint=f"take all {left} in that step: step.batch and {left - 1} x step.next_batch()",
            )
        self._given.clear()
        if self._sampler is not None:
            self._sampler.advance(batches)

    def skip(self, batches: int) -> None:
        """Leave batches out that nobody will train on, at the position of the moment; before ``begin``."""
        if self._sampler is not None:
            self._sampler.advance(batches)
        elif self._source is None:
            raise Refused(f"skip={batches}: the state has no data to skip", hint="ckpt.State(…, data=loader)")
        else:
            self._to_skip = batches
