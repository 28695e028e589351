"""The checks: each a pure function from what happened to a verdict with its target, value and reason.

``not verified`` is said whenever something could not be looked at; it is never printed as good. A check of the
target's work says so too when the drill did not get that far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from drills.checks.equality import data_position, deterministic, losses, oracle_sees, rng, samples, state
from drills.checks.recovery import (
    control_run,
    detected,
    endured,
    fault_fired,
    finished,
    gave_up,
    nothing_again,
    nothing_left,
    phases,
    recovered,
    restarted,
    storage_left,
    undone,
    work_lost,
)  # fmt: skip
from drills.checks.verdict import EXIT_STATUS, Check, Verdict
from drills.history import Record
from drills.scenario import Scenario

__all__ = ["CHECKS", "EXIT_STATUS", "Check", "Verdict", "asked", "judge", "overall", "phases"]

CHECKS: dict[str, Callable[[Record], Check]] = {
    "control run": control_run, "deterministic": deterministic, "fault fired": fault_fired,
    "fault undone": undone, "run finished": finished, "noticed": detected, "restarted": restarted,
    "no restart": endured, "first new step": recovered, "work lost": work_lost, "nothing again": nothing_again,
    "old start gave up": gave_up,
    "state bitwise": state, "losses": losses, "samples": samples, "rng": rng, "data position": data_position,
    "nothing left running": nothing_left, "left on storage": storage_left, "oracle sees": oracle_sees,
}  # fmt: skip

_COMPARED = ("state bitwise", "losses", "samples", "rng", "data position")


def judge(record: Record, scenario: Scenario) -> list[Check]:
    """Every check that was asked for, in the order of the table."""
    names = [n for n in asked(scenario, control_runs=record.plan.control_runs) if n not in record.plan.skip]
    found = [CHECKS[n](record) for n in names]
    return _if_not_deterministic(found) if record.plan.control_runs > 1 else found


def asked(scenario: Scenario, *, control_runs: int = 1) -> list[str]:
    """The checks that mean something for a drill: what has to be endured is not judged by how it restarts."""
    out = {
        "deterministic": control_runs < 2, "oracle sees": scenario.meant_to_fail is None,
        "noticed": scenario.reaction != "restart", "restarted": scenario.reaction not in ("restart", "start again"),
        "no restart": scenario.reaction != "endure", "nothing again": not scenario.lossless,
        "rng": scenario.world_changes,
        "old start gave up": not any(s.fault.beside for s in scenario.strikes),
    }  # fmt: skip
    return [n for n in CHECKS if not out.get(n)]


def overall(checks: Iterable[Check], record: Record) -> Verdict:
    """The worst verdict: a broken harness before a failure, a failure before what was not verified."""
    found = {c.verdict for c in checks} | ({Verdict.BROKE} if record.broke else set())
    return next((v for v in (Verdict.BROKE, Verdict.FAIL, Verdict.UNKNOWN) if v in found), Verdict.PASS)


def _if_not_deterministic(found: list[Check]) -> list[Check]:
    """Where two undisturbed runs differ, a difference after the fault proves nothing against the target."""
    verdicts = {c.name: c.verdict for c in found}
    if verdicts.get("deterministic") is not Verdict.UNKNOWN:
        return found
    why = "the target is not deterministic: two undisturbed runs differ"
    return [
        replace(c, verdict=Verdict.UNKNOWN, detail=f"{why}; {c.detail}" if c.detail else why)
        if c.name in _COMPARED and c.verdict is Verdict.FAIL
        else c
        for c in found
    ]
