"""Checkpoints that are whole, proven and restorable on any number of ranks. Importing this imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.checkpoints import Checkpoints, open  # noqa: A004
    from ckpt.engine.reader import ObjectReader
    from ckpt.engine.writer import ObjectWriter
    from ckpt.errors import CkptError, Damaged
    from ckpt.load import Resumed
    from ckpt.perrank import PerRank
    from ckpt.policy import Best, EveryN, Latest, Tail
    from ckpt.save import Pending, Saved
    from ckpt.state import State

_HOME = {
    "open": "ckpt.checkpoints",
    "Checkpoints": "ckpt.checkpoints",
    "State": "ckpt.state",
    "PerRank": "ckpt.perrank",
    "Latest": "ckpt.policy",
    "EveryN": "ckpt.policy",
    "Tail": "ckpt.policy",
    "Best": "ckpt.policy",
    "ObjectWriter": "ckpt.engine.writer",
    "ObjectReader": "ckpt.engine.reader",
    "Pending": "ckpt.save",
    "Saved": "ckpt.save",
    "Resumed": "ckpt.load",
    "CkptError": "ckpt.errors",
    "Damaged": "ckpt.errors",
}

__all__ = [
    "Best",
    "Checkpoints",
    "CkptError",
    "Damaged",
    "EveryN",
    "Latest",
    "ObjectReader",
    "ObjectWriter",
    "Pending",
    "PerRank",
    "Resumed",
    "Saved",
    "State",
    "Tail",
    "open",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ckpt' ({__file__}) has no attribute {name!r}")
