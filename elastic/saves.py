"""The saves of one run, on one rank: begun at a boundary, written in the background, looked at, finished, forgiven."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import ckpt
from ckpt.errors import RankFailed
from elastic.cadence import Cadence
from elastic.ledger.events import Payload, SaveCommitted, SaveFailed, SaveStarted
from elastic.record import error_name
from elastic.tolerance import END, Tolerance

_log = logging.getLogger("elastic")
GRACE_S = 5.0  # for a save under way when an exception ends the run: worth keeping, not worth a hang
Tell = Callable[[Payload, int], None]


class Saves:
    """One save in flight at most. All ranks call ``begin`` and ``settle`` at the same boundaries.

    ``tell`` puts an event with its step into the ledger.
    """

    def __init__(self, checkpoints: ckpt.Checkpoints, state: ckpt.State, cadence: Cadence, tolerance: Tolerance,
                 tell: Tell) -> None:  # fmt: skip
        self._checkpoints, self._state, self._cadence, self._tell = checkpoints, state, cadence, tell
        self.tolerance = tolerance
        self.saved_step: int | None = None
        """The newest step whose save was begun and has not failed, or that was restored."""
        self.stall_s = 0.0
        """How long the last save stopped training; of the slowest rank, once that is known."""
        self.failure: BaseException | None = None
        """What made the last save fail, until the ranks have agreed on what it means."""
        self._pending: ckpt.Pending | None = None

    @property
    def idle(self) -> bool:
        """Whether no save is in flight."""
        return self._pending is None

    @property
    def interval_s(self) -> float:
        """From save to save; at least a second, so that patience is not over before anything could happen."""
        return max(self._cadence.interval_s, 1.0)

    def overdue(self) -> bool:
        """Whether training has to wait for a save by now: too long ago is the last one that did not fail."""
        return self.tolerance.overdue(time.monotonic(), self.interval_s)

    def retry_due(self) -> bool:
        """Whether a save that failed is to be tried again."""
        return self.idle and self.tolerance.retry_due(time.monotonic())

    def begin(self, step: int, reason: str) -> BaseException | None:
        """Copy the state and have it written; training waits for the copy, and for a save still in flight.

        Returned is what ends the run, where the save before has failed and that is what it means.
        """
        began = time.monotonic()
        self._finish_quietly()
        ends = None
        if self.failure is not None:  # heard by all ranks, as each has finished the save before
            ends = self.settle(self.tolerance.judge(self.failure))
        self._tell(SaveStarted(reason=reason), step)
        self._pending = self._checkpoints.save(step, self._state)
        self.saved_step = step
        self.stall_s = time.monotonic() - began
        self._cadence.began(self.stall_s)
        return ends

    def look(self) -> None:
        """Note, without waiting, how the save in flight has ended, if it has."""
        if self._pending is not None and self._pending.done():
            self._finish_quietly()

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait for the save in flight; raises what made it fail."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            saved = pending.wait(timeout_s)
        except Exception as error:
            self.saved_step = None
            self._tell(SaveFailed(error=error_name(error), message=str(error)), pending.step)
            raise
        if not saved.quarantined:  # a step that nobody may choose is no step to fall back on
            self.tolerance.committed(time.monotonic())
        self._cadence.saved(self.stall_s, saved.persist_s)
        self._tell(
            SaveCommitted(attempt=saved.attempt, bytes=saved.bytes, stall_s=saved.stall_s, persist_s=saved.persist_s,
                          stall_max_s=self.stall_s),
            saved.step,
        )  # fmt: skip

    def finish_last(self, step: int) -> None:
        """Wait for the save of the state as it is, and try once more if it fails in a way that may pass."""
        try:
            self.finish()
        except Exception as error:
            if self.tolerance.judge(error) == END:
                raise
            _log.warning("the last save, of step %d, failed and is tried once more: %s", step, error)
            self.begin(step, "again")
            self.finish()

    def settle(self, verdict: int) -> BaseException | None:
        """Do what the ranks have agreed on about a failed save: raise it, or go on; returned is what ends the run."""
        if self.failure is None and self._pending is not None and self._pending.ends_within(GRACE_S):
            self._finish_quietly()  # the same error comes to every rank, here a little later
        failure = self.failure or RankFailed("a save in the background failed on another rank")
        if verdict == END:
            raise failure
        self.failure = None
        self.tolerance.failed(time.monotonic(), self.interval_s)
        _log.warning(
            "save number %d in a row failed; training goes on, and what it does since the last good one is at risk: %s",
            self.tolerance.failures,
            failure,
        )
        return failure if self.tolerance.policy == "stop" else None

    def give_up(self) -> None:
        """The run ends by an exception: a save under way gets a moment."""
        if self._pending is not None:
            step = self._pending.step
            try:
                self.finish(GRACE_S)
            except Exception as late:
                _log.warning("the save of step %d was given up: %s", step, late)

    def _finish_quietly(self, timeout_s: float | None = None) -> None:
        try:
            self.finish(timeout_s)
        except Exception as error:  # every rank has to hear of it before any raises
            self.failure = error
