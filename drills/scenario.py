"""A drill as a value: faults, when they strike, the targets to meet, the checks that judge."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from drills.faults import Fault
from drills.schedule import When


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Limits for the recovery, in seconds from the fault (from its end, where the job endures it)."""

    detect_s: float = 30.0
    restart_s: float = 60.0
    first_step_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One fault at one moment. ``for_s``: it is healed after so many seconds; None: at the end, or not at all.

    ``until_back``: it is healed once the job that was started again has committed a step.
    """

    fault: Fault
    when: When = field(default_factory=When)
    for_s: float | None = None
    until_back: bool = False


REACTIONS = {
    "restart": "the launcher starts the ranks again, by itself",
    "endure": "no process ends, training goes on",
    "start again": "the job is down until the drill starts the command again, as a scheduler would",
    "any": "the job may endure it or come back",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One drill: strikes in their order, the reaction that is expected, the targets to meet.

    ``summary`` and ``proves`` are one sentence each. ``reaction`` is one of ``REACTIONS``; ``needs`` "s3" or "local"
    says on which storage the drill means something, "" on any. ``lossless``: not one step may be trained twice.
    Where
    ranks come or go (``world_changes``), steps are compared as a whole, and the state up to the first change.
    ``meant_to_fail`` says why a good product must fail this drill; None for ordinary drills.
    """

    name: str
    summary: str
    proves: str
    strikes: tuple[Strike, ...]
    reaction: str = "restart"
    needs: str = ""
    lossless: bool = False
    targets: Targets = field(default_factory=Targets)
    meant_to_fail: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be held, with ``ValueError``."""
        if not self.strikes:
            raise ValueError("a drill needs at least one strike")
        if self.reaction not in REACTIONS:
            raise ValueError(f"reaction = {self.reaction!r}: one of {', '.join(REACTIONS)}")
        if self.needs not in ("", "s3", "local"):
            raise ValueError(f"needs = {self.needs!r}: s3 or local")
        first = self.strikes[0].when
        if first.after == "back" or first.phase == "load":
            raise ValueError("the first strike cannot wait for the job to come back, or to load: nothing struck before")

    @property
    def world_changes(self) -> bool:
        """Whether the number of ranks changes in the drill."""
        return any(s.fault.world for s in self.strikes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one invocation does: the drill by name, the target's command, and everything that was chosen for it.

    ``command`` holds the placeholders ``{url}`` and ``{log}``; ``resubmit`` is how often the drill starts the
    command again after it has ended with an error, as a scheduler would. ``controls`` is the folder that keeps control
    runs for other drills of the same command; None: none is kept or taken.
    """

    drill: str
    command: tuple[str, ...]
    seed: int
    url_base: str
    when: When = field(default_factory=When)
    targets: Targets = field(default_factory=Targets)
    control_runs: int = 1
    budget_s: float = 600.0
    resubmit: int = 0
    skip: tuple[str, ...] = ()
    nproc: int | None = None
    storage_options: tuple[tuple[str, str], ...] = ()
    default_url: bool = True
    controls: str | None = None


HIDDEN = "***"
_PUBLIC = ("endpoint_url", "anon", "profile", "region")
_SECRET = re.compile(r"(?i)((?:secret|password|token)\w*=).+")


def without_secrets(words: Iterable[str]) -> list[str]:
    """A command line fit for a report: ``secret=...``, ``password=...`` and ``token=...`` lose their values."""
    return [_SECRET.sub(r"\1***", word) for word in words]


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON; values of storage options that may be secrets stay out."""
    hidden = [[k, v if k in _PUBLIC else HIDDEN] for k, v in plan.storage_options]
    return {**asdict(plan), "command": without_secrets(plan.command), "storage_options": hidden}


def plan_from_json(raw: dict[str, Any]) -> Plan:
    """The plan of a saved history."""
    return Plan(**{
        **raw, "command": tuple(raw["command"]), "skip": tuple(raw["skip"]), "when": When(**raw["when"]),
        "targets": Targets(**raw["targets"]), "storage_options": tuple((k, v) for k, v in raw["storage_options"]),
    })  # fmt: skip
