"""When this process came how far on its way into a run: its birth, its wish for a process group, the group itself."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

_asked_s: float | None = None
_joined_s: float | None = None


def asked() -> None:
    """The process asks for its process group: whatever it had to import for that is imported."""
    global _asked_s, _joined_s
    _asked_s, _joined_s = time.time(), None


def joined() -> None:
    """All ranks have met."""
    global _joined_s  # noqa: PLW0603 - a process starts once
    _joined_s = time.time()


def phases(entered_s: float) -> dict[str, float]:
    """Seconds from this process's birth until it entered the run: "start" in all; of it "import", until it asked for
    its process group, and "join", until all ranks had met, where it joined one."""
    born_s = _born_s()
    start = {"start": entered_s - born_s}
    if _asked_s is None or _joined_s is None:
        return start
    return start | {"import": max(0.0, _asked_s - born_s), "join": _joined_s - _asked_s}


def _born_s() -> float:
    """When this process began, in seconds since 1970: to a clock tick, where psutil is right to a second only."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        if age_s >= 0:
            return time.time() - age_s
    return float(psutil.Process().create_time())
