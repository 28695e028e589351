"""``every="auto"``: learns what saves cost and how often the job fails, and says when the next save is due.

Pure logic without clock, collective or torch. One rank asks :meth:`Pacer.due` and tells the others with whatever they
exchange at the step boundary anyway. The state belongs inside the checkpoint, so that learning survives restarts.

What is learned: the stall and the persist latency of saves and the excess of step times while one is uploaded
(moving averages with weight max(0.2, 1/k); means, not medians, are what the optimum needs), and the failure rate
as a Gamma posterior that forgets with a half-life of some failures, so that a rate which changes is followed. A rate
that was only assumed counts half as much after each failure seen: one job may fail a hundred times as often.
Unless ``costs`` are given, the first save is due after :data:`FIRST_SAVE_S` = 120 s of steps at the latest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.economics.inputs import (
    PRIOR_FAILURES,
    PRIOR_PER_1000_NODE_DAYS,
    BadInput,
    Costs,
    Job,
    Rates,
    not_negative,
    positive,
)
from elastic.economics.interval import Plan, recommend
from elastic.economics.posterior import node_rate, rate_of_job

ASSUMED_STALL_S = 10.0
"""Stall planned with until the first save was measured."""
FIRST_SAVE_S = 120.0
"""The first save comes no later than this: it measures the cost, and a job that is killed young keeps something."""
_LEAST_STALL_S = 1e-4
_TOLD = 0.1  # a change of the interval below this share is made but not told
_COUNTERS = ("failures", "saves", "early", "notice_saved", "notice_missed")
_AMOUNTS = (
    "a",
    "b_s",
    "prior_a",
    "prior_b_s",
    "exposure_s",
    "work_s",
    "stall_s",
    "persist_s",
    "excess_s",
    "step_s",
    "interval_s",
    "reported_s",
)


class Pacer:
    """Says when a save is due; learns from what it is told.

    Call on one rank, from one thread. ``step`` after every completed step, ``began`` when a save call has returned,
    ``saved`` when that save can be restored, ``resumed`` after a restart; then :meth:`due` is the answer.
    ``nodes`` sets the assumed failure rate (Gamma of shape 1.5, mean 7 per 1,000 node-days) unless ``rates`` gives a
    better one; ``costs`` are used until saves are measured. Raises :class:`BadInput` for values that cannot be true.
    """

    def __init__(
        self,
        *,
        nodes: int = 1,
        rates: Rates | None = None,
        costs: Costs | None = None,
        min_interval_s: float | None = None,
        max_interval_s: float | None = None,
        half_life_failures: float = 15.0,
    ) -> None:
        self._job = Job(nodes=nodes, min_interval_s=min_interval_s, max_interval_s=max_interval_s)
        self._half_life = positive(
            "half_life_failures", half_life_failures, "after how many failures half is forgotten"
        )
        self._assumed_rate = rates is None
        self.prior_a = self.prior_b_s = 0.0  # of a and b_s, what was assumed: halved by each failure seen
        if rates is None:
            self.a, self.b_s = PRIOR_FAILURES, PRIOR_FAILURES / (nodes * node_rate(PRIOR_PER_1000_NODE_DAYS))
            self.prior_a, self.prior_b_s = self.a, self.b_s
        else:
            prior = rate_of_job(rates, nodes)
            self.a, self.b_s = prior.a, prior.b_s
        self._costs = costs
        self.exposure_s = self.work_s = 0.0
        self.failures = self.saves = self.early = self.notice_saved = self.notice_missed = 0
        self.stall_s = ASSUMED_STALL_S if costs is None else max(costs.stall_s, _LEAST_STALL_S)
        self.persist_s = costs.persist_s if costs else 0.0
        self.excess_s = costs.slowdown * costs.persist_s if costs else 0.0
        self.step_s = self.interval_s = self.reported_s = 0.0
        self._uploading = self._frozen = False
        self._excess_now = 0.0
        self._events: list[dict[str, Any]] = []
        self._decide("start")

    # what happened -----------------------------------------------------------------------------------------------

    def step(self, step_seconds: float) -> None:
        """A step was completed in this time, save calls not included."""
        seconds = not_negative("step_seconds", step_seconds, "the time of the step in seconds")
        self.early = 0
        self.work_s += seconds
        self._live(seconds)
        if self._uploading and self.step_s:
            self._excess_now += seconds - self.step_s
        elif not self._uploading:
            self.step_s += (seconds - self.step_s) * (0.05 if self.step_s else 1.0)

    def began(self, stall_s: float) -> None:
        """A save call has returned after this stall; its upload goes on. Work is counted from here on."""
        self._live(not_negative("stall_s", stall_s, "the stall in seconds"))
        self.work_s, self._uploading, self._excess_now = 0.0, True, 0.0

    def saved(self, *, stall_s: float, persist_s: float = 0.0) -> None:
        """A save can be restored: it stalled training for ``stall_s`` and was durable ``persist_s`` after that.

        Without :meth:`began` before it the save is taken as made just now.
        """
        stall = not_negative("stall_s", stall_s, "the stall in seconds")
        persist = not_negative("persist_s", persist_s, "seconds from the end of the stall to a restorable save")
        if not self._uploading:
            self._live(stall)
            self.work_s = 0.0
        measured_slowdown = self._uploading and self.step_s > 0
        self._uploading = False
        self.saves += 1
        weight = max(0.2, 1 / self.saves)
        self.stall_s = max(_LEAST_STALL_S, self.stall_s + weight * (stall - self.stall_s))
        self.persist_s += weight * (persist - self.persist_s)
        if measured_slowdown:
            self.excess_s += weight * (max(0.0, self._excess_now) - self.excess_s)
        self._decide("save measured")

    def abandoned(self) -> None:
        """The save in flight failed: nothing is learned from it, and the next may start."""
        self._uploading = False

    def resumed(self, *, failures: int = 1, early: int = 0, lost_s: float | None = None) -> None:
        """The job runs again, from the state that was loaded into this pacer.

        ``failures``: unplanned ends after their first step since that state was saved, 0 after a planned stop.
        ``early``: ends before a first step; they lose no work and teach no rate, but three in a row are a crash loop.
        ``lost_s``: up-time since the state was saved; None: half an interval for each failure. :meth:`noticed` tells of
        stops with notice, which are none of these failures.
        """
        if failures < 0 or early < 0:
            raise BadInput("failures", "failures and early are counts: give zero or more")
        self._uploading, self.work_s = False, 0.0
        if lost_s is None:
            lost_s = failures * self.interval_s / 2
        lost = not_negative("lost_s", lost_s, "lost up-time in seconds") / max(failures, 1)
        for _ in range(max(failures, 1)):
            self._live(lost)
            self._failed(1 if failures else 0)
        self.early = early if failures else self.early + early
        if self.early >= 3:
            self._events.append(
                {
                    "event": "crash_loop",
                    "starts_without_a_step": self.early,
                    "hint": "no interval helps: find what ends the job at its start",
                }
            )
        self._decide("restart" if not failures else f"{failures} failure{'s' if failures > 1 else ''}")

    def noticed(self, *, saved: bool) -> None:
        """A stop came with notice; whether its save was durable in time. It counts as an interruption at once."""
        self.notice_saved += saved
        self.notice_missed += not saved
        self._failed(1)
        self._decide("stop with notice")

    # what to do --------------------------------------------------------------------------------------------------

    def due(self) -> bool:
        """Whether to save at this step boundary. Never while an upload is under way, so saves do not queue."""
        return not self._uploading and self.work_s > 0 and self.work_s + self.step_s / 2 >= self.interval_s

    should_save = due

    def fits(self, notice_s: float) -> bool:
        """Whether a save started at the next step boundary would be durable within a notice of that length."""
        return self.step_s + self.stall_s + self.persist_s <= notice_s

    def freeze(self) -> None:
        """Keep the interval as it is from now on, for runs that must be repeatable; learning goes on."""
        self._frozen = True

    def plan(self) -> Plan:
        """The recommendation behind the interval, with its forecast."""
        slowdown = min(0.9, self.excess_s / self.persist_s) if self.persist_s > 0 else 0.0
        base = self._costs
        costs = Costs(
            stall_s=self.stall_s,
            persist_s=self.persist_s,
            slowdown=slowdown,
            commit=base.commit if base else "eager",
            in_flight="one",
            detect_s=base.detect_s if base else 0.0,
            reschedule_s=base.reschedule_s if base else 0.0,
            load_s=base.load_s if base else 0.0,
            warmup_s=base.warmup_s if base else 0.0,
        )
        notices = self.notice_saved + self.notice_missed
        rates = Rates(
            mtbf_s=self.b_s / self.a,
            notice_saved=self.notice_saved if notices else None,
            notice_missed=max(self.notice_missed, self.failures - self.notice_saved) if notices else None,
        )
        return recommend(rates, costs, self._job)

    def pop_events(self) -> list[dict[str, Any]]:
        """What was decided since the last call, each with the inputs it came from; for the run's ledger."""
        out, self._events = self._events, []
        return out

    def state_dict(self) -> dict[str, int | float]:
        """All that was learned, as plain numbers."""
        state: dict[str, int | float] = {"version": 1, "frozen": int(self._frozen)}
        state.update({name: getattr(self, name) for name in (*_AMOUNTS, *_COUNTERS)})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was learned before. Raises :class:`BadInput` for a state of another version or damaged one."""
        if state.get("version") != 1:
            raise BadInput("version", f"pacer state of version {state.get('version')!r}: this release reads version 1")
        values = {
            name: not_negative(name, state.get(name), "a pacer state as saved") for name in (*_AMOUNTS, *_COUNTERS)
        }
        positive("a", values["a"], "a pacer state as saved")
        positive("b_s", values["b_s"], "a pacer state as saved")
        for name, value in values.items():
            setattr(self, name, int(value) if name in _COUNTERS else value)
        self._uploading, self._excess_now, self._events = False, 0.0, []
        self._frozen = bool(state.get("frozen", 0))

    # how ---------------------------------------------------------------------------------------------------------

    def _live(self, seconds: float) -> None:
        keep = max(1e-3, 0.5 ** (seconds * self.a / (self._half_life * self.b_s)))  # a clock's jump forgets not all
        self.a *= keep
        self.b_s = self.b_s * keep + seconds
        self.prior_a, self.prior_b_s = self.prior_a * keep, self.prior_b_s * keep
        self.exposure_s += seconds

    def _failed(self, times: int) -> None:
        for _ in range(times):
            self.prior_a, self.prior_b_s = self.prior_a / 2, self.prior_b_s / 2
            self.a, self.b_s = self.a - self.prior_a + 1, self.b_s - self.prior_b_s
            self.failures += 1

    def _decide(self, because: str) -> None:
        if self._frozen:
            return
        interval = self.plan().interval_s
        if not self.saves and self._costs is None:
            interval = max(min(interval, FIRST_SAVE_S), self._job.min_interval_s or 0.0)
        self.interval_s = interval
        if self.reported_s and abs(interval / self.reported_s - 1) < _TOLD:
            return
        assumed = (["stall_s"] if not self.saves and self._costs is None else []) + (
            ["mtbf_s"] if self._assumed_rate and not self.failures else []
        )
        self._events.append(
            {
                "event": "interval",
                "interval_s": interval,
                "was_s": self.reported_s or None,
                "because": because,
                "mtbf_s": self.b_s / self.a,
                "failures": self.failures,
                "exposure_s": self.exposure_s,
                "stall_s": self.stall_s,
                "persist_s": self.persist_s,
                "slowdown_s": self.excess_s,
                "assumed": assumed,
            }
        )
        self.reported_s = interval
