"""Ledgers as ``elastic.Run`` writes them, of a job whose every second is known: what accounting has to find again."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.ledger.events import (
    Error,
    Event,
    Finished,
    LastSeen,
    Metric,
    Payload,
    Resumed,
    RunStarted,
    SaveCommitted,
    SaveStarted,
    Steps,
    utc,
)
from elastic.ledger.quantiles import Quantiles

T0 = 1_700_000_000.0


@dataclass(kw_only=True)
class Job:
    """A job to write the ledger of; times in seconds. ``kills``: (at which step of the whole count, rank)."""

    world: int = 2
    steps: int = 100
    every: int = 20
    pulse: int = 7
    kills: Sequence[tuple[int, int]] = ()
    start: float = 3.0
    load: float = 1.5
    warm: float = 0.8
    body: float = 0.5
    data: float = 0.05
    between: float = 0.01
    stall: float = 0.2
    persist: float = 0.7
    detect: float = 0.4
    stop: float = 0.3
    respawn: float = 1.1
    tokens: float = 1000.0
    last_seen: bool = True
    cpu: Sequence[float] = ()
    """CPU seconds of a step's body, by rank."""
    slow_data: dict[int, float] = field(default_factory=dict)
    """Rank -> its own wait for data, within the others' bodies."""
    all_rows: bool = False
    """Every rank writes a row where rank 0 gives a sign of life."""
    jitter: float = 0.0
    seed: int = 0
    host: str = "node0"


