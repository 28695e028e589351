"""Faults that take something away from a worker for a while: processor time, memory."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import psutil

from drills.errors import HarnessBroken
from drills.faults import Base, Evidence, Site
from drills.faults.process import chosen, one_or_all, send, thaw, who_is
from drills.processes import open_owned
from drills.timeline import Proc

_SLICE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle(Base):
    """A worker gets only ``share`` of its time: it is stopped for the rest of every slice of 50 ms.

    What a busy neighbour, a power limit or a hot device does to one rank, without privileges and without a load that
    others would feel.
    """

    name: str = "throttle"
    which: str = "one"
    share: float = 0.2
    timeout_s: float = 10.0
    _ended: ClassVar[dict[str, tuple[threading.Event, threading.Thread]]] = {}

    def __post_init__(self) -> None:
        """Refuse what means nothing, with ``ValueError``."""
        one_or_all(self.which)
        if not 0 < self.share < 1:
            raise ValueError(f"share = {self.share:g}: between 0 and 1")

    def inject(self, site: Site) -> Evidence:
        """Begin; the proof that it works is read from the process table when it ends."""
        victims = chosen(site, self.which, "hold back")
        stop = threading.Event()

        def hold_back() -> None:
            with contextlib.suppress(HarnessBroken, OSError):
                while not stop.is_set():
                    for p in victims:
                        send(p, site.owner, signal.SIGSTOP)
                    stop.wait(_SLICE_S * (1 - self.share))
                    for p in victims:
                        send(p, site.owner, signal.SIGCONT)
                    stop.wait(_SLICE_S * self.share)

        thread = threading.Thread(target=hold_back, name="throttle", daemon=True)
        self._ended[site.owner] = (stop, thread)
        thread.start()
        return {"t": time.time(), "rank": victims[0].rank, "pid": victims[0].pid, "share": self.share,
                "said": f"{who_is(victims)} held back to {self.share:.0%} of its time"}  # fmt: skip

    def heal(self, site: Site) -> str:
        """Stop holding back, and make sure that nothing stays stopped."""
        running = self._ended.pop(site.owner, None)
        if running:
            running[0].set()
            running[1].join(self.timeout_s)
        said = thaw(site.owner)
        return "let go, nothing is stopped" if running else said


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySqueeze(Base):
    """A worker may take no more than ``margin_mib`` of memory on top of what it has (RLIMIT_AS); new ones are free.

    The worker may live through it or die of it; both are right as long as nothing is lost or wrong.
    """

    name: str = "memory-squeeze"
    margin_mib: int = 32
    timeout_s: float = 10.0

    def inject(self, site: Site) -> Evidence:
        """Set the soft limit of the worker, and read it back."""
        victim = chosen(site, "one", "squeeze")[0]
        with _pinned(victim, site.owner):
            try:
                p = psutil.Process(victim.pid)
                limit = p.memory_info().vms + (self.margin_mib << 20)
                hard = resource.prlimit(victim.pid, resource.RLIMIT_AS)[1]
                resource.prlimit(victim.pid, resource.RLIMIT_AS, (limit, hard))
                if resource.prlimit(victim.pid, resource.RLIMIT_AS)[0] != limit:
                    raise HarnessBroken(f"the memory limit of pid {victim.pid} was not taken")
            except (OSError, psutil.Error) as e:
                raise HarnessBroken(
                    f"the memory of rank {victim.rank} (pid {victim.pid}) was not limited: {e}"
                ) from None
        return {"t": time.time(), "rank": victim.rank, "pid": victim.pid, "limit_bytes": limit, "born": victim.born,
                "said": f"{who_is([victim])} may take no more than the {limit / 2**20:.0f} MiB of address space it has"
                }  # fmt: skip

    def heal(self, site: Site) -> str:
        """Take the limit off the workers that carry one."""
        lifted = []
        for p in site.workers.values():
            with contextlib.suppress(OSError, HarnessBroken), _pinned(p, site.owner):
                soft, hard = resource.prlimit(p.pid, resource.RLIMIT_AS)
                if soft != hard:
                    resource.prlimit(p.pid, resource.RLIMIT_AS, (hard, hard))
                    lifted.append(p.pid)
        return (
            f"limit lifted from {', '.join(map(str, lifted))}" if lifted else "nothing to undo: its process has ended"
        )


@contextlib.contextmanager
def _pinned(p: Proc, owner: str) -> Iterator[None]:
    """Nobody else can get the number of the process while the block runs."""
    fd = open_owned(p, owner)
    try:
        yield
    finally:
        os.close(fd)
