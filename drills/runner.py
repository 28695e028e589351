"""Holds a drill: control run, drilled run with its faults, comparison. Always heals, always ends what it started."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
import time
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from drills import leftovers, oracle
from drills.controls import Shelf
from drills.errors import HarnessBroken, NotPossible, TargetEnded
from drills.faults import Site
from drills.faults.gates import FileGate, Gate, ProxyGate
from drills.faults.proxy import FaultProxy
from drills.history import CONTROL, DRILLED, History, Listener, Record, Run, load
from drills.scenario import Plan, Scenario
from drills.schedule import Moment, draw
from drills.strikes import Strikes
from drills.target import Job, fill
from drills.toml import to_dict

TICK_S = 10.0
MIN_READ_S = 60.0


def hold(plan: Plan, scenario: Scenario, folder: Path, listener: Listener = lambda event: None) -> Record:
    """Hold the drill in ``folder`` (must exist, empty) and return what happened; judging comes after.

    Whatever goes wrong with the harness is in the record, not raised; only an interrupt passes through, after
    everything that was started has been ended.
    """
    with History(folder, listener) as history:
        history.begin(plan, environment(), to_dict(scenario))
        for said in leftovers.heal():
            history.add("healed", said=said)
        drill = _Drill(plan, scenario, folder, history)
        leftovers.begin(drill.id, folder)
        try:
            drill.hold()
        except (TargetEnded, NotPossible) as e:
            history.add("ended.early", said=e.message, facts=e.facts, advice=e.hint)
        except HarnessBroken as e:
            said = "; ".join([e.message, *(f"{label}: {value}" for label, value in e.facts)])
            history.add("broke", said=said, facts=e.facts, advice=e.hint)
        except Exception as e:
            history.add("broke", said=f"{type(e).__name__}: {e}", traceback=traceback.format_exc())
        finally:
            drill.end_all()
            leftovers.end(drill.id)
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
    """The state of one drill while it is held; lends itself to the strikes as their ``Keeper``."""

    def __init__(self, plan: Plan, scenario: Scenario, folder: Path, history: History) -> None:
        self._plan, self._scenario, self._folder, self._history = plan, scenario, folder, history
        self.id = uuid.uuid4().hex[:12]
        self._deadline = time.monotonic() + plan.budget_s
        self._options = dict(plan.storage_options)
        self._jobs: list[Job] = []
        self._tick_due = 0.0
        self._proxy = self._open_proxy()
        self._strikes: Strikes | None = None

    def hold(self) -> None:
        """Control runs, then the drilled run, then the comparison."""
        self._possible()
        urls = {CONTROL: self._first_control()}
        others = [f"{CONTROL}-{n}" for n in range(2, self._plan.control_runs + 1)]
        for name in others:
            urls[name] = self._control(name, self._url(name)).url
        control = load(self._folder).runs[CONTROL]
        moment = self._draw(control)
        urls[DRILLED] = self._drilled(moment, control, self._survey(CONTROL, urls[CONTROL])).url
        surveys = {name: self._survey(name, url) for name, url in urls.items()}
        for right in (*others, DRILLED):
            self._compare(CONTROL, right, surveys)

    def end_all(self) -> None:
        """End what is still running, heal, and take away what stayed, whatever happened before."""
        for job in self._jobs:
            job.stop("the drill ended", grace_s=2.0)
            job.leftovers(grace_s=0.0)
        self._jobs.clear()
        if self._strikes is not None:
            self._strikes.heal(quiet=True)
            self._strikes.clear()
        if self._proxy is not None:
            self._proxy.__exit__()

    # --- what the strikes are lent -----------------------------------------------------------------------------------

    def step(self, job: Job, wait_s: float = 0.01) -> bool:
        """One look at a job, within the budget; true when the command has ended by itself."""
        job.poll(wait_s)
        if time.monotonic() >= self._tick_due:
            self._history.add("tick", run=job.name, step=job.last_step, workers=len(job.workers),
                              left_s=self._deadline - time.monotonic())  # fmt: skip
            self._tick_due = time.monotonic() + TICK_S
        if job.status is None and time.monotonic() >= self._deadline:
            self.end(job, f"the budget of {self._plan.budget_s:g} s was used up")
            return False
        return job.status is not None

    def end(self, job: Job, why: str | None) -> None:
        """End a job, and what it has left running."""
        job.stop(why)
        self._jobs.remove(job)
        job.leftovers()

    def runs(self, job: Job) -> bool:
        """Whether the job has not been ended yet."""
        return job in self._jobs

    def start_again(self, job: Job) -> bool:
        """Play the scheduler, as often as the plan allows."""
        if job.status in (0, None) or job.starts - job.asked_starts > self._plan.resubmit:
            return False
        job.start()
        return True

    def restart(self, job: Job, world: int) -> None:
        """Start the command again beside whatever lives, as a part of the drill."""
        nproc = self._plan.nproc
        job.argv = self._argv(job.name, job.url, None if nproc is None else nproc + world)
        job.asked_starts += 1
        job.start()

    # --- runs ----------------------------------------------------------------------------------------------------

    def _possible(self) -> None:
        """Refuse a drill that means nothing here, before anything is started."""
        local = self._plan.url_base.startswith("file://")
        needs = {self._scenario.needs, *(s.fault.needs for s in self._scenario.strikes)}
        if "s3" in needs and self._proxy is None:
            raise NotPossible(
                "the drill harms requests to S3, and no S3 endpoint over plain http was given",
                facts=[("checkpoints", self._plan.url_base)],
                hint="--url-base s3://bucket/prefix --storage-option endpoint_url=http://...",
            )
        if "local" in needs and not local:
            raise NotPossible("the drill fills a local disk", facts=[("checkpoints", self._plan.url_base)],
                              hint="without --url-base")  # fmt: skip
        if self._scenario.world_changes and self._plan.nproc is None:
            raise NotPossible("the drill changes the number of ranks, and the command has no placeholder {nproc}",
                              hint="torchrun --nproc-per-node {nproc} ..., with --nproc 2")  # fmt: skip
        least = min((s.fault.world for s in self._scenario.strikes), default=0)
        if self._plan.nproc is not None and self._plan.nproc + least < 1:
            raise NotPossible(f"{self._plan.nproc} ranks cannot become {-least} fewer", hint="--nproc 2")

    def _open_proxy(self) -> FaultProxy | None:
        """A proxy before S3, where it can be put there: an endpoint over plain http."""
        endpoint = urlsplit(self._options.get("endpoint_url", ""))
        if not self._plan.url_base.startswith("s3://") or endpoint.scheme != "http" or not endpoint.hostname:
            return None
        proxy = FaultProxy(endpoint.port or 80, seed=self._plan.seed, upstream_host=endpoint.hostname)
        return proxy.__enter__()

    def _env(self) -> dict[str, str]:
        """How the target is led to the proxy, and given the keys that the drill was given."""
        if self._proxy is None:
            return {}
        env = {"AWS_ENDPOINT_URL": self._proxy.endpoint, "AWS_ENDPOINT_URL_S3": self._proxy.endpoint}
        for name, option in (("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")):
            if option in self._options:
                env[name] = self._options[option]
        return env | ({} if "AWS_REGION" in os.environ else {"AWS_REGION": "us-east-1"})

    def _argv(self, name: str, url: str, nproc: int | None) -> list[str]:
        endpoint = self._proxy.endpoint if self._proxy else self._options.get("endpoint_url", "")
        log = self._folder / name / "log.jsonl"
        return fill(self._plan.command, url=url, log=log, nproc=nproc, endpoint=endpoint)

    def _job(self, name: str, url: str, env: Mapping[str, str]) -> Job:
        job = Job(name, argv=self._argv(name, url, self._plan.nproc), url=url, folder=self._folder / name,
                  owner=self._owner(name), env={**self._env(), **env}, history=self._history, options=self._options,
                  )  # fmt: skip
        job.start()
        self._jobs.append(job)
        self._tick_due = time.monotonic() + TICK_S
        return job

    def _url(self, name: str) -> str:
        return f"{self._plan.url_base}/{name}"

    def _owner(self, name: str) -> str:
        return f"{self.id}:{name}"

    def _first_control(self) -> str:
        """The control run, kept from an earlier drill where that is asked for and it is still whole; its URL."""
        if self._plan.controls is None:
            return self._control(CONTROL, self._url(CONTROL)).url
        shelf = Shelf(Path(self._plan.controls), self._plan)
        if kept := shelf.kept():
            url, commits = kept
            with contextlib.suppress(Exception):  # what cannot be listed cannot be taken
                if commits <= {c.name for c in oracle.Storage(url, self._options).commits()}:
                    shelf.take(self._folder, self._history)
                    return url
        self._control(CONTROL, shelf.url)
        shelf.keep(self._folder)
        return shelf.url

    def _control(self, name: str, url: str) -> Job:
        job = self._job(name, url, {})
        while job in self._jobs:
            if self.step(job, 0.02):
                self.end(job, None)
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

    def _draw(self, control: Run) -> Moment:
        committed = sorted({c.step for c in control.commits})
        first = committed[0] if committed else None
        world = len(control.log.ranks)
        try:
            moment = draw(self._plan.seed, self._plan.when, last_step=control.log.last_step, world=world,
                          first_commit=first, committed=committed)  # fmt: skip
        except ValueError as e:
            raise TargetEnded(f"no moment for the fault: {e}", hint="a longer run, or more frequent saves") from None
        self._history.add("moment", **asdict(moment), first_commit=first, last_step=control.log.last_step, world=world)
        return moment

    def _drilled(self, moment: Moment, control: Run, left: Mapping[str, Any]) -> Job:
        url = self._url(DRILLED)
        site = Site(folder=self._folder, owner=self._owner(DRILLED), rank=moment.rank, url=url, options=self._options,
                    proxy=self._proxy, step_bytes=int(left.get("bytes", 0)))  # fmt: skip
        gate: Gate | None = ProxyGate(self._proxy) if self._proxy else None
        if site.local is not None:
            gate = FileGate(self._folder / "gate")
        strikes = Strikes(
            self._scenario, self._plan, moment, step_s=control.log.step_seconds() or 0.0, world=len(control.log.ranks),
            site=site, gate=gate, history=self._history, keeper=self,
        )  # fmt: skip
        self._strikes = strikes
        job = self._job(DRILLED, url, strikes.setup())
        strikes.run(job)
        while job in self._jobs:
            if self.step(job, 0.02) and not self.start_again(job):
                self.end(job, None)
        strikes.heal()
        if job.status == 0:  # a fault of the way back cannot be proven where there was none, and need not be
            strikes.prove()
        if self._proxy is not None and not self._proxy.count():
            raise HarnessBroken("not one request of the target came through the drill's proxy",
                                hint="the target has to honour AWS_ENDPOINT_URL_S3, or take {endpoint}")  # fmt: skip
        return job

    # --- what is left, and reading it back ----------------------------------------------------------------------------

    def _survey(self, name: str, url: str) -> dict[str, Any]:
        try:
            found = oracle.Storage(url, self._options).survey()
        except Exception as e:  # no driver, no access: a reason for "not verified", not a failure of the target
            found = {"commits": [], "error": f"{type(e).__name__}: {str(e)[:300]}"}
        self._history.add("storage", run=name, **found)
        return {"url": url, **found}

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