class Written:
    """``events`` in the order in which they were written, and ``truth``, the seconds by cause."""

    def __init__(self, job: Job) -> None:
        self.job, self.rng = job, random.Random(job.seed)
        self.events: list[Event] = []
        self.truth = dict.fromkeys(("training", "data", "save", "lost", "detect", "restart", "load", "other"), 0.0)
        self.step_times: list[float] = []
        self.lost_steps = 0
        self.began = self.t = T0
        self._write()
        self.wall = self.t - self.began

    def _say(self, epoch: int, rank: int, step: int, at: float, data: Payload, *, unix: float | None = None) -> None:
        base: dict[str, Any] = {"epoch": f"e{epoch:08d}", "generation": f"g{epoch}", "start": f"s{epoch}r{rank}"}
        base |= {"rank": rank, "world": self.job.world, "step": step, "host": self.job.host, "pid": 1000 * epoch + rank}
        time = utc(at if unix is None else unix)
        self.events.append(Event(**base, time=time, mono_s=at - T0 + 50.0 * rank, data=data))

    def _write(self) -> None:
        job, done, saved, kills = self.job, 0, 0, list(self.job.kills)
        epoch, seen = 0, None
        while done < job.steps:
            epoch += 1
            kill = kills.pop(0) if kills else None
            done = saved
            born = self.t
            self.t += job.start
            entered = self.t
            self.t += job.load
            self.truth["restart"] += job.start
            self.truth["load"] += job.load
            attempt = f"{done:012d}-e{epoch - 1:08d}-0" if done else None
            for r in range(job.world):
                self._say(epoch, r, done, self.t, RunStarted(url="u", every=str(job.every), restart_count=epoch - 1),
                          unix=entered)  # fmt: skip
                seconds = {"start": entered - born, "resume": job.load}
                self._say(epoch, r, done, self.t, Resumed(attempt=attempt, rng="fresh", seconds=seconds))
            if seen is not None and job.last_seen:
                for rank, at, steps, sums in seen:
                    self._say(epoch, rank, done, self.t, LastSeen(of_epoch=f"e{epoch - 1:08d}", of_rank=rank,
                              of_start=f"s{epoch - 1}r{rank}", unix_s=at, steps=steps, **sums))  # fmt: skip
            done, saved, seen = self._train(epoch, done, saved, kill)

    def _train(self, epoch: int, done: int, saved: int, kill: tuple[int, int] | None) -> Any:
        job = self.job
        open_: list[dict[str, Any]] = [self._fresh() for _ in range(job.world)]
        spent: list[tuple[int, dict[str, float]]] = []  # by step, since the start
        resumed, committing, before = done, None, 0.0
        while done < job.steps:
            body = job.body * (1 + job.jitter * self.rng.uniform(-1, 1))
            first = done == resumed
            if kill is not None and done == kill[0]:
                return self._die(epoch, done, saved, kill[1], body / 2, open_, spent)
            self.t += job.data + body + (job.warm if first else 0.0)
            done += 1
            own = {"training": body, "data": job.data, "restart": job.warm if first else 0.0, "other": 0.0, "save": 0.0}
            self.step_times.append(before + job.data + body + (job.warm if first else 0.0))
            for r, sums in enumerate(open_):
                extra = job.slow_data.get(r, 0.0)
                sums["n"] += 1
                sums["seconds"] += body + (job.warm if first else 0.0) - extra
                sums["data_s"] += job.data + extra
                sums["cpu_s"] += job.cpu[r] if job.cpu else 0.0
                sums["times"].append(self.step_times[-1])
                sums["at"], sums["done"] = self.t, done
            before = 0.0
            if committing is not None and self.t >= committing[1]:
                saved = committing[0]
                for r in range(job.world):
                    self._say(epoch, r, saved, self.t, SaveCommitted(attempt=f"{saved:012d}-e{epoch:08d}-0", bytes=1000,
                              stall_s=job.stall, persist_s=job.persist, stall_max_s=job.stall))  # fmt: skip
                    self._row(epoch, r, done, open_)
                committing = None
            if first or (done - resumed) % job.pulse == 0:
                for r in range(job.world if job.all_rows else 1):
                    self._row(epoch, r, done, open_)
            last = done == job.steps
            if last or (done % job.every == 0 and committing is None):
                for r in range(job.world):
                    self._row(epoch, r, done, open_)
                    self._say(epoch, r, done, self.t, SaveStarted(reason="end" if last else "steps"))
                if last:
                    self._finish(epoch, done, spent, own)
                    return done, done, None
                self.t += job.stall
                own["save"] = job.stall
                committing = (done, self.t + job.persist)
                for sums in open_:
                    sums["boundary_s"] += job.stall
                    sums["save_s"] += job.stall
            self.t += job.between
            own["other"] = before = job.between
            for sums in open_:
                sums["boundary_s"] += job.between
                sums["at"] = self.t
            spent.append((done, own))
        raise AssertionError("a job ends at its last step")

    def _finish(self, epoch: int, done: int, spent: list[tuple[int, dict[str, float]]], own: dict[str, float]) -> None:
        own["save"] = self.job.stall + self.job.persist
        self.t += own["save"]
        for r in range(self.job.world):
            self._say(epoch, r, done, self.t, SaveCommitted(attempt=f"{done:012d}-e{epoch:08d}-0", bytes=1000,
                      stall_s=self.job.stall, persist_s=self.job.persist))  # fmt: skip
            self._say(epoch, r, done, self.t, Finished(until=done))
        self._book([*spent, (done, own)], math.inf)

    def _die(self, epoch: int, done: int, saved: int, rank: int, into: float, open_: Any, spent: Any) -> Any:
        job = self.job
        self.t += into
        self.truth["lost"] += into
        self.truth["detect"] += job.detect
        self.truth["restart"] += job.stop + job.respawn
        survivors = [r for r in range(job.world) if r != rank]
        for n, r in enumerate(survivors):
            late = 0.0 if n == 0 else job.stop
            self._row(epoch, r, done, open_, at=self.t + job.detect + late)
            self._say(epoch, r, done, self.t + job.detect + late, Error(error="C-R", message="a rank did not come"))
        if len(survivors) > 1:
            self.t += job.detect + job.stop + job.respawn
        else:
            self.t += job.detect + job.respawn
            self.truth["restart"] -= job.stop
        self._book(spent, saved)
        self.lost_steps += done - saved
        names = ("n", "seconds", "data_s", "boundary_s", "save_s")
        seen = [(rank, open_[rank]["at"], open_[rank]["done"], {k: open_[rank][k] for k in names})]
        return done, saved, seen if open_[rank]["at"] else None

    def _book(self, spent: Sequence[tuple[int, dict[str, float]]], kept: float) -> None:
        for step, own in spent:
            for cause, seconds in own.items():
                self.truth["lost" if step > kept and cause not in ("save", "restart") else cause] += seconds

    @staticmethod
    def _fresh() -> dict[str, Any]:
        return {"n": 0, "seconds": 0.0, "data_s": 0.0, "boundary_s": 0.0, "save_s": 0.0, "cpu_s": 0.0, "times": [],
                "at": 0.0, "done": 0}  # fmt: skip

    def _row(self, epoch: int, rank: int, done: int, open_: list[dict[str, Any]], at: float | None = None) -> None:
        sums, job = open_[rank], self.job
        if not sums["n"]:
            return
        n = sums["n"]
        self._say(epoch, rank, done, self.t if at is None else at, Steps(
            n=n, seconds=sums["seconds"], min_s=sums["seconds"] / n, max_s=sums["seconds"] / n, data_s=sums["data_s"],
            boundary_s=sums["boundary_s"], save_s=sums["save_s"], times=str(Quantiles(sums["times"])),
            cpu_s=sums["cpu_s"] if job.cpu else None, peak_rss_bytes=10**9 + rank,
        ))  # fmt: skip
        if job.tokens:
            self._say(epoch, rank, done, self.t if at is None else at, Metric(
                name="tokens", last=job.tokens, n=n, mean=job.tokens, min=job.tokens, max=job.tokens))  # fmt: skip
        kept = {"at": sums["at"], "done": sums["done"]}
        open_[rank] = self._fresh() | kept
