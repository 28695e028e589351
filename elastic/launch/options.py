"""What a launch is told, checked at the edge. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpt.errors import Refused

OUT, ERR = 1, 2
BACKEND = "c10d"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One launch on one host."""

    kind: str
    argv: tuple[str, ...]
    nproc: int
    nodes: tuple[int, int] = (1, 1)
    backend: str = BACKEND
    endpoint: str = "localhost:0"
    run_id: str
    conf: Mapping[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    role: str = "default"
    max_restarts: int = 3
    monitor_s: float = 0.1
    method: str = "forkserver"
    preload: tuple[str, ...] = ()
    log_dir: Path | None = None
    redirect: int = 0
    tee: int = 0
    shutdown_s: float = 30.0
    restart_grace_s: float = 0.3
    hang_s: float | None = None
    """None: learned; infinity: nobody looks."""
    quiet_s: float = 600.0
    blind_s: float = 10.0
    events: Path | None = None


def parse_nodes(text: str) -> tuple[int, int]:
    """``2`` or ``1:4``: the least and the most hosts."""
    low, _, high = text.partition(":")
    try:
        least, most = int(low), int(high or low)
    except ValueError:
        raise Refused(f"--nnodes {text!r} is neither a number nor MIN:MAX", hint="--nnodes 1:4") from None
    if not 0 < least <= most:
        raise Refused(f"--nnodes {text!r}: at least one host, and no more at least than at most", hint="--nnodes 1:4")
    return least, most


def parse_hang(text: str, seconds: float | None) -> float | None:
    """``auto``, ``off``, or a duration that was parsed already."""
    return None if text == "auto" else math.inf if text == "off" else seconds
