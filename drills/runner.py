"""Holds a drill: control run, drilled run with its faults, comparison. Always heals, always ends what it started."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import psutil

from drills import oracle
from drills.errors import HarnessBroken, TargetEnded
from drills.faults import Evidence, Fault, Site
from drills.history import CONTROL, DRILLED, History, Listener, Record, load
from drills.scenario import Plan, Scenario
from drills.schedule import Moment, draw
from drills.target import Job, fill
from drills.timeline import Log

T = TypeVar("T")

TICK_S = 10.0
MIN_READ_S = 60.0


def hold(plan: Plan, scenario: Scenario, folder: Path, listener: Listener = lambda event: None) -> Record:
    """Hold the drill in ``folder`` (must exist, empty) and return what happened; judging comes after.

    Whatever goes wrong with the harness is in the record, not raised; only an interrupt passes through, after
    everything that was started has been ended.
    """
    with History(folder, listener) as history:
        history.begin(plan, environment())
        drill = _Drill(plan, scenario, folder, history)
        try:
            drill.hold()
        except TargetEnded as e:
            history.add("ended.early", said=e.message, facts=e.facts, advice=e.hint)
        except HarnessBroken as e:
            said = "; ".join([e.message, *(f"{label}: {value}" for label, value in e.facts)])
            history.add("broke", said=said, facts=e.facts, advice=e.hint)
        except Exception as e:
            history.add("broke", said=f"{type(e).__name__}: {e}", traceback=traceback.format_exc())
        finally:
            drill.end_all()
            history.add("ended")
    return load(folder)


def environment() -> dict[str, str]:
    """What a reader needs to know of the machine and the software; no import of torch."""

    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    return {
        "python": platform.python_version(), "torch": version("torch"), "torchrelay": version("torchrelay"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}", "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB", "executable": sys.executable,
    }  # fmt: skip


class _Drill:
    """The state of one drill while it is held."""

    def __init__(self, plan: Plan, scenario: Scenario, folder: Path, history: History) -> None:
        self._plan, self._scenario, self._folder, self._history = plan, scenario, folder, history
        self._id = uuid.uuid4().hex[:12]
        self._deadline = time.monotonic() + plan.budget_s
        self._options = dict(plan.storage_options)
        self._jobs: list[Job] = []
        self._tick_due = 0.0

    def hold(self) -> None:
        """Control runs, then the drilled run, then the comparison."""
        controls = [CONTROL, *(f"{CONTROL}-{n}" for n in range(2, self._plan.control_runs + 1))]
        jobs = [self._control(name) for name in controls]
        moment = self._draw(jobs[0])
        drilled = self._drilled(moment, Log(tuple(jobs[0].lines)).step_seconds() or 0.0)
        surveys = {job.name: self._survey(job) for job in (*jobs, drilled)}
        for left, right in [(CONTROL, n) for n in (*controls[1:], DRILLED)]:
            self._compare(left, right, surveys)

    def end_all(self) -> None:
        """End what is still running, whatever happened before."""
        for job in self._jobs:
            job.stop("the drill ended", grace_s=2.0)
            job.leftovers(grace_s=0.0)
        self._jobs.clear()

    def _job(self, name: str, env: Mapping[str, str]) -> Job:
        url = f"{self._plan.url_base}/{name}"
        folder = self._folder / name
        argv = fill(self._plan.command, url=url, log=folder / "log.jsonl", nproc=self._plan.nproc)
        job = Job(name, argv=argv, url=url, folder=folder, owner=self._owner(name), env=env,
                  history=self._history, options=self._options)  # fmt: skip
        job.start()
        self._jobs.append(job)
        self._tick_due = time.monotonic() + TICK_S
        return job

    def _owner(self, name: str) -> str:
        return f"{self._id}:{name}"

    def _step(self, job: Job, wait_s: float = 0.01) -> bool:
        """One look at a job, within the budget; true when the command has ended by itself."""
        job.poll(wait_s)
        if time.monotonic() >= self._tick_due:
            self._history.add("tick", run=job.name, step=job.last_step, workers=len(job.workers),
                              left_s=self._deadline - time.monotonic())  # fmt: skip
            self._tick_due = time.monotonic() + TICK_S
        if job.status is None and time.monotonic() >= self._deadline:
            self._end(job, f"the budget of {self._plan.budget_s:g} s was used up")
            return False
        return job.status is not None

    def _end(self, job: Job, why: str | None) -> None:
        job.stop(why)
        self._jobs.remove(job)
        job.leftovers()

    def _control(self, name: str) -> Job:
        job = self._job(name, {})
        while job in self._jobs:
            if self._step(job, 0.02):
                self._end(job, None)
        if job.status != 0:
            out_of_time = job.stopped is not None
            what = "did not end within the budget" if out_of_time else f"ended with status {job.status}"
            raise TargetEnded(
                f"the {name} run {what}, undisturbed, at step {job.last_step}",
                facts=[("its words", str(job.folder / "stderr.txt"))],
                hint="a longer --budget, or a shorter run"
                if out_of_time
                else "make the command end well by itself first; only then a drill can say anything",
            )
        if not job.lines:
            raise TargetEnded(f"the {name} run ended well, but wrote no step to its log, so no moment can be drawn",
                              hint='let each rank append a JSON line a step: {"step": 1, "rank": 0, ...}')  # fmt: skip
        return job

    def _draw(self, control: Job) -> Moment:
        first = min((c.step for c in control.commits.values()), default=None)
        world = len({n.rank for n in control.lines})
        try:
            moment = draw(
                self._plan.seed, self._plan.when, last_step=control.last_step, world=world, first_commit=first
            )
        except ValueError as e:
            raise TargetEnded(f"no moment for the fault: {e}", hint="a longer run, or more frequent saves") from None
        self._history.add("moment", **asdict(moment), first_commit=first, last_step=control.last_step, world=world)
        return moment

    def _drilled(self, moment: Moment, step_s: float) -> Job:
        site = Site(folder=self._folder, owner=self._owner(DRILLED), rank=moment.rank)
        env: dict[str, str] = {}
        for fault in self._scenario.faults:
            env |= _bounded(fault, "setup", lambda f=fault: f.setup(site))  # type: ignore[misc]
        job = self._job(DRILLED, env)
        try:
            self._until_moment(job, moment, step_s)
            killed = self._inject(job, site)
            self._until_back(job, killed)
            self._until_end(job)
        finally:
            for fault in self._scenario.faults:
                said = _bounded(fault, "heal", lambda f=fault: f.heal(site))  # type: ignore[misc]
                self._history.add("fault.healed", fault=fault.name, said=said)
        if job.status == 0:  # a fault of the way back cannot be proven where there was none, and need not be
            for fault in self._scenario.faults:
                self._proved(fault, _bounded(fault, "prove", lambda f=fault: f.prove(site)))  # type: ignore[misc]
        return job

    def _until_moment(self, job: Job, moment: Moment, step_s: float) -> None:
        strike_at: float | None = None
        while strike_at is None or time.monotonic() < strike_at:
            if self._step(job) or job not in self._jobs:
                self._too_early(job, moment)
            if strike_at is None and job.last_step >= moment.step and (job.commits or not moment.needs_commit):
                strike_at = time.monotonic() + moment.fraction * step_s

    def _too_early(self, job: Job, moment: Moment) -> None:
        if job in self._jobs:
            self._end(job, None)
        if job.stopped:
            raise TargetEnded(f"{job.stopped} at step {job.last_step} of the drilled run, before the fault",
                              hint="a longer --budget, or a shorter run")  # fmt: skip
        if job.status != 0:
            raise TargetEnded(f"the drilled run ended by itself with status {job.status} at step {job.last_step},"
                              " before the fault", facts=[("its words", str(job.folder / "stderr.txt"))])  # fmt: skip
        reason = (
            "no commit was seen in time" if job.last_step >= moment.step else f"it never reached step {moment.step}"
        )
        raise HarnessBroken(f"the drilled run ended before the fault could strike: {reason}",
                            facts=[("commits", job.storage_error or "could be listed")],
                            hint="an earlier --at-step, or a longer run")  # fmt: skip

    def _inject(self, job: Job, site: Site) -> float:
        struck = time.time()
        for fault in self._scenario.faults:
            here = Site(folder=site.folder, owner=site.owner, rank=site.rank, workers=job.workers)
            evidence = _bounded(fault, "inject", lambda f=fault, s=here: f.inject(s))  # type: ignore[misc]
            if evidence:
                struck = evidence["t"]
            self._proved(fault, evidence)
        return struck

    def _proved(self, fault: Fault, evidence: Evidence | None) -> None:
        if evidence is not None:
            self._history.add("fault.proved", fault=fault.name, evidence=evidence)

    def _until_back(self, job: Job, struck: float) -> None:
        """Watch closely until a process that started after the fault has completed a step."""
        before = {n.pid for n in job.lines}
        limit = self._plan.targets.first_step_s
        job.scan_every_s = 0.04
        while job in self._jobs:
            ended = self._step(job)
            if any(n.pid not in before for n in job.lines):
                break
            if ended and not self._start_again(job):
                return
            if job in self._jobs and time.time() - struck > limit:
                self._end(job, f"no new step within {limit:g} s of the fault")
        job.scan_every_s = 0.2

    def _until_end(self, job: Job) -> None:
        while job in self._jobs:
            if self._step(job, 0.02) and not self._start_again(job):
                self._end(job, None)

    def _start_again(self, job: Job) -> bool:
        """Play the scheduler, as often as the plan allows."""
        if job.status == 0 or job.starts > self._plan.resubmit:
            return False
        job.start()
        return True

    def _survey(self, job: Job) -> dict[str, Any]:
        try:
            found = oracle.Storage(job.url, self._options).survey()
        except Exception as e:  # no driver, no access: a reason for "not verified", not a failure of the target
            found = {"commits": [], "error": f"{type(e).__name__}: {str(e)[:300]}"}
        self._history.add("storage", run=job.name, **found)
        return {"url": job.url, **found}

    def _compare(self, left: str, right: str, surveys: Mapping[str, dict[str, Any]]) -> None:
        self._history.add("reading", left=left, right=right)
        sides = []
        for name in (left, right):
            commits = [c for c in map(oracle.parse_commit, surveys[name]["commits"]) if c]
            sides.append((name, surveys[name]["url"], commits))
        if error := surveys[left].get("error") or surveys[right].get("error"):
            answer: dict[str, Any] = {
                "final": [None, None],
                "pairs": [],
                "reason": f"the storage cannot be read: {error}",
            }
        else:
            limit = max(MIN_READ_S, self._deadline - time.monotonic())
            answer = oracle.compare(sides[0], sides[1], options=self._options, timeout_s=limit)
        self._history.add("compared", left=left, right=right, **answer)


def _bounded(fault: Fault, what: str, call: Callable[[], T]) -> T:
    """Run a fault's call in a thread, so that one that hangs ends the drill instead of the person's evening."""
    box: list[T | BaseException] = []

    def run() -> None:
        try:
            box.append(call())
        except BaseException as e:
            box.append(e)

    thread = threading.Thread(target=run, name=f"{fault.name}-{what}", daemon=True)
    thread.start()
    thread.join(fault.timeout_s + 5)
    if not box:
        raise HarnessBroken(f"{what} of the fault {fault.name!r} took more than {fault.timeout_s + 5:g} s")
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]
