"""When the next save is due: every so many steps, every so many seconds, or as often as it pays ("auto")."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from ckpt.errors import Refused
from elastic.economics.inputs import BadInput
from elastic.economics.pacer import Pacer
from elastic.ledger.events import CrashLoop, IntervalChanged
from elastic.ledger.history import Since
from elastic.units import BadUnit, parse_duration

_log = logging.getLogger("elastic")

_STEPS = re.compile(r"\s*([0-9]+)\s*(?:steps?)?\s*")


class Cadence:
    """A rule for saves: subclass it for one of your own, and give it as ``every=``.

    ``at`` is known on every rank alone; ``due`` reads a clock, so rank 0 alone asks it.
    """

    @property
    def interval_s(self) -> float:
        """Seconds from save to save, as far as is known by now."""
        return 0.0

    def start(self) -> None:
        """Training begins, or goes on after a restart."""

    def at(self, step: int) -> bool:
        """Whether the state is to be saved at ``step`` completed steps."""
        return False

    def due(self) -> bool:
        """Whether it is time to save, at this moment."""
        return False

    def step(self, seconds: float) -> None:
        """A step was completed, in this time without saves."""

    def began(self, stall_s: float) -> None:
        """A save has begun, and stopped training for so long."""

    def saved(self, stall_s: float, persist_s: float) -> None:
        """That save is durable."""

    def changes(self) -> list[IntervalChanged | CrashLoop]:
        """Intervals decided on since the last call."""
        return []


class EverySteps(Cadence):
    """At each multiple of ``n`` completed steps."""

    def __init__(self, n: int) -> None:
        if n < 1:
            raise Refused(f"every={n}: give at least 1 step")
        self.n = n
        self._step_s = self._steps = 0.0

    @property
    def interval_s(self) -> float:
        """``n`` mean steps."""
        return self.n * self._step_s

    def step(self, seconds: float) -> None:
        """Counts for the mean."""
        self._steps += 1
        self._step_s += (seconds - self._step_s) / self._steps

    def at(self, step: int) -> bool:
        """True at multiples of ``n``."""
        return step % self.n == 0

    def __str__(self) -> str:
        return f"{self.n} steps"


class EverySeconds(Cadence):
    """``seconds`` after the last save began, or after the start."""

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise Refused(f"every={seconds} s: give a time above zero")
        self.seconds = seconds
        self.start()

    @property
    def interval_s(self) -> float:
        """The time given."""
        return self.seconds

    def start(self) -> None:
        """The time runs from here."""
        self._since = time.monotonic()

    def due(self) -> bool:
        """True when the time is over."""
        return time.monotonic() - self._since >= self.seconds

    def began(self, stall_s: float) -> None:
        """The time runs from here."""
        self.start()

    def __str__(self) -> str:
        return f"{self.seconds:g} s"


class Auto(Cadence):
    """The interval that loses least, worked out from the cost of saves as measured and the rate of failures.

    What it has learned is kept in every step (``ckpt.State.keep_aside``): rank 0's, which all ranks get to save by
    ``agree``. A start that restores it adds with ``resumed`` what has happened since.
    """

    def __init__(self, nodes: int) -> None:
        self._pacer = Pacer(nodes=nodes)
        self._agreed = self._pacer.state_dict()

    @property
    def interval_s(self) -> float:
        """The pacer's interval of the moment."""
        return self._pacer.interval_s

    def agree(self, rank0: Callable[[list[float]], list[float]]) -> None:
        """Before a save, on all ranks: take rank 0's knowledge for what is saved."""
        mine = self._pacer.state_dict()
        self._agreed = dict(zip(mine, rank0([float(v) for v in mine.values()]), strict=True))

    def state_dict(self) -> dict[str, int | float]:
        """What all ranks have agreed on last."""
        return self._agreed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what a step holds; one of another release is warned about and left."""
        try:
            self._pacer.load_state_dict(state)
        except BadInput as error:
            _log.warning("what was learned about failures and saves is lost, and learned anew: %s", error)

    def resumed(self, since: Since) -> None:
        """What has happened since the restored step was saved."""
        for stall_s, persist_s in since.saves:
            self._pacer.saved(stall_s=stall_s, persist_s=persist_s)
        for saved, times in ((True, since.notices_saved), (False, since.notices_missed)):
            for _ in range(times):
                self._pacer.noticed(saved=saved)
        self._pacer.resumed(failures=since.failures, early=since.early, lost_s=since.lost_s)

    def due(self) -> bool:
        """True when the interval of the moment is over and no upload is under way."""
        return self._pacer.due()

    def step(self, seconds: float) -> None:
        """Counts as work done."""
        self._pacer.step(seconds)

    def began(self, stall_s: float) -> None:
        """The work that a failure would lose counts from here."""
        self._pacer.began(stall_s)

    def saved(self, stall_s: float, persist_s: float) -> None:
        """Measures what the next interval is worked out from."""
        self._pacer.saved(stall_s=stall_s, persist_s=persist_s)

    def changes(self) -> list[IntervalChanged | CrashLoop]:
        """The pacer's decisions."""
        out: list[IntervalChanged | CrashLoop] = []
        for event in self._pacer.pop_events():
            if event.get("event") == "crash_loop":
                starts = int(event["starts_without_a_step"])
                _log.warning("crash loop: %d starts in a row ended before their first step; no interval helps", starts)
                out.append(CrashLoop(starts=starts))
            if event.get("event") == "interval":
                numbers = {k: float(v) for k, v in event.items() if isinstance(v, (int, float))}
                interval_s, was_s = numbers.pop("interval_s"), numbers.pop("was_s", None)
                out.append(IntervalChanged(interval_s=interval_s, was_s=was_s, inputs=numbers))
        return out

    def __str__(self) -> str:
        return "auto"


def parse_every(every: int | str | Cadence, *, nodes: int = 1) -> Cadence:
    """The cadence of 500, "500", "500 steps", "10m", "1h30m" or "auto"; a cadence is itself.

    A bare number is steps, as text too: a command line hands over text.
    """
    if isinstance(every, Cadence):
        return every
    if isinstance(every, int) and not isinstance(every, bool):
        return EverySteps(every)
    if isinstance(every, str):
        if every == "auto":
            return Auto(nodes)
        if steps := _STEPS.fullmatch(every):
            return EverySteps(int(steps[1]))
        try:
            return EverySeconds(parse_duration(every))
        except BadUnit:
            pass
    raise Refused(f"every={every!r} is no cadence", hint='every=500, "500 steps", "10m" or "auto"')
