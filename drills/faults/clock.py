"""A clock that is wrong: only in the target's own processes, never the machine's."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from pathlib import Path

from drills.errors import HarnessBroken
from drills.faults import Base, Evidence, Site
from drills.faults.planting import planted


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockJump(Base):
    """``time.time`` of every Python process of the run jumps by ``offset_s``; below zero, into the past.

    Clocks that C and C++ code read for themselves are not touched, nor is the monotonic one, which no correction of
    a real clock moves either.
    """

    name: str = "clock-jump"
    offset_s: float = -3600.0
    timeout_s: float = 10.0

    def setup(self, site: Site) -> dict[str, str]:
        """Put the wrong clock, still right, on the path of the drilled run."""
        self._file(site).write_bytes(struct.pack("<dq", 0.0, 0))
        return planted(TORCHRELAY_CLOCK=str(self._file(site)))

    def inject(self, site: Site) -> Evidence:
        """Jump, and see that a process of the run has asked for the time since."""
        before = self._asked(site)
        self._set(site, self.offset_s)
        t = time.time()
        end = time.monotonic() + self.timeout_s
        while self._asked(site) == before:
            if time.monotonic() > end:
                raise HarnessBroken("no process of the run has asked for the time since its clock was moved")
            time.sleep(0.01)
        return {"t": t, "rank": -1, "offset_s": self.offset_s,
                "said": f"the clock of the target's processes jumped by {self.offset_s:+g} s"}  # fmt: skip

    def heal(self, site: Site) -> str:
        """Put the clock right."""
        if not self._file(site).exists():
            return "nothing to undo"
        self._set(site, 0.0)
        return "the clock is right again"

    def _set(self, site: Site, offset_s: float) -> None:
        with self._file(site).open("r+b") as f:
            f.write(struct.pack("<d", offset_s))

    def _asked(self, site: Site) -> int:
        asked: int = struct.unpack("<dq", self._file(site).read_bytes())[1]
        return asked

    @staticmethod
    def _file(site: Site) -> Path:
        return site.folder / "clock"
