"""What asks a run to stop besides signals: a file, a time limit, a cloud's notice at a URL."""

from __future__ import annotations

import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from ckpt.errors import Refused
from elastic.units import parse_duration

_LOOK_S = 0.25  # a file system is asked so often at most


@dataclass(frozen=True, slots=True)
class Asked:
    """That the run is to stop: who says so, and how many seconds are left (None: not known)."""

    source: str
    within_s: float | None = None


class Notice(Protocol):
    """Something that may ask a run to stop. One rank's word is enough; all ranks then stop at the same step."""

    def open(self) -> None:
        """The run begins."""
        ...

    def asked(self) -> Asked | None:
        """Whether it asks now. Called between steps, on the thread that trains: returns at once."""
        ...

    def close(self) -> None:
        """The run has ended."""
        ...


class StopFile:
    """Stop when a file appears: ``touch`` it from anywhere that sees the path. Who starts the job again removes it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._looked = float("-inf")
        self._there = False

    def open(self) -> None:
        """Refuse a file that is there already: the run would stop at its first step, again and again."""
        if self._path.exists():
            raise Refused(f"the stop file {self._path} is there already", hint=f"rm {self._path}")

    def asked(self) -> Asked | None:
        """Looks at most every quarter of a second."""
        if not self._there and time.monotonic() - self._looked >= _LOOK_S:
            self._looked, self._there = time.monotonic(), self._path.exists()
        return Asked(f"file {self._path}") if self._there else None

    def close(self) -> None:
        """Nothing to let go."""


class TimeLimit:
    """Stop ``before`` the job's time is over: a Slurm limit, a reservation, a working day.

    ``limit`` ("3h50m", or seconds) counts from the start of torchrun where that has started this process, else from
    that of the process, so a restart by torchrun gets no new time. ``TimeLimit.slurm()`` takes the end that Slurm
    gives in ``SLURM_JOB_END_TIME``. ``before`` has to cover a step and a save.
    """

    def __init__(self, limit: str | float, *, before: str | float = "2m") -> None:
        seconds, self._before_s = _seconds(limit), _seconds(before)
        if seconds <= self._before_s:
            raise Refused(
                f"a time limit of {seconds:g} s leaves nothing before the last {self._before_s:g} s",
                hint=f'TimeLimit("{seconds:g}s", before="{seconds / 4:g}s"); before covers a step and a save',
            )
        process = psutil.Process()
        launcher = process.parent() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._end = (launcher or process).create_time() + seconds
        self._source = f"time limit of {seconds:g} s"

    @classmethod
    def slurm(cls, *, before: str | float = "2m") -> TimeLimit:
        """The end of this Slurm job; ``Refused`` where Slurm does not tell it."""
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        if not end.isdigit():
            raise Refused("SLURM_JOB_END_TIME is not set: is this a Slurm job, of 22.05 or newer?",
                          hint="TimeLimit('3h50m'), or sbatch --signal=USR1@180")  # fmt: skip
        limit = cls(1e9, before=before)
        limit._end, limit._source = float(end), "Slurm's time limit"
        return limit

    def open(self) -> None:
        """Refuse a run that has no time left."""
        if self.asked() is not None:
            raise Refused(f"{self._source}: no time is left for a step and a save (before={self._before_s:g} s)",
                          hint="start a job with more time, or give a smaller before=")  # fmt: skip

    def asked(self) -> Asked | None:
        """True in the last ``before`` seconds."""
        left = self._end - time.time()
        return Asked(self._source, max(left, 0.0)) if left <= self._before_s else None

    def close(self) -> None:
        """Nothing to let go."""


class NoticeUrl:
    """Stop when a URL answers 200: how clouds tell a machine that it will be taken away, minutes ahead.

    Asked every ``every_s`` seconds by a thread of its own; any other answer, or none, means "go on". AWS:
    ``http://169.254.169.254/latest/meta-data/spot/instance-action``. ``within_s`` is the notice that the cloud gives.
    With ``body`` the answer must contain that text, too (Google's ``…/instance/preempted`` says TRUE or FALSE).
    """

    def __init__(self, url: str, *, within_s: float = 120.0, every_s: float = 5.0, body: str = "",
                 headers: Mapping[str, str] | None = None) -> None:  # fmt: skip
        if not url.startswith(("http://", "https://")):
            raise Refused(f"a notice comes from an http URL, not {url!r}")
        self._request = urllib.request.Request(url, headers=dict(headers or {}))
        self._url, self._body, self._within_s, self._every_s = url, body, within_s, every_s
        self._asked: Asked | None = None
        self._seen_s = 0.0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Start to ask."""
        self._over.clear()
        self._thread = threading.Thread(target=self._watch, name="notice-url", daemon=True)
        self._thread.start()

    def asked(self) -> Asked | None:
        """What the thread has found."""
        if self._asked is None:
            return None
        return Asked(self._asked.source, max(self._within_s - (time.monotonic() - self._seen_s), 0.0))

    def close(self) -> None:
        """Ask no more."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(3.0)

    def _watch(self) -> None:
        while not self._over.is_set():
            if self._fires():
                self._seen_s, self._asked = time.monotonic(), Asked(f"notice at {self._url}")
                return
            self._over.wait(self._every_s)

    def _fires(self) -> bool:
        try:
            with urllib.request.urlopen(self._request, timeout=2.0) as answer:
                return answer.status == 200 and self._body in answer.read(4096).decode(errors="replace")
        except (OSError, ValueError, urllib.error.URLError):  # 404: no notice; no answer: not that kind of machine
            return False


def _seconds(duration: str | float) -> float:
    return parse_duration(duration) if isinstance(duration, str) else float(duration)
