"""The process table, seen from outside: which process is which rank, which ones a drill has started.

Every process of a run carries a mark in its environment (``OWNER_VARIABLE``), inherited from the command that the
drill started. Nothing without the mark is ever signalled.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil

from drills.errors import HarnessBroken
from drills.timeline import Proc

OWNER_VARIABLE = "TORCHRELAY_DRILL"

# A child shows its parent's environment until it has called exec; look again at young processes without a rank.
_YOUNG_S = 3.0


def open_owned(proc: Proc, owner: str) -> int:
    """A pidfd of ``proc``, sure to be the process that the drill started; the caller closes it.

    The descriptor pins the process first, then start time and mark are compared, so that a number that the kernel
    has given to another process in the meantime can never be hit.
    """
    try:
        fd = os.pidfd_open(proc.pid)
    except OSError as e:
        raise HarnessBroken(f"rank {proc.rank} (pid {proc.pid}) was gone before the fault: {e.strerror}") from None
    try:
        mark = psutil.Process(proc.pid).environ().get(OWNER_VARIABLE)
        if birth(proc.pid) != proc.born or mark != owner:
            raise HarnessBroken(f"pid {proc.pid} is not the process that this drill started; left alone")
    except (psutil.Error, OSError) as e:
        os.close(fd)
        raise HarnessBroken(f"rank {proc.rank} (pid {proc.pid}) was gone before the fault: {e}") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def birth(pid: int) -> int:
    """Start of a process in clock ticks since boot, which no other process with this pid shares.

    psutil's ``create_time`` adds the boot time that the kernel rounds to whole seconds, too coarse for phases.
    """
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def proc_of(pid: int, rank: int = -1) -> Proc:
    """The process of that number as it is now. Raises ``OSError`` when there is none."""
    born = birth(pid)
    return Proc(pid=pid, rank=rank, born=born, started=wall_time(born))


def wall_time(born: int) -> float:
    """Seconds since 1970 of a start given in ticks since boot; good to one tick (10 ms)."""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - born / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def owned(owner: str) -> list[psutil.Process]:
    """Every live process that carries the mark, wherever it hangs in the tree; zombies do not count."""
    return [p for p, mark in _marked() if mark == owner]


def owned_by(drill: str) -> list[psutil.Process]:
    """Every live process of any run of a drill; a mark is ``drill:run``."""
    return [p for p, mark in _marked() if mark.partition(":")[0] == drill]


def _marked() -> Iterator[tuple[psutil.Process, str]]:
    for p in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mark = p.environ().get(OWNER_VARIABLE)
            if mark and p.status() != psutil.STATUS_ZOMBIE:
                yield p, mark


def kill_owned(owner: str) -> None:
    """SIGKILL to every process that carries the mark, until none is left (a few rounds, for late children)."""
    _kill_all(lambda: owned(owner))


def kill_marked(drill: str) -> None:
    """SIGKILL to every process of any run of the drill."""
    _kill_all(lambda: owned_by(drill))


def _kill_all(find: Callable[[], list[psutil.Process]]) -> None:
    for _ in range(5):
        victims = find()
        for p in victims:
            with contextlib.suppress(HarnessBroken, OSError, psutil.Error):
                fd = open_owned(proc_of(p.pid), p.environ()[OWNER_VARIABLE])
                try:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                finally:
                    os.close(fd)
        if not victims:
            return
        end = time.monotonic() + 2
        while time.monotonic() < end and any(_lives(p) for p in victims):  # psutil's wait would take exit statuses
            time.sleep(0.01)


def _lives(p: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(p.is_running() and p.status() != psutil.STATUS_ZOMBIE)
    return False


class Table:
    """The workers of one run: found by ``RANK`` in the environment of descendants, watched through pidfds.

    Only the topmost process with a rank counts, so that loader workers and helpers of a rank are not taken for it.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._known: dict[tuple[int, int], bool] = {}
        self._below: set[int] = set()
        self._watched: dict[int, tuple[int, Proc]] = {}
        self._poll = select.poll()

    @property
    def workers(self) -> dict[int, Proc]:
        """Live workers by rank; of two with the same rank, the younger."""
        return {p.rank: p for _, p in sorted(self._watched.values(), key=lambda fp: fp[1].started)}

    def scan(self, root: int) -> list[Proc]:
        """Look at the descendants of ``root``; returns workers not seen before."""
        new = []
        with contextlib.suppress(psutil.Error):
            for p in psutil.Process(root).children(recursive=True):
                with contextlib.suppress(psutil.Error, OSError):
                    if worker := self._look(p):
                        new.append(worker)
        return new

    def adopt(self, rank: int, pid: int) -> Proc | None:
        """Take ``pid`` for ``rank`` because the target's log says so: for commands that set no ``RANK``."""
        with contextlib.suppress(psutil.Error, OSError):
            p = psutil.Process(pid)
            if self._known.get((pid, birth(pid))):
                return None
            if pid not in self._below and p.environ().get(OWNER_VARIABLE) == self._owner:
                return self._watch(p, rank)
        return None

    def ended(self, wait_s: float) -> list[Proc]:
        """Workers that have ended, with the time; waits up to ``wait_s`` for one."""
        gone = []
        for fd, _ in self._poll.poll(wait_s * 1000):
            self._poll.unregister(fd)
            os.close(fd)
            _, p = self._watched.pop(fd)
            gone.append(replace(p, ended=time.time()))
        return gone

    def close(self) -> None:
        """Let go of every process."""
        for fd in self._watched:
            os.close(fd)
        self._watched.clear()
        self._poll = select.poll()

    def _look(self, p: psutil.Process) -> Proc | None:
        key = (p.pid, birth(p.pid))
        if key in self._known:
            return None
        env = p.environ()
        if env.get(OWNER_VARIABLE) != self._owner:
            return None
        rank = env.get("RANK", "")
        if not rank.isdecimal():
            if time.time() - wall_time(key[1]) > _YOUNG_S:
                self._known[key] = False
            return None
        if p.ppid() in self._below or p.ppid() in {w.pid for _, w in self._watched.values()}:
            self._known[key] = False
            self._below.add(p.pid)
            return None
        return self._watch(p, int(rank))

    def _watch(self, p: psutil.Process, rank: int) -> Proc | None:
        born = birth(p.pid)
        proc = Proc(pid=p.pid, rank=rank, born=born, started=wall_time(born))
        try:
            fd = open_owned(proc, self._owner)
        except HarnessBroken:  # gone in the meantime
            return None
        self._known[p.pid, born] = True
        self._watched[fd] = (fd, proc)
        self._poll.register(fd, select.POLLIN)
        return proc


def describe(processes: Iterable[psutil.Process]) -> list[str]:
    """``pid name: command line`` of each, for a report."""
    said = []
    for p in processes:
        with contextlib.suppress(psutil.Error):
            said.append(f"{p.pid} {p.name()}: {' '.join(p.cmdline())[:120]}")
    return said
