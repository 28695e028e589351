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
    """Limits for the recovery, in seconds from the fault."""

    detect_s: float = 30.0
    restart_s: float = 60.0
    first_step_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One drill of the book.

    ``summary`` and ``proves`` are one sentence each. ``meant_to_fail`` says why a good product must fail this
    drill; None for ordinary drills.
    """

    name: str
    summary: str
    proves: str
    faults: tuple[Fault, ...]
    when: When = field(default_factory=When)
    targets: Targets = field(default_factory=Targets)
    meant_to_fail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one invocation does: the drill by name, the target's command, and everything that was chosen for it.

    ``command`` holds the placeholders ``{url}`` and ``{log}``; ``resubmit`` is how often the drill starts the
    command again after it has ended with an error, as a scheduler would.
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


_SECRET = re.compile(r"(?i)((?:secret|password|token)\w*=).+")


def without_secrets(words: Iterable[str]) -> list[str]:
    """A command line fit for a report: ``secret=...``, ``password=...`` and ``token=...`` lose their values."""
    return [_SECRET.sub(r"\1***", word) for word in words]


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON; values of storage options stay out, since they may be secrets."""
    hidden = [[k, "***"] for k, _ in plan.storage_options]
    return {**asdict(plan), "command": without_secrets(plan.command), "storage_options": hidden}


def plan_from_json(raw: dict[str, Any]) -> Plan:
    """The plan of a saved history."""
    return Plan(**{
        **raw, "command": tuple(raw["command"]), "skip": tuple(raw["skip"]), "when": When(**raw["when"]),
        "targets": Targets(**raw["targets"]), "storage_options": tuple((k, v) for k, v in raw["storage_options"]),
    })  # fmt: skip
