"""A job under ``elastic launch`` for tests and soaks; what it did is in its events."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.dist.launch import Job


def elastic_launch(
    script: Path | str, *args: str, nproc: int, log: Path, max_restarts: int = 3, options: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> Job:  # fmt: skip
    """Output and events beside ``log``."""
    command = [sys.executable, "-m", "elastic.cli", "launch", "--nproc-per-node", str(nproc)]
    command += ["--max-restarts", str(max_restarts), "--events", str(log.with_suffix(".events")), *options]
    return Job([*command, str(script), *args], log=log, output=log.with_suffix(".out"), env=env or {})


def events(job: Job) -> list[dict[str, Any]]:
    """Everything that the launcher did by now."""
    file = job.log.with_suffix(".events")
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def left_behind(job: Job, timeout_s: float = 10.0) -> list[str]:
    """Processes of a job that has ended, given a moment to go."""
    members = job.members()
    _, alive = psutil.wait_procs(members, timeout=timeout_s)
    said = []
    for process in alive:
        with contextlib.suppress(psutil.Error):
            said.append(f"{process.pid} {process.status()} {' '.join(process.cmdline())[:80]}")
    return said


def shared_memory() -> set[str]:
    """Names of shared-memory segments of this machine."""
    return set(os.listdir("/dev/shm"))
