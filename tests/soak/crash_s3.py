"""Sampled crashes on the real S3 server: ``python -m tests.soak.crash_s3 [HISTORIES]``; goes on where it stopped.

The points and kinds of fault are those of the enumeration; here each history plays against the server with the real
client: a run with steps, a start that one fault strikes, what was on its way lands, a start that goes on, and the looks
of the same checker in between. Appends one line a history to out/soak/crash_s3.jsonl. Exit status 1 on any violation.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.store import open_store
from tests.crash.checks import Checker
from tests.crash.histories import SCENARIOS, Clock, laboratory, prepare, start
from tests.crash.world import DATA_KINDS, Fault, Truth, World, kinds_at
from tests.s3server import S3, S3Server

OUT = Path("out/soak/crash_s3.jsonl")


@dataclass(slots=True)
class Bucket:
    """A prefix of the real server in the place of the model store."""

    inner: Any
    url: str

    @property
    def objects(self) -> Collection[str]:
        return {e.key for e in self.inner.list()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def play(s3: S3, seed: int) -> dict[str, Any]:
    """One history; what it violates, if anything."""
    rng = random.Random(seed)
    scenario = rng.choice([s for s in SCENARIOS if s.conditional_put and s.damage is None and not s.unfinished])
    ranks = rng.choice([1, 2])
    point = rng.choice(prepare(scenario, ranks).points)  # the calls are the same on any store
    kind = rng.choice([k for k in kinds_at(point, ranks) if k not in ("pause", "pause again", "stall", *DATA_KINDS)])
    inner = open_store(s3.url(s3.new_bucket(), f"crash-{seed}"), **s3.options)
    world = World(Bucket(inner, inner.url), Truth())  # type: ignore[arg-type]
    Clock.hours = 0
    check = Checker(world, scenario.keep)
    if scenario.steps:
        job = start(world, scenario, 1, ranks, saves=scenario.steps).run()
        check.ran(job, had_steps=False, undisturbed=True)
    had = check.before()
    struck = start(world, scenario, 2, ranks, stride=2, fault=Fault(point, kind, rng.choice([1, 3, 10**9]))).run()
    check.ran(struck, had_steps=had, undisturbed=False)
    check.look("after the fault")
    world.land()
    check.look("after everything landed")
    had = check.before()
    check.ran(start(world, scenario, 3, ranks).run(), had_steps=had, undisturbed=True)
    check.look("at the end")
    check.tidy(grace=scenario.grace_s > 0)
    return {"seed": seed, "scenario": scenario.name, "ranks": ranks, "fault": f"{kind} at {point}",
            "struck": struck.struck, "violations": check.violations}  # fmt: skip


def main(histories: int) -> int:
    """Play every seed that the file does not hold yet."""
    OUT.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in OUT.read_text().splitlines()] if OUT.exists() else []
    done = {r["seed"] for r in lines}
    with tempfile.TemporaryDirectory() as folder, laboratory():
        server = S3Server(Path(folder))
        server.start()
        try:
            for seed in sorted(set(range(histories)) - done):
                with S3(server) as s3:
                    lines.append(play(s3, seed))
                with OUT.open("a") as out:
                    out.write(json.dumps(lines[-1]) + "\n")
                if lines[-1]["violations"]:
                    print(lines[-1], flush=True)
        finally:
            server.kill()
    bad = [r for r in lines if r["violations"]]
    print(f"{len(lines)} histories on S3, {sum(r['struck'] for r in lines)} struck, {len(bad)} violations")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
