"""Time-outs that depend on each other: which order heals, and which one kills what it should heal. Pure.

Each rule compares two of the times; a time that is not given makes its rules "not verified". Where the numbers in the
reasons come from: drills with two hosts in network namespaces on torch 2.13 (splits with two keep-alive attempts: 5 of
5; with three and more: none).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic.launch.crew import KILL_S
from elastic.units import show_duration

GOOD, WARNING, WRONG, UNKNOWN = "good", "warning", "wrong", "not verified"


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """All in seconds; None: not known. Defaults are those of ``elastic launch`` and torch's gloo."""

    nodes: int = 1
    step_s: float | None = None
    """The longest usual step: its 99th percentile."""
    save_s: float | None = None
    """From the boundary at which a stop is seen to the commit."""
    load_s: float | None = None
    """From the first line of the script to the first step."""
    collective_s: float = 1800.0
    """Process-group time-out."""
    hang_s: float | None = None
    """``--hang-timeout``; None: learned."""
    quiet_s: float = 600.0
    shutdown_s: float = 30.0
    scheduler_s: float | None = None
    """From the scheduler's SIGTERM to its SIGKILL."""
    keep_alive_s: float = 1.0
    keep_alive_attempts: int = 5
    last_call_s: float = 3.0
    blind_s: float = 10.0
    """After which a host believes that its connection to the store is dead, and ends its ranks."""

    @property
    def lost_s(self) -> float:
        """After which others take a silent host for dead."""
        return self.keep_alive_s * self.keep_alive_attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one rule says. ``fix`` is the option to give."""

    rule: str
    verdict: str
    found: str
    why: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str
    low: Callable[[Times], float | None]
    high: Callable[[Times], float | None]
    """Good when ``low`` <= ``high``."""
    why: str
    fix: Callable[[float], str]
    worst: str = WRONG
    hosts: int = 1
    """With fewer hosts the rule does not apply."""


def _sum(*values: float | None) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if len(known) == len(values) else None


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _hang(t: Times) -> float | None:
    return t.hang_s if t.hang_s is not None else None if t.step_s is None else max(3.0, 3 * t.step_s)


_RULES = (
    _Rule("3 x step <= hang time-out", lambda t: _times(3, t.step_s), _hang,
          "a usual step would be taken for a hang", lambda s: f"--hang-timeout {s:.0f}s"),
    _Rule("hang time-out < process-group time-out", _hang, lambda t: t.collective_s,
          "all ranks would raise before the one that hangs is named",
          lambda s: f"elastic.init(timeout_s={s + 30:.0f})"),
    _Rule("3 x step <= process-group time-out", lambda t: _times(3, t.step_s), lambda t: t.collective_s,
          "a slow step would end the job", lambda s: f"elastic.init(timeout_s={max(10.0, s):.0f})"),
    _Rule("save <= process-group time-out", lambda t: t.save_s, lambda t: t.collective_s,
          "ranks that wait for one that saves would raise", lambda s: f"elastic.init(timeout_s={2 * s:.0f})"),
    _Rule("load <= process-group time-out", lambda t: t.load_s, lambda t: t.collective_s,
          "ranks that have loaded would raise while one still loads", lambda s: f"elastic.init(timeout_s={2 * s:.0f})"),
    _Rule("save, load <= quiet time-out",
          lambda t: None if t.save_s is None or t.load_s is None else max(t.save_s, t.load_s), lambda t: t.quiet_s,
          "a long save or load would be taken for a hang", lambda s: f"--quiet-timeout {2 * s:.0f}s"),
    _Rule("2 steps + save <= shutdown time-out",
          lambda t: _sum(_times(2, t.step_s), t.save_s), lambda t: t.shutdown_s,
          "on request the ranks finish a step, agree in the next and save: they would be killed in it",
          lambda s: f"--shutdown-timeout {1.5 * s:.0f}s"),
    _Rule(f"shutdown time-out + {KILL_S:.0f}s <= scheduler's grace", lambda t: t.shutdown_s + KILL_S,
          lambda t: t.scheduler_s, "the scheduler's SIGKILL would come before the last save is done",
          lambda s: f"terminationGracePeriodSeconds: {s:.0f}, or KillWait={s:.0f}, or a shorter --shutdown-timeout"),
    _Rule("3 <= keep-alive attempts", lambda t: 3.0, lambda t: float(t.keep_alive_attempts),
          "a beat comes up to two intervals late: fewer declare living hosts dead, and two worlds train at once",
          lambda s: "--rdzv-conf keep_alive_interval=1,keep_alive_max_attempt=5", hosts=2),
    _Rule("4s <= keep-alive x attempts", lambda t: 4.0, lambda t: t.lost_s,
          "a pause of a few seconds would split the job", lambda s: "--rdzv-conf keep_alive_interval=1,"
          "keep_alive_max_attempt=5", hosts=2),
    _Rule("3s <= last call", lambda t: 3.0, lambda t: t.last_call_s,
          "hosts look once a second: those that come a moment later would be left out, then restart all",
          lambda s: "--rdzv-conf last_call_timeout=3", hosts=2),
    _Rule("last call <= 15s", lambda t: t.last_call_s, lambda t: 15.0,
          "every loss of a host costs the last call on top", lambda s: "--rdzv-conf last_call_timeout=3",
          worst=WARNING, hosts=2),
    _Rule("store connection given up <= keep-alive + last call", lambda t: t.blind_s - 2.0,
          lambda t: t.lost_s + t.last_call_s,
          "a host that is cut off would still train when the others have begun anew",
          lambda s: "a longer keep_alive_max_attempt", worst=WARNING, hosts=2),
    _Rule("process-group time-out <= 10min", lambda t: t.collective_s, lambda t: 600.0,
          "under torchrun nobody else notices a cut link: ranks stand still for that long", lambda s:
          "elastic.init(timeout_s=600)", worst=WARNING, hosts=2),
)  # fmt: skip


def check(times: Times) -> list[Finding]:
    """What each rule that applies says, in a fixed order."""
    return [_judge(rule, times) for rule in _RULES if times.nodes >= rule.hosts]


def worst(findings: list[Finding]) -> str:
    """The gravest verdict among them."""
    order = (GOOD, UNKNOWN, WARNING, WRONG)
    return max((f.verdict for f in findings), key=order.index, default=GOOD)


def _judge(rule: _Rule, times: Times) -> Finding:
    low, high = rule.low(times), rule.high(times)
    if low is None or high is None:
        return Finding(
            rule=rule.name, verdict=UNKNOWN, found=f"{_show(rule, low)} <= {_show(rule, high)}", why=rule.why
        )
    good = low <= high
    return Finding(
        rule=rule.name, verdict=GOOD if good else rule.worst, found=f"{_show(rule, low)} <= {_show(rule, high)}",
        why=rule.why, fix=None if good else rule.fix(low),
    )  # fmt: skip


def _show(rule: _Rule, value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.0f}" if "attempts" in rule.name and "x" not in rule.name else show_duration(value)
