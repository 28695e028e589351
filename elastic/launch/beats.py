"""Heartbeats: what a rank is at, in shared memory that its launcher reads. A beat is one small copy, no system call.

Every worker has a line of 128 bytes. The training loop writes the first half (``beat``), a thread of the worker's own
the second: whether Python still runs there, how many collectives were entered, and whether the main thread is in
one. So a rank is told that is stopped, that holds the interpreter lock, that waits for others, and that does not, even
where a script has no loop of ours. Each half begins and ends with its count, so a half-written one is noticed.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

SLOT = 128
SAMPLE_S = 0.1
_LOOP = struct.Struct("@QqqqQ")  # count, step, phase, monotonic ns, count
_THREAD = struct.Struct("@QqqqqqQ")  # count, monotonic ns, collectives, whereabouts, file, line, count
_THREAD_AT = 64

PHASES = ("start", "step", "save", "evaluate", "leave")
"""What the training loop says it does. Only a "step" is expected to end as soon as others did."""

OWN_CODE, COLLECTIVE = 1, 2
_WAITING = ("torch.distributed", "elastic.agreement", "elastic.membership", "ckpt.engine")
_LIBRARIES = ("torch.", "elastic.", "ckpt.")
_LOOK_UP = 4  # a call of torch.distributed is the top few frames; below them it is a wrapper around training

_slot: _Slot | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What one rank is at. ``step`` -1: it has no loop of ours; ``thread_s`` 0: its thread has not begun."""

    step: int = -1
    phase: str = "start"
    loop_s: float = 0.0
    """Monotonic time of the loop's last beat."""
    thread_s: float = 0.0
    """Monotonic time of the thread's last beat: Python ran then."""
    collectives: int = 0
    """Collectives entered in the default process group."""
    waiting: bool = False
    """Whether the main thread was in a collective, or in an agreement with other ranks."""
    file: int = 0
    line: int = 0
    """Where the main thread is in the script's own code: a checksum of the file's name, and the line."""


def beat(step: int, phase: str = "step") -> None:
    """The training loop is at ``step`` completed steps, and goes on to ``phase``; a microsecond, nothing elsewhere."""
    if _slot is not None:
        _slot.loop(step, PHASES.index(phase))


def attach(fd: int, local_rank: int) -> None:
    """Begin to beat in the memory behind ``fd``; once a worker, before its script."""
    global _slot  # noqa: PLW0603 - a process beats once
    _slot = _Slot(mmap.mmap(fd, 0), local_rank * SLOT)
    threading.Thread(target=_slot.sample, args=(threading.get_ident(),), name="elastic-beat", daemon=True).start()


class Board:
    """The launcher's side: memory without a name, so that nothing is left of it when the launcher is killed."""

    def __init__(self, ranks: int) -> None:
        self.fd = os.memfd_create("elastic-beats")
        os.ftruncate(self.fd, ranks * SLOT)
        self._memory = mmap.mmap(self.fd, 0)
        self._last: dict[int, Beat] = {}

    def clear(self) -> None:
        """Nobody beats: call it while no worker runs."""
        self._memory[:] = bytes(len(self._memory))
        self._last = {}

    def read(self, local_rank: int) -> Beat:
        """The last whole beat of a rank."""
        at = local_rank * SLOT
        for _ in range(3):
            n, step, phase, loop_ns, m = _LOOP.unpack_from(self._memory, at)
            k, thread_ns, collectives, where, file, line, j = _THREAD.unpack_from(self._memory, at + _THREAD_AT)
            if n == m and k == j:
                self._last[local_rank] = Beat(
                    step=step if n else -1, phase=PHASES[phase], loop_s=loop_ns / 1e9, thread_s=thread_ns / 1e9,
                    collectives=collectives, waiting=where == COLLECTIVE, file=file, line=line,
                )  # fmt: skip
                break
        return self._last.get(local_rank, Beat())

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
        os.close(self.fd)


class _Slot:
    def __init__(self, memory: mmap.mmap, at: int) -> None:
        self._memory, self._at = memory, at
        self._loops = self._samples = 0
        self._pid = os.getpid()

    def loop(self, step: int, phase: int) -> None:
        self._loops += 1
        _LOOP.pack_into(self._memory, self._at, self._loops, step, phase, time.monotonic_ns(), self._loops)

    def sample(self, main: int) -> None:
        """The thread: a look at the main thread ten times a second."""
        count: Callable[[], int] | None = None
        while True:
            if count is None:
                count = _counter()
            where, file, line = _whereabouts(sys._current_frames().get(main))
            self._samples += 1
            _THREAD.pack_into(
                self._memory, self._at + _THREAD_AT, self._samples, time.monotonic_ns(),
                count() if count else 0, where, file, line, self._samples,
            )  # fmt: skip
            time.sleep(SAMPLE_S)


def _counter() -> Callable[[], int] | None:
    """How many collectives were entered, once there is a process group; never imports torch."""
    if "torch.distributed.distributed_c10d" not in sys.modules:
        return None
    from elastic.launch.torchelastic import collectives

    return collectives


def _whereabouts(frame: FrameType | None) -> tuple[int, int, int]:
    """Whether the frame is in a collective, and the file and line of the first code below it that is not a library."""
    where, looked = OWN_CODE, 0
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if looked < _LOOK_UP and name.startswith(_WAITING):
            where = COLLECTIVE
        if not name.startswith(_LIBRARIES):
            return where, zlib.crc32(frame.f_code.co_filename.encode()), frame.f_lineno
        frame, looked = frame.f_back, looked + 1
    return where, 0, 0
