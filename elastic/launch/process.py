"""A process seen from outside: its state, what it has used, where it is."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic.launch.worker import DUMP_SIGNAL

_TICKS = os.sysconf("SC_CLK_TCK")
_DUMP_S = 0.5


def look(pid: int) -> tuple[str, float]:
    """The letter of its state, and the CPU seconds that it has used; ``OSError`` when it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return fields[0].decode(), (int(fields[11]) + int(fields[12])) / _TICKS


def listens(pid: int) -> bool:
    """Whether it handles the signal that makes it write its stacks; the signal would end it otherwise."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(caught, 16) >> (DUMP_SIGNAL - 1) & 1)
    return False


def dump_stacks(pids: Mapping[int, int], files: Mapping[int, int], first: Sequence[int]) -> dict[int, str]:
    """The stacks of all threads of each process, those in ``first`` leading; bounded by half a second.

    A stopped process is continued for it. Of one that does not answer, what the kernel knows is told.
    """
    order = [*first, *(local for local in pids if local not in first)]
    kernel = {local: kernel_words(pids[local]) for local in order}
    asked = [local for local in order if listens(pids[local])]
    for local in asked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[local], DUMP_SIGNAL)
            if kernel[local].startswith("state T"):
                os.kill(pids[local], signal.SIGCONT)
    sizes: dict[int, int] = {}
    end = time.monotonic() + _DUMP_S
    while time.monotonic() < end:
        time.sleep(0.02)
        now = {local: os.fstat(files[local]).st_size for local in asked}
        if now == sizes and all(now.values()):
            break
        sizes = now
    texts = {local: os.pread(files[local], 1 << 20, 0).decode(errors="replace").rstrip() for local in order}
    return {local: f"kernel: {kernel[local]}\n{texts[local] or 'it wrote no stack'}" for local in order}


def kernel_words(pid: int) -> str:
    """State, and the kernel function that it waits in, as far as this user may know."""
    try:
        state, _ = look(pid)
    except OSError:
        return "gone"
    where = ""
    with contextlib.suppress(OSError):
        where = Path(f"/proc/{pid}/wchan").read_text().strip("\0\n 0")
    return f"state {state}" + (f", waits in {where}" if where else "")
