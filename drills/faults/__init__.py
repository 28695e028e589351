"""Faults: what they may touch, and what they owe.

Each fault is a frozen value with ``setup`` (before the drilled run starts), ``inject`` (at its moment), ``heal``
(when its time is over, and always at the end, also after an error), ``prove`` (after the run: did one that strikes by
itself really happen?) and ``clear`` (once everything has been read back). Each is bounded by ``timeout_s``. A fault
acts only on what the drill itself has started, and raises ``HarnessBroken`` when it cannot act or cannot prove that it
did; ``NotPossible`` where this machine or this storage does not allow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from drills.faults.proxy import FaultProxy
from drills.timeline import Proc

Evidence = dict[str, Any]
"""Facts for the report; ``t`` is when it happened, ``said`` one sentence for a person.

``gone_t`` says that it ended processes, ``pids`` which ones; ``good_step`` is the newest step that it left whole.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a strike inside a phase holds back: ``what`` is the file or request, of process ``pid`` and ``rank``."""

    phase: str
    what: str
    pid: int
    rank: int
    t: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a fault may touch: its own ``folder``, and ``workers``, processes of the drilled run by rank.

    ``owner`` is the mark that every process of the run carries in its environment; ``rank`` is the victim drawn, or
    the one that is ``held``; ``root`` is the process of the command. ``url`` is where the run keeps its checkpoints,
    ``options`` how fsspec reads it, ``proxy`` what stands between the target and S3, ``step_bytes`` what one
    undisturbed run left there."""

    folder: Path
    owner: str
    rank: int = 0
    workers: Mapping[int, Proc] = field(default_factory=dict)
    root: Proc | None = None
    url: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    proxy: FaultProxy | None = None
    step_bytes: int = 0
    held: Held | None = None

    @property
    def local(self) -> Path | None:
        """The folder of the run where it is on a local disk."""
        return Path(self.url.removeprefix("file://")) if self.url.startswith("file://") else None


class Fault(Protocol):
    """One thing that goes wrong. Implementations are frozen dataclasses; what happened travels as evidence."""

    @property
    def name(self) -> str:
        """Stable name, as in history and reports."""
        ...

    @property
    def timeout_s(self) -> float:
        """Seconds that each call may take."""
        ...

    @property
    def needs(self) -> str:
        """The storage it acts on: "s3", "local", or "" for any."""
        ...

    @property
    def then(self) -> str:
        """What the drill does next: "" nothing, "start again" the command, as a scheduler would."""
        ...

    @property
    def beside(self) -> bool:
        """Whether the start of before lives on while the command is started again."""
        ...

    @property
    def by_itself(self) -> bool:
        """Whether it waits in the target for its moment, and strikes there without the drill."""
        ...

    @property
    def world(self) -> int:
        """By how many ranks ``{nproc}`` changes when the command is started again."""
        ...

    def setup(self, site: Site) -> dict[str, str]:
        """Prepare, and return what must be added to the environment of the drilled run."""
        ...

    def inject(self, site: Site) -> Evidence | None:
        """Strike; None when the fault strikes by itself later."""
        ...

    def heal(self, site: Site) -> str:
        """Undo, and say what was undone. Called at least once; a second call finds nothing to do."""
        ...

    def prove(self, site: Site) -> Evidence | None:
        """After the run: evidence of a fault that struck by itself; None when ``inject`` gave it."""
        ...

    def clear(self, site: Site) -> None:
        """Take away what had to stay until the checkpoints were read back."""
        ...


class Base:
    """What most faults have in common: nothing to prepare, nothing that stays."""

    needs: str = ""
    then: str = ""
    world: int = 0
    by_itself: bool = False
    beside: bool = False

    def setup(self, site: Site) -> dict[str, str]:
        """Nothing to prepare."""
        return {}

    def heal(self, site: Site) -> str:
        """Nothing to undo."""
        return "nothing to undo"

    def prove(self, site: Site) -> Evidence | None:
        """Proven by ``inject``."""
        return None

    def clear(self, site: Site) -> None:
        """Nothing stays."""
