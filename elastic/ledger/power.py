"""Energy of the machine, read from its own counters; where there is none, nothing is said about energy."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Protocol


class EnergyCounter(Protocol):
    """Something that counts joules."""

    def joules(self) -> float:
        """Joules since some moment; never falls. ``OSError`` where it cannot be read any more."""
        ...


class Rapl:
    """The processor packages of this host, by Linux's powercap interface (``energy_uj`` of ``intel-rapl:N``).

    Root alone may read them by default: ``chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj`` lets others, too.
    """

    def __init__(self, home: Path = Path("/sys/class/powercap")) -> None:
        self._zones = sorted(p for p in home.glob("intel-rapl:*") if p.name.count(":") == 1)
        self._range = [int((p / "max_energy_range_uj").read_text()) for p in self._zones]
        self._last = [self._read(p) for p in self._zones]
        self._total_uj = 0
        if not self._zones:
            raise OSError(f"no processor counts its energy below {home}")

    @staticmethod
    def _read(zone: Path) -> int:
        return int((zone / "energy_uj").read_text())

    def joules(self) -> float:
        """Joules since this object was made; the counters' own overflow is undone (read at least once an hour)."""
        now = [self._read(p) for p in self._zones]
        for was, is_, largest in zip(self._last, now, self._range, strict=True):
            self._total_uj += is_ - was if is_ >= was else is_ + largest - was
        self._last = now
        return self._total_uj / 1e6


def of_this_host() -> EnergyCounter | None:
    """The counter of this host, None where there is none that this process may read."""
    with contextlib.suppress(OSError, ValueError):
        return Rapl()
    return None


class Meter:
    """Joules since the last reading; what a counter cannot tell is None."""

    def __init__(self, counter: EnergyCounter | None) -> None:
        self._counter = counter
        self._last = self._now()

    def _now(self) -> float | None:
        with contextlib.suppress(OSError, ValueError):
            return self._counter.joules() if self._counter else None
        return None

    def take(self) -> float | None:
        """Joules since the last call."""
        now, was = self._now(), self._last
        self._last = now
        return None if now is None or was is None else now - was
