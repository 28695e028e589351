"""Evaluation within a step: it leaves random streams and modes as they were, and ends early when the run is to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self, TypeVar

import torch

import ckpt
from ckpt.rng import Rng, is_stream, set_stream, stream_state
from elastic.agreement import NOTHING, Agreement, Flags, together
from elastic.stop import iterate

T = TypeVar("T")


class Evaluation:
    """``with run.evaluation() as ev: for batch in ev.batches(loader): …``, on all ranks, within a step of the loop.

    Inside, the state's modules are in eval mode, and no gradients are recorded. Afterwards their modes and all random
    streams (the state's generators too) are what they were, so that a run that is evaluated trains on the same numbers
    as one that is not.
    """

    def __init__(self, agreement: Agreement, flags: Callable[[], Flags], state: ckpt.State) -> None:
        self._agreement, self._flags, self._state = agreement, flags, state
        self.heard = NOTHING
        """What the ranks have said meanwhile."""
        self.seconds = 0.0
        self._left = False

    @property
    def stopped(self) -> bool:
        """Whether the run is to stop, so that ``batches`` has ended early: what was measured is of a part."""
        return self.heard.stop > 0

    def batches(self, source: Iterable[T]) -> Iterator[T]:
        """The items of ``source``, as many as this rank has; ends on all ranks together when the run is to stop.

        Ranks may have different numbers of items where the body holds no collective operation; those that have done
        wait here for the others, so a reduction of the results may follow. Before each item all ranks agree on whether
        to go on, which costs as much as at a step.
        """
        self._catch_up()
        for item in iterate(source):
            if self.stopped or self._exchange(busy=1).stop:
                break
            try:
                yield item
            except GeneratorExit:  # by a break, or by an exception: then nobody may be waited for
                self._leave()
                return
        self._wait()

    def _leave(self) -> None:
        """Answer those who wait at the end of their items, without waiting for anybody."""
        self._left = True
        self._agreement.post(self._flags()._replace(busy=0))

    def _catch_up(self) -> None:
        """Hear the answer to what ``_leave`` has said."""
        if self._left:
            self._left = False
            if not self._agreement.alone:
                self._hear(self._agreement.take(NOTHING))

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._posted = self._agreement.posted
        if self._posted:
            self._hear(self._agreement.take(NOTHING))
        modules = [m for v in self._state.entries.values() if isinstance(v, torch.nn.Module) for m in v.modules()]
        self._modes = [(m, m.training) for m in modules]
        for module in modules:
            module.training = False
        self._rng = Rng()
        self._streams = self._rng.capture()
        self._grad = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        self._generators = [(g, stream_state(g)) for g in self._state.entries.values() if is_stream(g)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_grad_enabled(self._grad)
        for module, mode in self._modes:
            module.training = mode
        self._rng.restore(self._streams)
        for generator, state in self._generators:
            set_stream(generator, state)
        if kind is None:
            self._catch_up()
            self._wait()
            if self._posted:
                self._agreement.post(self._flags())
        self.seconds = time.monotonic() - self._began

    def _wait(self) -> None:
        while self._exchange(busy=0).busy:
            pass

    def _exchange(self, *, busy: int) -> Flags:
        answer = self._agreement.exchange(self._flags()._replace(busy=busy))
        self._hear(answer)
        return answer

    def _hear(self, answer: Flags) -> None:
        answer.check_turns()
        self.heard = together(self.heard, answer)
