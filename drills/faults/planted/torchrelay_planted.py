"""Faults in the target's own process: a clock that is wrong, and file calls that are held, slowed or refused.

Started by ``sitecustomize`` beside it; see ``faults/clock.py`` and ``faults/gates.py``. Standard library only.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import sys
import time
from typing import Any


def wrong_clock(path: str) -> None:
    """Add the offset in the file to what ``time.time`` says, and count the askings there."""
    with open(path, "r+b") as f:
        shared = mmap.mmap(f.fileno(), 16)
    right, right_ns = time.time, time.time_ns

    def offset() -> float:
        seconds, asked = struct.unpack("<dq", shared[:16])
        shared[8:16] = struct.pack("<q", asked + 1)
        return float(seconds)

    time.time = lambda: right() + offset()
    time.time_ns = lambda: right_ns() + int(offset() * 1e9)


class Gate:
    """An audit hook that looks at every file that is opened for writing or reading, linked or renamed."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.rule_file = os.path.join(folder, "rule.json")
        self.sleep, self.clock, self.wall = time.sleep, time.monotonic, time.time

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """Python's audit hook: cheap for everything but files of a run's storage."""
        if event == "open":
            path, mode, flags = args
            if isinstance(flags, int) and flags & os.O_DIRECTORY:  # only to have it flushed
                return
            write = bool(flags & (os.O_WRONLY | os.O_RDWR)) if isinstance(flags, int) else "r" not in str(mode)
        elif event in ("os.rename", "os.link"):
            path, write = args[1], True
        else:
            return
        path = os.fsdecode(path) if isinstance(path, (str, bytes)) else ""
        if ("/steps/" not in path and "/commits/" not in path) or path.startswith(self.folder):
            return
        if os.path.exists(self.rule_file) and (rule := self.read()):
            self.apply(rule, event, path, write)

    def read(self) -> dict[str, Any]:
        """The rule of now; empty when it has just been taken away."""
        try:
            with open(self.rule_file) as f:
                return dict(json.load(f))
        except (OSError, ValueError):
            return {}

    def apply(self, rule: dict[str, Any], event: str, path: str, write: bool) -> None:
        """Hold, slow down or refuse a call that the rule is about."""
        found = re.search(rule["key"], path)
        if found is None or write != rule["write"] or int(found[found.lastindex or 1]) <= rule["after_step"]:
            return
        if rule["action"] == "hold":
            self.hold(rule, event, found[0])
            return
        fd = os.open(os.path.join(self.folder, f"harmed-{rule['number']}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, b".")
        os.close(fd)
        if rule["action"] == "delay":
            self.sleep(rule["seconds"])
        else:
            raise OSError(rule["errno"], os.strerror(rule["errno"]), path)

    def hold(self, rule: dict[str, Any], event: str, key: str) -> None:
        """Wait until the rule is taken away; only the first one does."""
        draft = os.path.join(self.folder, f"draft-{os.getpid()}")
        said = {"phase": rule["phase"], "call": event.removeprefix("os."), "key": key, "pid": os.getpid(),
                "rank": int(os.environ.get("RANK", "0")), "t": self.wall()}  # fmt: skip
        with open(draft, "w") as f:
            json.dump(said, f)
        try:
            os.link(draft, os.path.join(self.folder, f"held-{rule['number']}"))
        except FileExistsError:  # somebody else is held already
            return
        finally:
            os.unlink(draft)
        end = self.clock() + rule["seconds"]
        while self.clock() < end and os.path.exists(self.rule_file):
            self.sleep(0.002)


def start() -> None:
    """What the environment asks for."""
    for path in os.environ.get("TORCHRELAY_GATE", "").split(os.pathsep):
        if path:
            sys.addaudithook(Gate(path))
    if clock := os.environ.get("TORCHRELAY_CLOCK"):
        wrong_clock(clock)
