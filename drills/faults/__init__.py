"""Faults: what they may touch, and what they owe.

Each fault is a frozen value with ``setup`` (before the drilled run starts), ``inject`` (at the drawn moment),
``prove`` (after the run: did it really happen?) and ``heal`` (always, also after an error). Each is bounded by
``timeout_s``. A fault acts only on what the drill itself has started, and raises ``HarnessBroken`` when it cannot
act or cannot prove that it did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from drills.timeline import Proc

Evidence = dict[str, Any]
"""Facts for the report; ``t`` is when it happened, ``said`` one sentence for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a fault may touch: its own ``folder``, and ``workers``, processes of the drilled run by rank.

    ``owner`` is the mark that every process of the run carries in its environment; ``rank`` is the victim drawn.
    """

    folder: Path
    owner: str
    rank: int = 0
    workers: Mapping[int, Proc] = field(default_factory=dict)


class Fault(Protocol):
    """One thing that goes wrong. Implementations are frozen dataclasses; what happened travels as evidence."""

    @property
    def name(self) -> str:
        """Stable name, as in history and reports."""
        ...

    @property
    def timeout_s(self) -> float:
        """Seconds that each of the four calls may take."""
        ...

    def setup(self, site: Site) -> dict[str, str]:
        """Prepare, and return what must be added to the environment of the drilled run."""
        ...

    def inject(self, site: Site) -> Evidence | None:
        """Strike; None when the fault strikes by itself later."""
        ...

    def prove(self, site: Site) -> Evidence | None:
        """After the run: evidence of a fault that struck by itself; None when ``inject`` gave it."""
        ...

    def heal(self, site: Site) -> str:
        """Undo, and say what was undone."""
        ...
