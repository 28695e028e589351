"""Being asked to stop: signals (torchrun, Kubernetes, Slurm, Ctrl-C) and notices become one flag."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from ckpt.errors import Refused
from elastic.notices import Notice

_log = logging.getLogger("elastic")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_AGAIN_S = 1.0  # a terminal and a launcher may both pass on one Ctrl-C; a person who means it waits longer
_LOOK_S = 0.25  # how often notices are asked
_active: list[StopRequests] = []
_here = threading.local()
T = TypeVar("T")
STOPPED = 75
"""Exit status of a process that stopped on request, its state saved: EX_TEMPFAIL, "start me again"."""


class StopRequests:
    """Notes the first of ``SIGNALS``, instead of dying of it, or of ``notices`` that asks; inside a ``with`` block.

    What ``told`` returns (a weak reference) is called once, as soon as somebody has asked, on a thread of this object:
    also while the main thread is in a long operation that lets no signal handler of python run. A second Ctrl-C, a
    second or more after the first, is a ``KeyboardInterrupt`` as ever. Signals belong to the main thread: entered
    elsewhere, none is noted. What was installed before is back when the block ends. ``grace_s``: how long after a
    signal the process will be killed.
    """

    def __init__(
        self,
        notices: Sequence[Notice] = (),
        told: Callable[[], Callable[[], None] | None] = lambda: None,
        grace_s: float | None = None,
    ) -> None:
        self.name: str | None = None
        """The first signal that came, such as "SIGTERM", or who else asked; None while nobody has."""
        self.unix_s = 0.0
        """When it came."""
        self.within_s: float | None = None
        """How many seconds were left then, where that is known."""
        self.number: int | None = None
        """Which signal it was; None for a notice."""
        self._notices, self._told, self._grace_s = tuple(notices), told, grace_s
        self._before: dict[signal.Signals, Any] = {}
        self._over = False
        self._opened: list[Notice] = []
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Before anything else: begin to ask the notices. One that asks already is refused.

        Where an agent has started this process again, the stop that ended it before still holds: then the process ends
        with ``STOPPED`` at once.
        """
        try:
            for notice in self._notices:
                notice.open()
                self._opened.append(notice)
        except BaseException as error:
            self.close()
            if isinstance(error, Refused) and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
                _log.warning("not started again, for the stop that was asked for still holds: %s", error.message)
                raise SystemExit(STOPPED) from None
            raise

    def close(self) -> None:
        """Ask the notices no more."""
        while self._opened:
            self._opened.pop().close()

    @property
    def again(self) -> str:
        """How to go on after the stop that was asked for."""
        return f"remove the {self.name} and start" if (self.name or "").startswith("file ") else "start"

    def __enter__(self) -> Self:
        self._over = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._awake = -1
        if threading.current_thread() is threading.main_thread():
            heard = [
                s for s in SIGNALS if signal.getsignal(s) != signal.SIG_IGN
            ]  # ignored: in the background of a shell
            self._before = {s: signal.signal(s, self._note) for s in heard}
            self._awake = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            if self._awake != -1:  # an event loop lives in this thread: it needs its own more than we do
                signal.set_wakeup_fd(self._awake)
        self._thread = threading.Thread(target=self._watch, name="stop-requests", daemon=True)
        self._thread.start()
        _active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()
        self._close()

    def hand_on(self) -> None:
        """A signal that came too late to be of use here goes to whoever handles it now, as if it had just come."""
        if self.number is not None and threading.current_thread() is threading.main_thread():
            signal.raise_signal(self.number)

    def leave_child(self) -> None:
        """In a forked process: it neither outlives a SIGTERM nor speaks for its parent."""
        self._put_back()
        if self._before and self._awake == -1:
            signal.set_wakeup_fd(-1)
        self._before = {}

    def ignore(self) -> None:
        """From now on, let ``SIGNALS`` pass: the process is on its way out, and its exit status has been decided."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        self._close()

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            # None: installed from C, which python cannot put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _close(self) -> None:
        self._before = {}
        thread, self._thread = self._thread, None
        if thread is None:
            return
        _active.remove(self)
        if threading.current_thread() is threading.main_thread() and self._awake == -1:
            other = signal.set_wakeup_fd(-1)
            if other != self._write:  # of an event loop that began meanwhile
                signal.set_wakeup_fd(other)
        self._over = True
        os.write(self._write, b"\0")
        thread.join(5.0)
        self.close()
        os.close(self._write)
        os.close(self._read)

    def _ask(self, source: str, within_s: float | None, number: int | None = None) -> None:
        """The first who asks counts."""
        if self.name is None:
            self.unix_s, self.within_s, self.number, self.name = time.time(), within_s, number, source

    def _note(self, number: int, frame: FrameType | None) -> None:
        # no logging here: the handler may have interrupted a write to the same stream
        if number == signal.SIGINT and self.name is not None and time.time() - self.unix_s > _AGAIN_S:
            raise KeyboardInterrupt
        self._ask(signal.Signals(number).name, self._grace_s, number)

    def _watch(self) -> None:
        known = {int(s) for s in SIGNALS}
        while self.name is None and not self._over:
            if select.select([self._read], [], [], _LOOK_S if self._opened or self._awake != -1 else None)[0]:
                for number in os.read(self._read, 64):
                    if number in known:
                        self._ask(signal.Signals(number).name, self._grace_s, number)
            for asked in filter(None, (notice.asked() for notice in self._opened)):
                self._ask(asked.source, asked.within_s)
        if self.name is not None and not self._over and (told := self._told()):
            told()


def iterate(source: Iterable[T]) -> Iterator[T]:
    """``iter(source)``, whose worker processes, if it forks any here, end when this process says so, and not before.

    A signal to the whole process group would end them, too, and a loader without its workers fails the step under way.
    """
    _here.workers = True
    try:
        return iter(source)
    finally:
        _here.workers = False


def _hold() -> None:
    if _active:  # what comes before the child has its own handlers back waits for them
        _here.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _release() -> None:
    if (mask := getattr(_here, "mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _here.mask = None


def _leave_child() -> None:
    for active in _active:
        active.leave_child()
    if _active and getattr(_here, "workers", False):
        threading.Thread(target=_obey, args=(os.getppid(),), name="obey-parent", daemon=True).start()
    else:
        _release()
    _active.clear()


def _obey(parent: int) -> None:
    """In a worker, where signals stay blocked: end of one that its parent has sent, or that finds it without one."""
    while True:
        came = signal.sigwaitinfo(SIGNALS)
        if came.si_pid == parent or os.getppid() != parent:
            os._exit(128 + came.si_signo)


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_leave_child)
