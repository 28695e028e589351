"""What the end of a worker means: done, stopped on request, overtaken, or a failure that is worth another start. Pure.

A start is worth it as long as training gets further: the budget of restarts is full again when a generation has gone
beyond the highest step of all before it (or, where steps are not known, has lived for ten minutes). The same error at
the same step three times in a row is a crash loop, whatever is left of the budget.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

DONE, SUPERSEDED, STOPPED = 0, 6, 75
SAME_TIMES = 3
LONG_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a generation ended. ``status`` is the exit code of the rank that failed first, or minus its signal."""

    rank: int
    local_rank: int
    pid: int
    status: int
    step: int | None = None
    """Completed steps at the end, where they are known."""
    lived_s: float = 0.0
    error: str | None = None
    """What the rank raised, in a line."""
    where: str | None = None
    hung: bool = False
    """It was ended by the launcher, because it hung."""

    @property
    def how(self) -> str:
        """How it ended, in a few words."""
        if self.hung:
            return "hung, and was ended"
        if self.status >= 0:
            return f"exit status {self.status}"
        return f"killed by {signal_name(-self.status)}"

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for the same error at the same step; numbers in its text, such as ports and times, do not count."""
        error = re.sub(r"\d+", "#", (self.error or "").partition("\n")[0])
        return (self.step, self.rank, self.how, error, self.where)


def signal_name(number: int) -> str:
    """SIGKILL for 9; a number without a name is said as it is."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Budget:
    """Decides on restarts, for one host."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = self.left = max_restarts
        self._highest = -1
        self._last: tuple[object, ...] | None = None
        self._same = 0

    def refusal(self, failure: Failure) -> str | None:
        """Why there is to be no restart after ``failure``; None when there is to be one, which is then counted."""
        self._same = self._same + 1 if failure.signature == self._last else 1
        self._last = failure.signature
        step = -1 if failure.step is None else failure.step
        if step > self._highest or (failure.step is None and failure.lived_s >= LONG_S):
            self.left = self.max_restarts
        self._highest = max(self._highest, step)
        # an error from outside may strike a script three times whose steps are not known
        known = failure.step is not None or (failure.error is not None and failure.lived_s < LONG_S)
        if self._same >= SAME_TIMES and known and self.max_restarts:
            at = "" if failure.step is None else f" at step {failure.step}"
            return f"crash loop: the same error{at}, {self._same} times in a row"
        if self.left == 0:
            used = f"all {self.max_restarts} restarts are used up" if self.max_restarts else "no restarts were allowed"
            return used + (", and training got no further" if self.max_restarts else "")
        self.left -= 1
        return None


def exit_status(status: int) -> int:
    """What a launcher ends with when this is what its first failed worker ended with: as a shell has it."""
    return 128 - status if status < 0 else status
