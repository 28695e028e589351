"""Settings of a process that only Linux has; two keep a dead launcher from leaving processes behind."""

from __future__ import annotations

import ctypes
import os

_PDEATHSIG, _SET_NAME, _CHILD_SUBREAPER = 1, 15, 36


def signal_when_parent_ends(number: int, parent: int) -> None:
    """Let the kernel send ``number`` to this process when ``parent`` ends; ends at once if it has ended already.

    Kept over ``exec``, not handed on to children. The kernel means the *thread* that forked this process.
    """
    _prctl(_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends, in place of process 1."""
    _prctl(_CHILD_SUBREAPER, 1)


def call_itself(name: str) -> None:
    """What ``ps -o comm`` and ``top`` show of this process: 15 bytes."""
    _prctl(_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def _prctl(option: int, value: int | ctypes.c_char_p) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value) if isinstance(value, int) else value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
