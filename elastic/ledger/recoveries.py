"""Every end of a run that another start followed: what it cost, and how long the way back took, phase by phase. Pure.

What the ledger cannot know is None, never 0: a process that dies alone is noticed by nobody in the run, and how its
agent shared the time until the next process between noticing, rendezvous and spawning is known to the agent alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from elastic.ledger.attempts import Attempt
from elastic.ledger.ends import End, rows_of
from elastic.ledger.goodput import Account, Part

PHASES: Mapping[str, str] = {
    "detect": "a rank is gone, until a survivor says so",
    "stop": "until the last old process has said its last",
    "respawn": "the agent: until the first new process exists (rendezvous and spawn)",
    "import": "a new process exists, until it asks for its process group",
    "join": "until all ranks have met (elastic.init)",
    "build": "until the run is entered: model, optimizer, data",
    "load": "choosing, reading and verifying the checkpoint",
    "first step": "until the first new step is complete",
}
"""Phase of a recovery -> what it is, in order."""
BUDGETS_S: Mapping[str, float] = {
    "detect": 60.0, "stop": 35.0, "respawn": 60.0, "import": 30.0, "join": 30.0, "build": 120.0, "load": 300.0,
    "first step": 120.0, "total": 600.0,
}  # fmt: skip
"""After how long a phase is worth a warning, where nothing else is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One way back. ``phases``: seconds, None where not known; ``total_s`` from the end to the first new step."""

    before: Part
    after: Part
    phases: Mapping[str, float | None]
    unsplit: Mapping[str, float]
    """Seconds of several phases together that cannot be told apart: "detect+stop+respawn", "import+join+build"."""
    total_s: float | None
    """None: no new step was made."""
    caught_up_s: float | None
    """Until the steps that were lost are done again; None: not reached."""
    waited: bool
    """The job itself had ended: the respawn is the wait for machines, or for somebody to start it."""

    @property
    def end(self) -> End:
        """What it is the way back from."""
        return self.before.end

    @property
    def lost_s(self) -> float:
        """Time of the work that was lost."""
        return self.before.seconds["lost"]

    def over(self, budgets: Mapping[str, float]) -> list[tuple[str, float, float]]:
        """(phase, seconds, budget) of the phases that took longer; the wait for machines has none."""
        found = [(p, s) for p, s in self.phases.items() if s is not None and not (p == "respawn" and self.waited)]
        if self.total_s is not None and not self.waited:
            found.append(("total", self.total_s))
        return [(p, s, budgets[p]) for p, s in found if p in budgets and s > budgets[p]]


def recoveries(account: Account) -> list[Recovery]:
    """All of them, oldest first."""
    pairs = zip(account.parts, account.parts[1:], strict=False)
    return [_recovery(a, b) for a, b in pairs if a.end.how in ("failure", "notice")]


def _recovery(before: Part, after: Part) -> Recovery:
    end, new = before.end, after.attempt
    phases: dict[str, float | None] = dict.fromkeys(PHASES)
    unsplit: dict[str, float] = {}
    born = max(new.born, end.died)
    if end.how == "notice":
        phases["detect"], phases["stop"], phases["respawn"] = 0.0, 0.0, max(0.0, born - end.gone)
    elif end.noticed is None:
        unsplit["detect+stop+respawn"] = born - end.died
    else:
        gone = min(end.gone, born)
        phases["detect"] = max(0.0, end.noticed - end.died)
        phases["stop"] = max(0.0, gone - end.noticed)
        phases["respawn"] = max(0.0, born - gone)
    first = _start(new, born, phases, unsplit)
    waited = not (new.restart_count is not None and new.restart_count > (before.attempt.restart_count or 0))
    return Recovery(
        before=before, after=after, phases=phases, unsplit=unsplit, total_s=None if first is None else first - end.died,
        caught_up_s=_caught_up(before, after), waited=waited,
    )  # fmt: skip


def _start(new: Attempt, born: float, phases: dict[str, float | None], unsplit: dict[str, float]) -> float | None:
    """Fill in the phases of the new processes, by the slowest rank of each; when their first step was complete."""
    stays = [s for s in new.stays.values() if s.entered is not None and s.resumed is not None]
    if not stays:
        return None
    entered = max(s.entered or 0.0 for s in stays)
    resumed = max(s.resumed or 0.0 for s in stays)
    marks = [s.seconds for s in stays]
    if all("import" in m and "join" in m for m in marks):
        phases["import"] = max(m["import"] for m in marks)
        phases["join"] = max(m["join"] for m in marks)
        phases["build"] = max(0.0, entered - born - (phases["import"] or 0.0) - (phases["join"] or 0.0))
    else:
        unsplit["import+join+build"] = max(0.0, entered - born)
    phases["load"] = max(0.0, resumed - entered)
    rows = rows_of(new)
    if not rows:
        return None
    at, _, row = rows[0]
    first = at if row.n == 1 else min(at, resumed + (at - resumed) / max(1, row.n))
    phases["first step"] = max(0.0, first - resumed)
    return first


def _caught_up(before: Part, after: Part) -> float | None:
    goal = before.steps[1]
    for at, step, _ in rows_of(after.attempt):
        if step >= goal:
            return at - before.end.died
    return None


def summary(found: list[Recovery]) -> dict[str, tuple[float, float]]:
    """Phase, and "total" -> (median, largest) over the recoveries in which it is known; waits for machines apart."""
    out = {}
    for phase in [*PHASES, "total"]:
        some = [r for r in found if not (r.waited and phase in ("respawn", "total"))]
        known = [s for r in some if (s := r.total_s if phase == "total" else r.phases[phase]) is not None]
        if known:
            out[phase] = (median(known), max(known))
    return out
