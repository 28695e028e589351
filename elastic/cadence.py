"""When the next save is due: every so many steps, every so many seconds, or as often as it pays ("auto")."""

from __future__ import annotations

import re
import time

from ckpt.errors import Refused
from elastic.economics.pacer import Pacer
from elastic.ledger.events import IntervalChanged
from elastic.units import BadUnit, parse_duration

_STEPS = re.compile(r"\s*(\d+)\s*steps?\s*")


class Cadence:
    """A rule for saves. ``at`` is known on every rank alone; ``due`` reads a clock, so rank 0 alone asks it."""

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

    def changes(self) -> list[IntervalChanged]:
        """Intervals decided on since the last call."""
        return []


class EverySteps(Cadence):
    """At each multiple of ``n`` completed steps."""

    def __init__(self, n: int) -> None:
        if n < 1:
            raise Refused(f"every={n}: give at least 1 step")
        self.n = n

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
    """The interval that loses least, worked out from the cost of saves as measured and the rate of failures."""

    def __init__(self, nodes: int) -> None:
        self._pacer = Pacer(nodes=nodes)

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

    def changes(self) -> list[IntervalChanged]:
        """The pacer's decisions."""
        out = []
        for event in self._pacer.pop_events():
            if event.get("event") == "interval":
                numbers = {k: float(v) for k, v in event.items() if isinstance(v, (int, float))}
                interval_s, was_s = numbers.pop("interval_s"), numbers.pop("was_s", None)
                out.append(IntervalChanged(interval_s=interval_s, was_s=was_s, inputs=numbers))
        return out

    def __str__(self) -> str:
        return "auto"


def parse_every(every: int | str, *, nodes: int = 1) -> Cadence:
    """The cadence of 500, "500 steps", "10m", "1h30m" or "auto". A bare int is steps."""
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
