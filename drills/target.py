"""The command under test: how to start it, observe it from outside, and stop it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drills.errors import HarnessBroken, Usage
from drills.history import Commit, History
from drills.oracle import CommitWatch
from drills.processes import OWNER_VARIABLE, Table, describe, kill_owned, owned, proc_of
from drills.scenario import without_secrets
from drills.timeline import Line, Proc, parse_line

EXAMPLE = "drills run kill-any-rank -- torchrun --nproc-per-node 2 --max-restarts 3 train.py {url} --log-file {log}"

# What an outer launcher would hand down: the target must not take itself for a rank of somebody else's job.
_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def check_command(command: tuple[str, ...], nproc: int | None) -> None:
    """Refuse a command that cannot be drilled: no placeholders, or nothing of that name on the path."""
    text = " ".join(command)
    if missing := [p for p in ("{url}", "{log}") if p not in text]:
        raise Usage(f"the command lacks the placeholder {' and '.join(missing)}",
                    facts=[("{url}", "where the target keeps its checkpoints"),
                           ("{log}", "the file to which it appends a JSON line a step")],
                    hint=EXAMPLE)  # fmt: skip
    if nproc is not None and "{nproc}" not in text:
        raise Usage("--nproc was given, but the command has no placeholder {nproc}",
                    hint="write the number into the command, or {nproc} in its place")  # fmt: skip
    if nproc is None and "{nproc}" in text:
        raise Usage("the command has the placeholder {nproc}; say what it is", hint="--nproc 2")
    resolve(command)


def resolve(command: tuple[str, ...]) -> list[str]:
    """The command with its program found: on the path that the target will have, or a Python file."""
    program, *rest = command
    if program.endswith(".py") and Path(program).is_file():
        return [sys.executable, *command]
    found = shutil.which(program, path=search_path())
    if found is None:
        raise Usage(f"there is no program {program!r} to run",
                    facts=[("looked in", search_path().split(os.pathsep)[0] + " and the rest of PATH")],
                    hint="check the spelling, or give the path of the program") from None  # fmt: skip
    return [found, *rest]


def search_path() -> str:
    """PATH of the target: the folder of this Python first, so that torchrun is that of the same environment."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def fill(command: tuple[str, ...], *, url: str, log: Path, nproc: int | None, endpoint: str = "") -> list[str]:
    """The command line of one run: placeholders replaced, program resolved."""
    values = {"{url}": url, "{log}": str(log), "{nproc}": str(nproc), "{endpoint}": endpoint}
    pattern = re.compile("|".join(map(re.escape, values)))
    return resolve(tuple(pattern.sub(lambda m: values[m[0]], word) for word in command))


