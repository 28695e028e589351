"""Faults on processes: a signal to one worker."""

from __future__ import annotations

import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from drills.errors import HarnessBroken
from drills.faults import Evidence, Site
from drills.processes import open_owned


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL to the worker of the drawn rank, as the kernel's OOM killer or a lost machine would do."""

    name: str = "kill"
    timeout_s: float = 10.0

    def setup(self, site: Site) -> dict[str, str]:
        """Nothing to prepare."""
        return {}

    def inject(self, site: Site) -> Evidence:
        """Kill the worker, and wait until it is gone."""
        victim = site.workers.get(site.rank)
        if victim is None:
            seen = ", ".join(map(str, sorted(site.workers))) or "none"
            raise HarnessBroken(f"no process of rank {site.rank} was found to kill", facts=[("ranks seen", seen)])
        fd = open_owned(victim, site.owner)
        try:
            sent = time.time()
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            gone = _wait_gone(fd, self.timeout_s)
            status = _exit_status(victim.pid)
        finally:
            os.close(fd)
        if gone is None:
            raise HarnessBroken(
                f"rank {site.rank} (pid {victim.pid}) is still there {self.timeout_s:g} s after SIGKILL"
            )
        if status is not None and status != signal.SIGKILL:
            raise HarnessBroken(f"rank {site.rank} (pid {victim.pid}) ended by itself before the signal arrived",
                                facts=[("wait status", str(status))])  # fmt: skip
        how = "ended by signal 9" if status is not None else "gone (its parent had taken the exit status)"
        return {
            "t": sent, "gone_t": gone, "rank": site.rank, "pid": victim.pid, "signal": "SIGKILL", "exit": how,
            "said": f"SIGKILL to rank {site.rank} (pid {victim.pid}), {how} after {(gone - sent) * 1000:.1f} ms",
        }  # fmt: skip

    def prove(self, site: Site) -> None:
        """Proven by ``inject``."""

    def heal(self, site: Site) -> str:
        """A killed process stays dead: there is nothing to undo."""
        return "nothing to undo"


def _wait_gone(fd: int, timeout_s: float) -> float | None:
    """When the process ended (it may stay a zombie until its parent looks), or None."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return time.time() if poll.poll(timeout_s * 1000) else None


def _exit_status(pid: int) -> int | None:
    """The wait status of a zombie, from the last field of its stat line; None once it has been reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[49]) if fields[0] == "Z" else None
