"""What a save that failed means for the run: go on for a while, insist, or end. No clock of its own, no torch."""

from __future__ import annotations

from ckpt.errors import RankFailed, Refused, StorageError, Superseded

POLICIES = ("warn", "raise", "stop")
PATIENCE = 3.0
"""Intervals without a committed step after which a save is made synchronously, and its failure is the end."""
_RETRY_S = 30.0  # after the first failure in a row, or the interval where that is shorter; twice as long each time
GO_ON, END = 1, 2  # what a rank proposes about a failed save; the ranks do what the strictest says


class Tolerance:
    """Decides about failed saves of one run; each rank has one and tells it what happens, in the same order.

    "warn": training goes on, a save is tried again after a while or when the next one is due, and once ``PATIENCE``
    intervals have passed without a committed step one is made while training waits; if that fails, too, its error ends
    the run. "raise": the error comes out of the loop at once. "stop": the loop ends after this step, with one more
    save, and then the error is raised. Only the storage's failures and ranks that did not answer in time are tolerated:
    whatever says that the state itself is not right to save, or that another job has taken over, ends the run under
    every policy.
    """

    def __init__(self, policy: str, *, now_s: float) -> None:
        if policy not in POLICIES:
            raise Refused(f"save_failures={policy!r} is no policy", hint=f"one of {', '.join(POLICIES)}")
        self.policy = policy
        self.failures = 0
        """Saves in a row that came to nothing."""
        self._committed_s, self._retry_s = now_s, float("inf")

    def judge(self, error: BaseException) -> int:
        """``GO_ON`` or ``END``, for this failure of a save."""
        passing = isinstance(error, (StorageError, RankFailed)) and not isinstance(error, Superseded)
        return GO_ON if passing and self.policy != "raise" else END

    def failed(self, now_s: float, interval_s: float) -> None:
        """A save has failed, and the run goes on."""
        self._retry_s = now_s + min(interval_s, _RETRY_S * 2**self.failures)
        self.failures += 1

    def committed(self, now_s: float) -> None:
        """A step is durable."""
        self.failures, self._committed_s, self._retry_s = 0, now_s, float("inf")

    def retry_due(self, now_s: float) -> bool:
        """Whether it is time to try again what has failed."""
        return now_s >= self._retry_s

    def overdue(self, now_s: float, interval_s: float) -> bool:
        """Whether so much would be lost by now that training has to wait for a save."""
        return self.failures > 0 and now_s - self._committed_s > PATIENCE * interval_s
