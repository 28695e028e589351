"""Starts real jobs for tests: plain torchrun in a session of its own, cleaned up process by process."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

Line = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
MARK = "TORCHRELAY_TEST_JOB"  # in the environment of every process of a job, also of orphans


def free_port() -> int:
    """A TCP port that nobody listens on, below those that the kernel gives to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


class Job:
    """A running command; leaving the ``with`` block kills all that is left of it, orphans included."""

    def __init__(self, command: Sequence[str], *, log: Path, output: Path, env: dict[str, str]) -> None:
        self.log, self.output = log, output
        self._id = uuid.uuid4().hex
        base = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "MASTER_"))}
        self._sink = output.open("ab")
        self.process = subprocess.Popen(
            command,
            env={**base, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env, MARK: self._id},
            stdout=self._sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @staticmethod
    def read(log: Path) -> list[Line]:
        """The lines of a log; the last one may be under way, and is left out until it has its end."""
        return [json.loads(line) for line in log.read_text().split("\n")[:-1]] if log.exists() else []

    def lines(self) -> list[Line]:
        """What the workers have logged so far, in the order of their writes."""
        return self.read(self.log)

    def until(self, ready: Callable[[list[Line]], bool], timeout_s: float = 90) -> list[Line]:
        """Wait until the log satisfies ``ready``; fails with the job's output if it does not."""
        end = time.monotonic() + timeout_s
        while not ready(lines := self.lines()):
            assert time.monotonic() < end, self.tail("the log did not get there")
            assert self.process.poll() is None, self.tail(f"the job ended: {self.process.returncode}")
            time.sleep(0.005)
        return lines

    def wait(self, timeout_s: float = 90) -> int:
        """The exit status of the command; fails with the job's output after ``timeout_s``."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.tail(f"still running after {timeout_s} s")) from None

    def tail(self, why: str) -> str:
        """``why``, and the end of the job's output."""
        return f"{why}\n" + "\n".join(self.output.read_text(errors="replace").splitlines()[-60:])

    def members(self) -> list[psutil.Process]:
        """Every living process that carries this job's mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._id and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in range(20):  # an agent that is being killed may start one more worker
            members = self.members()
            for process in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            if not members:
                break
            psutil.wait_procs(members, timeout=2)
        self.process.wait(10)
        self._sink.close()


def torchrun(
    script: Path | str,
    *args: str,
    nproc: int,
    log: Path,
    max_restarts: int = 0,
    static: bool = False,
    env: dict[str, str] | None = None,
) -> Job:
    """A job under plain ``torchrun``, output beside ``log``; ``static`` takes the static rendezvous."""
    rendezvous = ["--standalone"]
    if static:
        rendezvous = ["--rdzv-backend=static", "--node-rank=0", "--nnodes=1", "--master-addr=127.0.0.1"]
        rendezvous += [f"--master-port={free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(nproc)]
    command += ["--max-restarts", str(max_restarts), str(script), *args]
    return Job(command, log=log, output=log.with_suffix(".out"), env=env or {})


def by_hand(script: Path | str, *args: str, nproc: int, log: Path, env: dict[str, str] | None = None) -> list[Job]:
    """The ranks of a world as Slurm or a shell would start them, with ``env://`` and no agent."""
    world = {"WORLD_SIZE": str(nproc), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-W", "error", str(script), *args]
    return [
        Job(command, log=log, output=log.with_suffix(f".out{rank}"), env={**world, "RANK": str(rank), **(env or {})})
        for rank in range(nproc)
    ]
