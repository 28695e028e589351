"""The launcher's side of its workers on this host: started through the fork server, ended in bounded time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ckpt.errors import Refused
from elastic.launch import forkserver, prctl
from elastic.launch.process import look
from elastic.launch.task import Task

MARK = "TORCHRELAY_CREW"
"""In the environment of every worker, and of all that it starts."""
READY_S = 600.0
KILL_S = 5.0
"""How long a worker that was sent SIGKILL is waited for."""
_ANSWER_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A worker has ended; ``status`` is its exit code, or minus the signal that ended it."""

    local_rank: int
    pid: int
    status: int
    at_s: float
    """Monotonic time."""


class Crew:
    """The workers of one generation at a time. One thread uses it. ``close`` leaves no process behind.

    ``method`` is "forkserver" (workers are forked from a process that has imported ``preload``) or "spawn" (each is a
    new interpreter). ``inherit`` are descriptors that workers get under the same number.
    """

    def __init__(self, *, method: str, preload: Sequence[str], inherit: Sequence[int] = ()) -> None:
        self._method, self._preload, self._inherit = method, tuple(preload), tuple(inherit)
        self._pids: dict[int, int] = {}  # local rank -> pid, of those that live
        self._pidfds: dict[int, int] = {}
        self._ended: list[Ended] = []
        self._all: set[int] = set()  # every worker's pid so far, and of what it left behind
        self._id = uuid.uuid4().hex
        self._mark = f"{MARK}={self._id}".encode()
        self.hurry = False
        """Set to end a grace period at once, from a signal handler too."""
        self.lost = False
        """The fork server ended, and this generation with it."""
        prctl.adopt_orphans()
        self._open()

    @property
    def pids(self) -> dict[int, int]:
        """Living workers by local rank."""
        return dict(self._pids)

    def ready(self) -> str | None:
        """Wait until workers can be started. Returns why they are not forked, where that was not asked for."""
        end = time.monotonic() + READY_S
        while not self._ready:
            if not self._take(end - time.monotonic()):
                raise Refused("the process that starts the workers did not come up", hint="read what it said above; "
                              "elastic launch --start-method spawn does without it")  # fmt: skip
        return self._why_exec

    def start(self, tasks: Sequence[Task]) -> dict[int, int]:
        """Start the workers of a new generation; returns their pids by local rank."""
        assert not self._pids
        if self._server.poll() is not None:
            self._reopen()
        self.ready()
        self._ended, self.hurry, self.lost = [], False, False
        self._started.clear()
        lines = [replace(t, env={**t.env, MARK: self._id}).to_json() for t in tasks]
        self._control.send_bytes(json.dumps({"start": lines}).encode())
        end = time.monotonic() + READY_S
        while not self._started:
            if not self._take(end - time.monotonic()):
                raise RuntimeError("the process that starts the workers ended while it started them")
        return dict(self._started)

    def wait(self, timeout_s: float) -> list[Ended]:
        """Those that have ended since the last call, in order; waits up to ``timeout_s`` for the first."""
        end = time.monotonic() + timeout_s
        while not self._ended and (left := end - time.monotonic()) > 0:
            if self._pids and not self._take(left):
                break
            if not self._pids:
                break
        while self._take(0.0):
            pass
        ended, self._ended = self._ended, []
        return ended

    def signal(self, number: int) -> None:
        """Send ``number`` to every living worker (not to processes of its own)."""
        for rank in self._pids:
            self._signal(rank, number)

    def _signal(self, rank: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfds[rank], number)

    def stop(self, number: int, grace_s: float) -> list[int]:
        """End all workers and all that they have started; the local ranks of those that nothing could end.

        Each gets ``number``, and SIGCONT for the case that it is stopped; after ``grace_s`` it gets SIGKILL, its
        process group too. Takes ``grace_s`` and 5 s at most: a process in uninterruptible sleep is left.
        """
        if number != signal.SIGKILL:
            self.signal(number)
            self.signal(signal.SIGCONT)
            self._until_gone(grace_s, may_hurry=True)
        groups = dict(self._pids)
        self.signal(signal.SIGKILL)
        for pid in groups.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self._until_gone(KILL_S, may_hurry=False)
        stuck = sorted(self._pids)
        self._sweep()
        self._forget()
        return stuck

    def close(self) -> None:
        """Kill what is left, and end the fork server."""
        if self._pids:
            self.stop(signal.SIGKILL, 0.0)
        self._control.close()  # the end of file makes it clean up
        try:
            self._server.wait(KILL_S if self._ready else 0.1)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
            self._sweep_adopted()
        self._forget()

    def _open(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            command = [sys.executable, "-c", forkserver.command("elastic.launch.forkserver"), str(theirs.fileno()),
                       str(os.getpid()), self._method, json.dumps(self._preload)]  # fmt: skip
            # the kernel shows of a forked worker the environment that this process begins with
            self._server = subprocess.Popen(command, pass_fds=(theirs.fileno(), *self._inherit), process_group=0,
                                            env={**os.environ, MARK: self._id})  # fmt: skip
        self._control = Connection(ours.detach())
        self._ready: bool = False
        self._why_exec: str | None = None
        self._started: dict[int, int] = {}
        self._swept: list[int] | None = None

    def _reopen(self) -> None:
        self._control.close()
        self._server.wait()
        self._open()

    def _take(self, timeout_s: float) -> bool:
        """Take in one message; false when none came in time, or the fork server is gone."""
        if timeout_s < 0 or not self._control.poll(max(timeout_s, 0.0)):
            return False
        try:
            message: dict[str, Any] = json.loads(self._control.recv_bytes())
        except (EOFError, OSError):
            self._lost()
            return False
        if "ready" in message:
            self._ready, self._why_exec = True, message["ready"]
        if "started" in message:
            for rank, pid in message["started"].items():
                self._started[int(rank)] = self._pids[int(rank)] = pid
                self._all.add(pid)
                with contextlib.suppress(ProcessLookupError):  # ended, and reaped, already: it says so next
                    self._pidfds[int(rank)] = os.pidfd_open(pid)
        if "ended" in message:
            self._note(message["ended"], message["pid"], message["status"])
        if "swept" in message:
            self._swept = message["swept"]
        return True

    def _note(self, rank: int, pid: int, status: int) -> None:
        if self._pids.get(rank) == pid:
            del self._pids[rank]
            if (fd := self._pidfds.pop(rank, None)) is not None:
                os.close(fd)
            self._ended.append(Ended(local_rank=rank, pid=pid, status=status, at_s=time.monotonic()))

    def _lost(self) -> None:
        """The fork server is gone, and with it, by the kernel's hand, its workers; how they ended nobody can tell."""
        self.lost = True
        for rank, pid in list(self._pids.items()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            self._note(rank, pid, -signal.SIGKILL)

    def _until_gone(self, seconds: float, *, may_hurry: bool) -> None:
        """Wait for all workers to end, by what the fork server says, or by the kernel where it does not answer."""
        end = time.monotonic() + seconds
        while self._pids and (left := end - time.monotonic()) > 0 and not (may_hurry and self.hurry):
            if self._take(min(left, 0.1)):
                continue
            poll = select.poll()
            for fd in self._pidfds.values():
                poll.register(fd, select.POLLIN)
            dead = {fd for fd, _ in poll.poll(0)}
            if dead and not self._take(_ANSWER_S):
                for rank, fd in list(self._pidfds.items()):
                    if fd in dead:
                        self._note(rank, self._pids[rank], -signal.SIGKILL)

    def _sweep(self) -> None:
        """Let the fork server kill what its workers have left; one that does not answer is replaced."""
        self._swept = None
        with contextlib.suppress(OSError):
            self._control.send_bytes(b'{"sweep": true}')
        end = time.monotonic() + _ANSWER_S
        while self._swept is None:
            if not self._take(end - time.monotonic()):
                self._server.kill()
                self._server.wait()
                self._sweep_adopted()
                return

    def _sweep_adopted(self) -> None:
        """Kill what the kernel made our children when the fork server died: only what carries this crew's mark."""
        for _ in range(50):
            mine = [pid for pid in forkserver.children(os.getpid()) if pid != self._server.pid and self._marked(pid)]
            if not mine:
                return
            for pid in mine:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)

    def _marked(self, pid: int) -> bool:
        try:
            if look(pid)[0] == "Z":  # which shows no environment
                return pid in self._all or os.getpgid(pid) in self._all
            if self._mark not in Path(f"/proc/{pid}/environ").read_bytes():
                return False
        except OSError:
            return False
        self._all.add(pid)
        return True

    def _forget(self) -> None:
        for fd in self._pidfds.values():
            os.close(fd)
        self._pids, self._pidfds = {}, {}
