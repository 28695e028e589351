"""Faults on processes: signals to workers, to the launcher, to the whole job."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drills.errors import HarnessBroken
from drills.faults import Base, Evidence, Site
from drills.processes import kill_owned, open_owned, owned, proc_of
from drills.timeline import Proc


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(Base):
    """SIGKILL to the worker of the drawn rank, as the OOM killer would do; ``which`` "all": to every worker."""

    name: str = "kill"
    which: str = "one"
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        """Refuse words that mean nothing, with ``ValueError``."""
        one_or_all(self.which)

    def inject(self, site: Site) -> Evidence:
        """Kill, and wait until they are gone."""
        victims = chosen(site, self.which, "kill")
        fds = {p.pid: open_owned(p, site.owner) for p in victims}
        try:
            sent = time.time()
            for fd in fds.values():
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            ends = [(p, *_end(fds[p.pid], p, self.timeout_s)) for p in victims]
        finally:
            for fd in fds.values():
                os.close(fd)
        gone = max(t for _, t, _ in ends)
        for p, _, status in ends:
            if status is not None and status != signal.SIGKILL:
                raise HarnessBroken(f"rank {p.rank} (pid {p.pid}) ended by itself before the signal arrived",
                                    facts=[("wait status", str(status))])  # fmt: skip
        reaped = all(status is None for _, _, status in ends)
        how = "gone (its parent had taken the exit status)" if reaped else "ended by signal 9"
        who = who_is(victims)
        where = f" while {site.held.what} was held" if site.held else ""
        return {
            "t": sent, "gone_t": gone, "rank": victims[0].rank, "pid": victims[0].pid, "signal": "SIGKILL",
            "pids": [p.pid for p in victims], "exit": how,
            "said": f"SIGKILL to {who}{where}, {how} after {(gone - sent) * 1000:.1f} ms",
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KillJob(Base):
    """SIGKILL to everything the command has started, as a lost machine; the drill then starts the command again.

    ``world`` changes ``{nproc}`` of the new start by so many ranks.
    """

    name: str = "kill-job"
    timeout_s: float = 15.0
    then: str = "start again"
    world: int = 0

    def inject(self, site: Site) -> Evidence:
        """Kill until nothing with the run's mark is left."""
        return end_job(site)


