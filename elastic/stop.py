"""Being asked to stop: SIGTERM (torchrun, Kubernetes, Slurm), SIGUSR1 (``sbatch --signal``), Ctrl-C become a flag."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_AGAIN_S = 1.0  # a terminal and a launcher may both pass on one Ctrl-C; a person who means it waits longer
STOPPED = 75
"""Exit status of a process that stopped on request, its state saved: EX_TEMPFAIL, "start me again"."""


class StopSignals:
    """Notes the first of ``SIGNALS`` instead of dying of it, inside a ``with`` block.

    A second Ctrl-C, a second or more after the first, is a ``KeyboardInterrupt`` as ever. Signals belong to the main
    thread: elsewhere, nothing is installed and nothing is noted. What was
    installed before is back when the block ends.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        """The first signal that came, such as "SIGTERM", or who else asked; None while nobody has."""
        self.unix_s = 0.0
        """When it came."""
        self.within_s: float | None = None
        """How many seconds were left then, where that is known."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            heard = [
                s for s in SIGNALS if signal.getsignal(s) != signal.SIG_IGN
            ]  # ignored: in the background of a shell
            self._before = {s: signal.signal(s, self._note) for s in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: installed from C, which python cannot put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def ignore(self) -> None:
        """From now on, let ``SIGNALS`` pass: the process is on its way out, and its exit status has been decided."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        self._before = {}

    def note(self, source: str, within_s: float | None = None) -> None:
        """Somebody else asks to stop; the first who asks counts."""
        if self.name is None:
            self.name, self.unix_s, self.within_s = source, time.time(), within_s

    def _note(self, number: int, frame: FrameType | None) -> None:
        # no logging here: the handler may have interrupted a write to the same stream
        if number == signal.SIGINT and self.name is not None and time.time() - self.unix_s > _AGAIN_S:
            raise KeyboardInterrupt
        self.note(signal.Signals(number).name)
