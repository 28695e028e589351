"""The workers of this host over all generations: start, watch, stop, and what to make of their ends."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.errors import Superseded
from elastic.launch import report
from elastic.launch.beats import Board
from elastic.launch.crew import Crew, Ended
from elastic.launch.logs import Events, Logs
from elastic.launch.options import Options
from elastic.launch.process import dump_stacks, look
from elastic.launch.task import PROGRAM, Task
from elastic.launch.verdict import DONE, STOPPED, SUPERSEDED, Budget, Failure
from elastic.launch.watch import Hang, Reading, Watch
from elastic.units import show_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the launch ended: the exit status of its first failed rank (minus a signal), and why it was not restarted."""

    status: int
    failure: Failure | None = None
    why: str | None = None


class LocalHost:
    """Implements ``torchelastic.Host``. ``waiting`` tells how many hosts wait to join, ``lost`` which are silent."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._board = Board(options.nproc)
        self._stacks = [os.memfd_create(f"elastic-stacks-{n}") for n in range(options.nproc)]
        self._words = [os.memfd_create(f"elastic-words-{n}") for n in range(options.nproc)]
        self._crew = Crew(method=options.method, preload=options.preload,
                          inherit=(self._board.fd, *self._stacks, *self._words))  # fmt: skip
        self._logs, self._events = Logs(options), Events(options.events)
        self._budget = Budget(options.max_restarts)
        self._watch = Watch(options.hang_s, quiet_s=options.quiet_s)
        self._generation, self._ranks, self._world = 0, dict[int, int](), 0
        self._ends: dict[int, Ended] = {}
        self._failed = False
        self._began_s = 0.0
        self.outcome: Outcome | None = None
        """Set when nothing is to be started again."""
        self.waiting: Callable[[], int] = lambda: 0
        self.lost: Callable[[], list[int]] = list

    # --- what torchelastic asks for -----------------------------------------------------------------------------------

    def start(self, ranks: list[dict[str, str]]) -> dict[int, int]:
        """Start a generation; ``Superseded`` where a rank of the last one found, on its way out, that it was."""
        options = self._options
        if SUPERSEDED in self.statuses:
            self.outcome = Outcome(status=SUPERSEDED)
            raise Superseded("another start of the run has taken over, so this job is not started again",
                             hint="stop this job; or start it anew, to take the run back")  # fmt: skip
        self._events.add("rendezvous", world=int(ranks[0]["WORLD_SIZE"]))
        self._generation += 1
        self._ranks = {int(env["LOCAL_RANK"]): int(env["RANK"]) for env in ranks}
        self._world = int(ranks[0]["WORLD_SIZE"])
        self._ends, self._failed = {}, False
        self._board.clear()
        self._watch.begin()
        for fd in (*self._stacks, *self._words):
            os.ftruncate(fd, 0)
        files = self._logs.open(self._generation, self._ranks)
        common = {**os.environ, "TORCHELASTIC_RESTART_COUNT": str(self._generation - 1)}
        common.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        if why := self._crew.ready():
            self._say(f"workers are started as new interpreters, which takes seconds: {why}")
        self._began_s = time.monotonic()
        pids = self._crew.start([
            Task(local_rank=local, kind=options.kind, argv=options.argv, env={**common, **env},
                 stdout=files[local][0], stderr=files[local][1], beats_fd=self._board.fd,
                 stacks_fd=self._stacks[local], words_fd=self._words[local])
            for env in ranks for local in [int(env["LOCAL_RANK"])]
        ])  # fmt: skip
        self._events.add("started", generation=self._generation, pids=pids)
        return pids

    def watch(self) -> Mapping[int, tuple[int, int, bool]] | None:
        """Wait for an end, or for the next look at the heartbeats."""
        for end in self._crew.wait(self._options.monitor_s):
            self._note(end)
        if bad := [e for e in self._ends.values() if e.status not in (DONE, STOPPED)]:
            return self._failure(bad[0])
        if any(e.status == STOPPED for e in self._ends.values()):
            return self._stopped()
        if not self._crew.pids and len(self._ends) == len(self._ranks):
            self.outcome = Outcome(status=DONE)
            return self._ended(again=False)
        if lost := self.lost():
            self._say(f"host {lost[0]} of the job is silent: all other ranks start again without it")
            self._events.add("host_lost", hosts=lost)
            self._failed = True
            return {local: (pid, -signal.SIGTERM, True) for local, pid in self._crew.pids.items()}
        if (hang := self._hang()) is not None:
            return self._hung(hang)
        return None

    def stop(self, number: int | None) -> None:
        """End the workers: at once after a failure, with time to save when it is the launcher that is asked."""
        if not self._crew.pids:
            self._crew.stop(signal.SIGKILL, 0.0)
            return
        options = self._options
        polite = number is not None or not self._failed
        forward = number if number in (signal.SIGINT, signal.SIGTERM) else signal.SIGTERM
        began = time.monotonic()
        stuck = self._crew.stop(forward, options.shutdown_s if polite else options.restart_grace_s)
        for end in self._crew.wait(0.0):
            self._note(end)
        self._events.add("stopped", seconds=time.monotonic() - began, stuck=[self._ranks[r] for r in stuck])
        for local in stuck:
            self._say(f"rank {self._ranks[local]} could not be killed and is left behind: the kernel holds it")

    # --- the launcher's own -------------------------------------------------------------------------------------------

    def hurry(self) -> None:
        """End a grace period now; may be called from a signal handler."""
        self._crew.hurry = True

    def pass_on(self, number: int) -> None:
        """Send a signal to all workers; may be called from a signal handler."""
        self._crew.signal(number)

    @property
    def statuses(self) -> list[int]:
        """How the workers of the last generation ended."""
        return [end.status for end in self._ends.values()]

    def failure_text(self) -> str:
        """What a person needs to know of a launch that failed."""
        assert self.outcome is not None
        if self.outcome.failure is None:
            return ""
        file, lines = self._logs.last_lines(self._generation, self.outcome.failure.rank)
        return report.failed(self.outcome.failure, world=self._world, generation=self._generation,
                             host=socket.gethostname(), why=self.outcome.why, log=file, lines=lines)  # fmt: skip

    def close(self) -> None:
        """Leave nothing behind."""
        self._crew.close()
        self._logs.close()
        self._board.close()
        for fd in (*self._stacks, *self._words):
            os.close(fd)
        self._events.add("ended", status=None if self.outcome is None else self.outcome.status)
        self._events.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _note(self, end: Ended) -> None:
        self._ends[end.local_rank] = end
        self._events.add("worker_ended", rank=self._ranks[end.local_rank], pid=end.pid, status=end.status)

    def _ended(self, *, again: bool) -> dict[int, tuple[int, int, bool]]:
        return {local: (end.pid, end.status, again) for local, end in self._ends.items()}

    def _failure(self, end: Ended) -> dict[int, tuple[int, int, bool]]:
        words = self._last_words(end.local_rank)
        if self._crew.lost:
            words = {
                "error": "LauncherDamaged",
                "message": "the process that starts the ranks was ended",
                "where": None,
            }
        failure = Failure(
            rank=self._ranks[end.local_rank], local_rank=end.local_rank, pid=end.pid, status=end.status,
            step=self._step(), lived_s=time.monotonic() - self._began_s,
            error=f"{words['error']}: {words['message']}" if words else None, where=words["where"] if words else None,
        )  # fmt: skip
        return self._after(failure)

    def _after(self, failure: Failure) -> dict[int, tuple[int, int, bool]]:
        self._failed = True
        if failure.status == SUPERSEDED:
            self.outcome = Outcome(status=SUPERSEDED, failure=failure,
                                   why="another start of the run has taken over")  # fmt: skip
            return self._ended(again=False)
        why = self._budget.refusal(failure)
        if why is not None:
            self.outcome = Outcome(status=failure.status, failure=failure, why=why)
        else:
            at = "" if failure.step is None else f" at step {failure.step}"
            self._say(
                f"rank {failure.rank} of {self._world} {report.past(failure)} (pid {failure.pid}){at}; all ranks "
                f"start again, {self._budget.left} of {self._budget.max_restarts} restarts left"
                + (f"\n  error  {failure.error.splitlines()[0]}" if failure.error else "")
            )
        self._events.add("failure", rank=failure.rank, how=failure.how, step=failure.step, restart=why is None)
        return {**self._ended(again=why is None), failure.local_rank: (failure.pid, failure.status, why is None)}

    def _stopped(self) -> dict[int, tuple[int, int, bool]]:
        """A rank has ended with "stopped on request": the others are about to."""
        end_s = time.monotonic() + self._options.shutdown_s
        while self._crew.pids and (left := end_s - time.monotonic()) > 0:
            for end in self._crew.wait(left):
                self._note(end)
            if bad := [e for e in self._ends.values() if e.status not in (DONE, STOPPED)]:
                return self._failure(bad[0])
        if self._others_wait():
            self._say("the ranks have saved and stopped for hosts that join")
            return self._ended(again=True)
        self.outcome = Outcome(status=STOPPED)
        return self._ended(again=False)

    def _others_wait(self) -> bool:
        """Whether the request to stop came from a change of members: another host's launcher stopped its ranks."""
        end_s = time.monotonic() + (3.0 if self._options.nodes[1] > 1 else 0.0)
        while time.monotonic() < end_s:
            if self.waiting() > 0:
                return True
            time.sleep(0.2)
        return False

    def _hang(self) -> Hang | None:
        options = self._options
        if options.hang_s == math.inf or options.kind == PROGRAM:
            return None
        readings: dict[int, Reading] = {}
        for local, pid in self._crew.pids.items():
            with contextlib.suppress(OSError):  # it has just ended
                state, cpu_s = look(pid)
                readings[local] = Reading(beat=self._board.read(local), state=state, cpu_s=cpu_s)
        return self._watch.look(time.monotonic(), readings)

    def _hung(self, hang: Hang) -> dict[int, tuple[int, int, bool]]:
        pids = self._crew.pids
        self._events.add("hang", ranks=[self._ranks[r] for r in hang.ranks], still_s=hang.still_s,
                         why={self._ranks[r]: w for r, w in hang.why.items()}, step=hang.step)  # fmt: skip
        for local in hang.ranks:
            self._say(
                f"rank {self._ranks[local]} of {self._world} hangs (pid {pids[local]}): {hang.why[local]}; no progress "
                f"for {show_duration(hang.still_s)}, the limit is {show_duration(hang.limit_s)}"
            )
        for local, text in dump_stacks(pids, dict(enumerate(self._stacks)), first=hang.ranks).items():
            print(f"--- rank {self._ranks[local]} (pid {pids[local]})\n{text}", file=sys.stderr, flush=True)
            if folder := self._logs.folder(self._generation, self._ranks[local]):
                (folder / "stacks.txt").write_text(text)
        first = hang.ranks[0]
        for local in hang.ranks:  # the others' collectives fail as soon as it is gone
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[local], signal.SIGKILL)
        return self._after(Failure(
            rank=self._ranks[first], local_rank=first, pid=pids[first], status=-signal.SIGKILL, step=hang.step,
            lived_s=time.monotonic() - self._began_s, error=hang.why[first], hung=True,
        ))  # fmt: skip

    def _step(self) -> int | None:
        step = max(self._board.read(local).step for local in self._ranks)
        return None if step < 0 else step

    def _last_words(self, local: int) -> dict[str, Any] | None:
        raw = os.pread(self._words[local], 65_536, 0)
        try:
            words: dict[str, Any] = json.loads(raw)
        except ValueError:
            return None
        return words

    def _say(self, text: str) -> None:
        print(f"elastic launch: {text}", file=sys.stderr, flush=True)