@dataclass(frozen=True, slots=True, kw_only=True)
class KillAgent(Base):
    """SIGKILL to the launcher alone: its workers live on as orphans while the drill starts the command again."""

    name: str = "kill-agent"
    timeout_s: float = 10.0
    then: str = "start again"
    beside = True

    def inject(self, site: Site) -> Evidence:
        """Kill the process of the command."""
        if site.root is None or any(p.pid == site.root.pid for p in site.workers.values()):
            raise HarnessBroken("the command has no launcher of its own: it is itself a rank")
        fd = open_owned(site.root, site.owner)
        try:
            sent = time.time()
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            gone, _ = _end(fd, site.root, self.timeout_s)
        finally:
            os.close(fd)
        orphans = sorted(p.pid for p in site.workers.values())
        return {
            "t": sent, "gone_t": gone, "rank": -1, "pid": site.root.pid, "pids": [site.root.pid], "stale": orphans,
            "said": f"SIGKILL to the launcher (pid {site.root.pid}), its workers left to themselves; "
            "the command was then started again beside them",
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate(Base):
    """SIGTERM to the command, and SIGKILL to what is left after ``notice_s``: a machine taken away on short notice."""

    name: str = "terminate"
    notice_s: float = 20.0
    timeout_s: float = 60.0
    then: str = "start again"

    def inject(self, site: Site) -> Evidence:
        """Signal, wait as long as the notice says, kill what is left."""
        if site.root is None:
            raise HarnessBroken("the command has ended before it could be asked to stop")
        pids = [p.pid for p in site.workers.values()]
        fd = open_owned(site.root, site.owner)
        try:
            sent = time.time()
            signal.pidfd_send_signal(fd, signal.SIGTERM)
            end = time.monotonic() + self.notice_s
            while owned(site.owner) and time.monotonic() < end:
                time.sleep(0.05)
        finally:
            os.close(fd)
        left = len(owned(site.owner))
        took = time.time() - sent
        kill_owned(site.owner)
        status = _exit_status(site.root.pid)
        how = f"everything had ended {took:.1f} s later" if not left else f"{left} processes were left and killed"
        return {
            "t": sent, "gone_t": time.time(), "rank": -1, "pid": site.root.pid, "pids": pids, "signal": "SIGTERM",
            "left": left, "exit": status,
            "said": f"SIGTERM to the command with {self.notice_s:g} s of notice: {how}; then it was started again",
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze(Base):
    """SIGSTOP to a worker, or to all; SIGCONT heals."""

    name: str = "freeze"
    which: str = "one"
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        """Refuse words that mean nothing, with ``ValueError``."""
        one_or_all(self.which)

    def inject(self, site: Site) -> Evidence:
        """Stop, and wait until the process table shows them stopped."""
        victims = chosen(site, self.which, "freeze")
        sent = time.time()
        for p in victims:
            send(p, site.owner, signal.SIGSTOP)
        await_state(victims, "T", self.timeout_s)
        return {"t": sent, "rank": victims[0].rank, "pid": victims[0].pid, "frozen": [p.pid for p in victims],
                "said": f"SIGSTOP to {who_is(victims)}"}  # fmt: skip

    def heal(self, site: Site) -> str:
        """Let everything of the run that is stopped go on."""
        return thaw(site.owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stale(Base):
    """SIGSTOP to the whole job while another start of it takes over; healed, the old one finds itself overtaken."""

    name: str = "stale"
    timeout_s: float = 15.0
    then: str = "start again"
    beside = True

    def inject(self, site: Site) -> Evidence:
        """Stop every process of the run."""
        sent = time.time()
        procs = [proc_of(p.pid) for p in owned(site.owner)]
        for p in procs:
            send(p, site.owner, signal.SIGSTOP)
        await_state(procs, "T", self.timeout_s)
        where = f" as {site.held.what} was held" if site.held else ""
        return {
            "t": sent, "gone_t": time.time(), "rank": -1, "pid": procs[0].pid if procs else 0,
            "pids": [p.pid for p in procs], "stale": [p.pid for p in procs],
            "said": f"SIGSTOP to all {len(procs)} processes of the job{where}; the command was started again beside it",
        }  # fmt: skip

    def heal(self, site: Site) -> str:
        """Let the old job go on."""
        return thaw(site.owner)


def one_or_all(which: str) -> None:
    """``ValueError`` for anything but the two."""
    if which not in ("one", "all"):
        raise ValueError(f"which = {which!r}: one or all")


def chosen(site: Site, which: str, verb: str) -> list[Proc]:
    """The victims, ordered by rank."""
    if which == "all" and site.workers:
        return [p for _, p in sorted(site.workers.items())]
    victim = site.workers.get(site.rank)
    if victim is None:
        seen = ", ".join(map(str, sorted(site.workers))) or "none"
        raise HarnessBroken(f"no process of rank {site.rank} was found to {verb}", facts=[("ranks seen", seen)])
    return [victim]


def who_is(procs: Sequence[Proc]) -> str:
    """``rank 0 (pid 4711)``, or ``all 4 ranks``."""
    return f"rank {procs[0].rank} (pid {procs[0].pid})" if len(procs) == 1 else f"all {len(procs)} ranks"


def send(p: Proc, owner: str, number: signal.Signals) -> None:
    """A signal to a process that the drill has started, and to no other."""
    fd = open_owned(p, owner)
    try:
        signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)


def await_state(procs: Sequence[Proc], letter: str, timeout_s: float) -> None:
    """Wait until the process table shows all of them in the state (``T``: stopped)."""
    end = time.monotonic() + timeout_s
    for p in procs:
        while (state := _stat(p.pid)[:1]) != [letter]:
            if not state or time.monotonic() > end:
                raise HarnessBroken(f"pid {p.pid} is not in state {letter} {timeout_s:g} s after the signal")
            time.sleep(0.005)


def thaw(owner: str) -> str:
    """SIGCONT to every stopped process of the run, and what that was."""
    woken = []
    for p in owned(owner):
        if _stat(p.pid)[:1] == ["T"]:
            send(proc_of(p.pid), owner, signal.SIGCONT)
            woken.append(p.pid)
    return f"SIGCONT to {', '.join(map(str, woken))}" if woken else "nothing to undo"


def end_job(site: Site) -> Evidence:
    """SIGKILL to everything of the run, with evidence."""
    pids = [p.pid for p in owned(site.owner)]
    if not pids:
        raise HarnessBroken("nothing of the run was there to kill")
    sent = time.time()
    kill_owned(site.owner)
    if left := owned(site.owner):
        raise HarnessBroken(f"{len(left)} processes are still there after SIGKILL")
    gone = time.time()
    where = f" while {site.held.what} was held" if site.held else ""
    return {
        "t": sent, "gone_t": gone, "rank": -1, "pid": site.root.pid if site.root else pids[0], "pids": pids,
        "said": f"SIGKILL to all {len(pids)} processes of the job{where}; then the command was started again",
    }  # fmt: skip


def _end(fd: int, p: Proc, timeout_s: float) -> tuple[float, int | None]:
    """When the process ended, and its wait status while it is a zombie."""
    gone = _wait_gone(fd, timeout_s)
    if gone is None:
        raise HarnessBroken(f"rank {p.rank} (pid {p.pid}) is still there {timeout_s:g} s after SIGKILL")
    return gone, _exit_status(p.pid)


def _wait_gone(fd: int, timeout_s: float) -> float | None:
    """When the process ended (it may stay a zombie until its parent looks), or None."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return time.time() if poll.poll(timeout_s * 1000) else None


def _exit_status(pid: int) -> int | None:
    """The wait status of a zombie, from the last field of its stat line; None once it has been reaped."""
    fields = _stat(pid)
    return int(fields[49]) if fields[:1] == ["Z"] else None


def _stat(pid: int) -> list[str]:
    """The fields of the stat line after the name; empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
