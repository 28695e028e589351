"""What a worker is started with, as it travels from the launcher to the process that starts it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

SCRIPT, MODULE, PROGRAM = "script", "module", "program"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One worker: what to run, with which environment, and where its output goes ("": where the launcher's goes)."""

    local_rank: int
    kind: str
    """``SCRIPT``: a Python file; ``MODULE``: as ``python -m``; ``PROGRAM``: anything else that can be executed."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    stdout: str = ""
    stderr: str = ""
    beats_fd: int = -1
    """Shared memory in which the worker beats (see ``beats``); -1: nobody listens."""
    stacks_fd: int = -1
    """File to which the stacks of all its threads are written when it is told to."""
    words_fd: int = -1
    """File for the error that it ends with."""

    def to_json(self) -> str:
        """One line."""
        return json.dumps({**asdict(self), "env": dict(self.env)})

    @classmethod
    def from_json(cls, text: str) -> Task:
        """What ``to_json`` gave."""
        fields = json.loads(text)
        return cls(**{**fields, "argv": tuple(fields["argv"])})
