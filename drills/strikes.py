"""Carries out the strikes of a drill on the running job: waits for each moment, injects, heals, starts again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from drills.errors import HarnessBroken, NotPossible, TargetEnded
from drills.faults import Evidence, Fault, Held, Site
from drills.faults.gates import Gate
from drills.faults.planting import merged
from drills.history import History
from drills.scenario import Plan, Scenario, Strike
from drills.schedule import Moment, draw_again
from drills.target import Job

T = TypeVar("T")


class Keeper(Protocol):
    """What the drill lends: it looks at the job within the budget, ends it, and plays the scheduler."""

    def step(self, job: Job, wait_s: float = 0.01) -> bool:
        """One look; true when the command has ended by itself."""
        ...

    def end(self, job: Job, why: str | None) -> None:
        """End the job, and all that is left of it."""
        ...

    def runs(self, job: Job) -> bool:
        """Whether the job has not been ended yet."""
        ...

    def start_again(self, job: Job) -> bool:
        """Start the command again after an error, as often as the plan allows."""
        ...

    def restart(self, job: Job, world: int) -> None:
        """Start the command again beside whatever lives, with so many ranks more or less."""
        ...


@dataclass(slots=True)
class _Active:
    """A strike with its name in reports, and what became of it."""

    label: str
    strike: Strike
    healed: bool = False


class Strikes:
    """The strikes of one drill. ``setup`` first, then ``run``, ``heal`` and ``prove``; ``clear`` after the reading."""

    def __init__(
        self, scenario: Scenario, plan: Plan, moment: Moment, *, step_s: float, world: int, site: Site,
        gate: Gate | None, history: History, keeper: Keeper,
    ) -> None:  # fmt: skip
        self._plan, self._moment, self._step_s, self._world = plan, moment, step_s, world
        self._site, self._gate, self._history, self._keeper = site, gate, history, keeper
        self._struck: list[float] = []
        self._before: set[int | None] = set()
        self._ends = False
        self._all = [_Active(label, s) for label, s in zip(labels(scenario), scenario.strikes, strict=True)]

    def setup(self) -> dict[str, str]:
        """Prepare all of them, and return what the drilled run needs in its environment."""
        env: dict[str, str] = {}
        for a in self._all:
            fault = a.strike.fault
            env = merged(env, bounded(fault, "setup", lambda f=fault: f.setup(self._site)))  # type: ignore[misc]
        if any(a.strike.when.phase for a in self._all):
            if self._gate is None:
                raise NotPossible("moments inside a save, a commit or a load cannot be held on this storage",
                                  facts=[("checkpoints", self._site.url)])  # fmt: skip
            env = merged(env, self._gate.env())
        return env

    def run(self, job: Job) -> None:
        """Strike after strike, until the last one has been answered by a step, or the job has ended."""
        for number, a in enumerate(self._all):
            if a.strike.fault.by_itself:
                self._call(a, "inject", self._site)
                continue
            if number and not self._wait_again(job, number, a):
                return
            if not number:
                self._wait_first(job, a)
            held = self._hold(job, a, number)
            if held is None and a.strike.when.phase:
                return
            self._strike(job, a, number, held)
        if self._ends:
            self._until_back(job)

    def heal(self, *, quiet: bool = False) -> None:
        """Heal what has not been healed yet; ``quiet``: an error is noted, not raised."""
        if self._gate is not None:
            self._gate.open(drop=False)
        for a in self._all:
            if not a.healed:
                try:
                    self._heal(a)
                except HarnessBroken as e:
                    if not quiet:
                        raise
                    self._history.add("broke", said=e.message)

    def prove(self) -> None:
        """Evidence of faults that struck by themselves."""
        for a in self._all:
            evidence = bounded(a.strike.fault, "prove", lambda f=a.strike.fault: f.prove(self._site))  # type: ignore[misc]
            if evidence is not None:
                self._history.add("fault.proved", fault=a.label, evidence=evidence)

    def clear(self) -> None:
        """Take away what had to stay until everything was read back."""
        for a in self._all:
            bounded(a.strike.fault, "clear", lambda f=a.strike.fault: f.clear(self._site))  # type: ignore[misc]

    # --- waiting ---------------------------------------------------------------------------------------------------

    def _wait_first(self, job: Job, a: _Active) -> None:
        moment, strike_at = self._moment, None
        while strike_at is None or time.monotonic() < strike_at:
            if self._keeper.step(job) or not self._keeper.runs(job):
                self._too_early(job)
            if strike_at is None and job.last_step >= moment.step and (job.commits or not moment.needs_commit):
                late = 0.0 if a.strike.when.phase else moment.fraction * self._step_s
                strike_at = time.monotonic() + late + a.strike.when.wait_s

    def _too_early(self, job: Job) -> None:
        if self._keeper.runs(job):
            self._keeper.end(job, None)
        if job.stopped:
            raise TargetEnded(f"{job.stopped} at step {job.last_step} of the drilled run, before the fault",
                              hint="a longer --budget, or a shorter run")  # fmt: skip
        if job.status != 0:
            raise TargetEnded(f"the drilled run ended by itself with status {job.status} at step {job.last_step},"
                              " before the fault", facts=[("its words", str(job.folder / "stderr.txt"))])  # fmt: skip
        reason = (
            "no commit was seen in time"
            if job.last_step >= self._moment.step
            else f"it never reached step {self._moment.step}"
        )
        raise HarnessBroken(f"the drilled run ended before the fault could strike: {reason}",
                            facts=[("commits", job.storage_error or "could be listed")],
                            hint="an earlier --at-step, or a longer run")  # fmt: skip

    def _wait_again(self, job: Job, number: int, a: _Active) -> bool:
        """Until a later strike may come; false when the job is not there for it any more."""
        when = a.strike.when
        if when.phase != "load":
            if when.after in ("back", "commit") and not self._until_back(job):
                return self._gone(job, a)
            if when.after == "commit" and not self._until(job, lambda: self._commits_since(job) >= when.commits):
                return self._gone(job, a)
        _, fraction = draw_again(self._plan.seed, number, when, world=self._world)
        end = time.monotonic() + when.wait_s + (0 if when.phase else fraction * self._step_s)
        while time.monotonic() < end:
            if self._keeper.step(job) and not self._keeper.start_again(job):
                return self._gone(job, a)
        return True

    def _commits_since(self, job: Job) -> int:
        return sum(1 for c in job.commits.values() if c.seen is not None and c.seen > self._struck[-1])

    def _gone(self, job: Job, a: _Active) -> bool:
        """A job that failed is judged for it; one that came to its end cannot be struck any more."""
        if job.status == 0 and not job.stopped:
            raise HarnessBroken(f"the drilled run came to its end before the fault {a.label!r} could strike",
                                hint="a longer run")  # fmt: skip
        return False

    def _hold(self, job: Job, a: _Active, number: int) -> Held | None:
        """Wait inside the phase of the strike, if it has one, for somebody to be held."""
        phase = a.strike.when.phase
        if phase is None or self._gate is None:
            return None
        self._gate.close(phase, self._moment.step - 1 if not number else job.last_step - 1)
        found: list[Held] = []

        def look() -> bool:
            root = job.root()  # a command without a launcher is its own rank, and may have logged nothing yet
            known = job.workers or ({0: root} if root else {})
            if held := self._gate.held(known) if self._gate else None:
                found.append(held)
            return bool(found)

        if not self._until(job, look) or not found:
            self._gate.open(drop=False)
            if job.status == 0 and not job.stopped:
                raise NotPossible(f"no {phase} was seen after step {self._moment.step}, so none could be held",
                                  facts=[("looked for", "names below steps/ and commits/ of the run")],
                                  hint="a longer run, or more frequent saves")  # fmt: skip
            return None
        held = found[0]
        if held.pid and held.rank >= 0:
            job.adopt(held.rank, held.pid)
        self._history.add("held", phase=phase, what=held.what, pid=held.pid, rank=held.rank)
        return held

    def _until(self, job: Job, reached: Callable[[], bool]) -> bool:
        """Look at the job until something is reached; false when it ends before."""
        while not reached():
            if self._keeper.step(job) and not self._keeper.start_again(job):
                return reached()
            if not self._keeper.runs(job):
                return False
        return True

    def _until_back(self, job: Job) -> bool:
        """Watch closely until a process that started after the last strike has done a step, within the limit.

        Where the strike ended nobody: until anybody has done one.
        """
        limit, struck = self._plan.targets.first_step_s, self._struck[-1]
        if not self._ends:
            return self._until(job, lambda: job.arrived > struck)
        job.scan_every_s = 0.04
        while self._keeper.runs(job):
            ended = self._keeper.step(job)
            if any(n.pid not in self._before for n in job.lines):
                job.scan_every_s = 0.2
                return True
            if ended and not self._keeper.start_again(job):
                return False
            if self._keeper.runs(job) and time.time() - struck > limit:
                self._keeper.end(job, f"no new step within {limit:g} s of the fault")
        return False

    # --- striking --------------------------------------------------------------------------------------------------

    def _strike(self, job: Job, a: _Active, number: int, held: Held | None) -> None:
        fault = a.strike.fault
        rank = self._moment.rank
        if number:
            rank, _ = draw_again(self._plan.seed, number, a.strike.when, world=self._world)
        if held and held.rank >= 0:
            rank = held.rank
        here = replace(self._site, rank=rank, workers=job.workers, root=job.root(), held=held)
        self._before = {n.pid for n in job.lines} | {p.pid for p in job.workers.values()}
        evidence = self._call(a, "inject", here)
        if evidence is None:
            return
        self._struck.append(float(evidence["t"]))
        self._ends = "gone_t" in evidence
        self._history.add("fault.proved", fault=a.label, evidence=evidence)
        if held and self._gate is not None and not a.strike.until_back:
            self._gate.open(drop="gone_t" in evidence)
        if fault.then == "start again":
            if stale := evidence.get("stale"):
                self._history.add("overtaken", run=job.name, pids=stale)
            self._keeper.restart(job, fault.world)
        if a.strike.for_s is not None:
            end = time.monotonic() + a.strike.for_s
            self._until(job, lambda: time.monotonic() >= end)
            self._heal(a, job)
        if a.strike.until_back:
            self._until_back(job)
            self._until(job, lambda: self._commits_since(job) > 0)
            if self._gate is not None:
                self._gate.open(drop=False)
            self._heal(a, job)

    def _call(self, a: _Active, what: str, site: Site) -> Evidence | None:
        fault = a.strike.fault
        return bounded(fault, what, lambda: fault.inject(site))

    def _heal(self, a: _Active, job: Job | None = None) -> None:
        a.healed = True
        site = self._site if job is None else replace(self._site, workers=job.workers)
        said = bounded(a.strike.fault, "heal", lambda: a.strike.fault.heal(site))
        self._history.add("fault.healed", fault=a.label, said=said)


def labels(scenario: Scenario) -> list[str]:
    """A name for each strike: that of its fault, and a number where it comes again."""
    names: list[str] = []
    for s in scenario.strikes:
        count = sum(1 for n in names if n.partition("#")[0] == s.fault.name)
        names.append(s.fault.name if not count else f"{s.fault.name}#{count + 1}")
    return names


def bounded(fault: Fault, what: str, call: Callable[[], T]) -> T:
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
