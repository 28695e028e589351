"""Two settings of a process that only Linux has, and that keep a dead launcher from leaving processes behind."""

from __future__ import annotations

import ctypes
import os

_PDEATHSIG, _CHILD_SUBREAPER = 1, 36


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


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