class Job:
    """One run of the command: started in a session of its own, watched by ``poll``, ended by ``stop``.

    Everything seen goes into the history at once. ``lines`` are the log lines so far, ``arrived`` when the last
    came; ``status`` is the exit status of the last start, None while it runs; ``asked_starts`` counts the starts that
    belong to the drill, not to a scheduler.
    """

    def __init__(
        self, name: str, *, argv: list[str], url: str, folder: Path, owner: str, env: Mapping[str, str],
        history: History, options: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.name, self.argv, self.url, self.folder, self.owner = name, argv, url, folder, owner
        self.status: int | None = None
        self.stopped: str | None = None
        self.lines: list[Line] = []
        self.starts = 0
        self.asked_starts = 0
        self.leave_s = 5.0
        self.arrived = 0.0
        self.commits: dict[str, Commit] = {}
        self._env, self._history = dict(env), history
        self._table = Table(owner)
        self._root: subprocess.Popen[bytes] | None = None
        self._older: list[subprocess.Popen[bytes]] = []
        self._texts = 0
        self._watch = CommitWatch(url, options)
        self._log, self._log_at, self._half = folder / "log.jsonl", 0, b""
        self._highest = self._offset = 0
        self._scan_due = 0.0
        self.scan_every_s = 0.1
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def workers(self) -> dict[int, Proc]:
        """Live workers by rank."""
        return self._table.workers

    @property
    def last_step(self) -> int:
        """The highest step that any rank has done."""
        return self._highest + self._offset

    @property
    def storage_error(self) -> str | None:
        """Why the commits could not be listed the last time, if so."""
        return self._watch.error

    def root(self) -> Proc | None:
        """The process of the command, while it lives."""
        assert self._root is not None
        with contextlib.suppress(OSError):
            if self._root.poll() is None:
                return proc_of(self._root.pid)
        return None

    def start(self) -> None:
        """Start the command, or start it again with the same storage and log."""
        if self._root is not None:
            self._older.append(self._root)
            if owned(self.owner):  # another start lives on beside this one, and has to find out that it is overtaken
                self.leave_s = 60.0
        env = {
            k: v for k, v in os.environ.items() if k not in _LAUNCHER_VARIABLES and not k.startswith("TORCHELASTIC_")
        }
        env |= {"PATH": search_path(), "PYTHONUNBUFFERED": "1", **self._env, OWNER_VARIABLE: self.owner}
        self.status = None
        self.starts += 1
        with (self.folder / "stdout.txt").open("ab") as out, (self.folder / "stderr.txt").open("ab") as err:
            try:
                self._root = subprocess.Popen(
                    self.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, start_new_session=True
                )
            except OSError as e:
                raise HarnessBroken(f"the command could not be started: {e.strerror}",
                                    facts=[("command", shlex.join(self.argv))]) from None  # fmt: skip
        argv = without_secrets(self.argv)
        self._add("run.started", url=self.url, argv=argv, pid=self._root.pid, start=self.starts)

    def poll(self, wait_s: float = 0.01) -> None:
        """Take in what has happened: workers that came and went, log lines, commits, the end of the command."""
        assert self._root is not None
        for p in self._table.ended(wait_s):
            self._add("process.ended", pid=p.pid, rank=p.rank, t=p.ended)
        new = self._read_log()
        if time.monotonic() >= self._scan_due:
            self._note(self._table.scan(self._root.pid))
            self._scan_due = time.monotonic() + self.scan_every_s
        for line in new:  # commands without a launcher set no RANK: their own log says who is who
            if line.pid is not None and line.rank not in self._table.workers:
                self._note([p for p in [self._table.adopt(line.rank, line.pid)] if p])
        for c in self._watch.seen()[len(self.commits) :]:
            self.commits[c.name] = c
            self._add("commit.seen", step=c.step, name=c.name, folder=c.folder, t=c.seen)
        self.status = self._root.poll()
        for older in self._older:
            older.poll()

    def adopt(self, rank: int, pid: int) -> None:
        """Take a process of the run for this rank, because the storage has seen it: it has logged nothing yet."""
        if rank not in self._table.workers:
            self._note([p for p in [self._table.adopt(rank, pid)] if p])

    def stop(self, why: str | None, grace_s: float = 8.0) -> None:
        """End whatever still runs: SIGTERM to the command, then SIGKILL to all that carries the run's mark."""
        assert self._root is not None
        if why is not None and self._root.poll() is None:
            self.stopped = why
            self._root.send_signal(signal.SIGTERM)
            end = time.monotonic() + grace_s
            while self._root.poll() is None and time.monotonic() < end:
                self.poll(0.05)
            kill_owned(self.owner)
        self._root.wait(timeout=30)
        self.poll(0)
        self._watch.close()
        self.poll(0)
        self._add("run.ended", status=self._root.returncode, stopped=self.stopped, t=time.time())

    def leftovers(self, grace_s: float | None = None) -> list[str]:
        """What still runs after the command has ended, given ``grace_s`` to go; it is killed, and named."""
        end = time.monotonic() + (self.leave_s if grace_s is None else grace_s)
        while (left := owned(self.owner)) and time.monotonic() < end:
            time.sleep(0.1)
        said = describe(left)
        if left:
            kill_owned(self.owner)
        self._table.close()
        self._add("left.running", processes=said)
        return said

    def _note(self, workers: list[Proc]) -> None:
        for p in workers:
            self._add("process.seen", pid=p.pid, rank=p.rank, born=p.born, started=p.started)

    def _read_log(self) -> list[Line]:
        """Whole new lines of the target's log; a half line waits for its other half."""
        try:
            with self._log.open("rb") as f:
                f.seek(self._log_at)
                data = f.read()
        except FileNotFoundError:
            return []
        self._log_at += len(data)
        *whole, self._half = (self._half + data).split(b"\n")
        new = []
        if whole:
            self._texts += len(whole)
            self.arrived = time.time()
            self._add("log.read", lines=self._texts, t=self.arrived)
        for text in whole:
            try:
                line = parse_line(text.decode(errors="replace"))
            except ValueError:  # judged later, from the file
                continue
            if line:
                new.append(line)
        self.lines += new
        self._highest = max([self._highest, *(n.step for n in new)])
        self._offset = 1 if any(n.step == 0 for n in new) else self._offset  # a log that counts from 0
        return new

    def _add(self, event: str, **facts: Any) -> None:
        self._history.add(event, run=self.name, **facts)
