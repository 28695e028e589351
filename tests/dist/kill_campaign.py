"""Does plain torchrun recover when a rank is killed? ``kill_campaign.py stock|elastic|gpt [NPROC [RUNS]]``.

``stock`` and ``elastic`` run a worker that only meets the others, with torch's own set-up and with ``elastic.init``;
``gpt`` trains the example, and compares what it leaves behind with an undisturbed run, bit for bit. A line a run:
seconds from the kill to the first step after it, or "never".
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.dist.launch import ROOT, Job, torchrun
from tests.dist.readback import by_step, differences, step_folder

STEPS, EVERY = 40, 7


def start(mode: str, folder: Path, nproc: int, *, restarts: int = 3, static: bool = False) -> Job:
    """The job of a mode, with its log, and its checkpoints, in ``folder``."""
    folder.mkdir(exist_ok=True)
    log = folder / "log"
    if mode == "gpt":
        script = ROOT / "examples" / "train_gpt.py"
        args = [str(folder / "run"), "--steps", str(STEPS), "--every", str(EVERY), "--log-file", str(log)]
    else:
        script, args = Path(__file__).with_name("ring.py"), [mode, str(STEPS), str(log)]
    return torchrun(script, *args, nproc=nproc, log=log, max_restarts=restarts, static=static)


def kill_one(job: Job, rng: random.Random, nproc: int, *, budget_s: float) -> float | None:
    """Kill a random rank at a random moment; seconds to the first step of its successors, None if there is none."""
    victim, at, late_s = rng.randrange(nproc), rng.randrange(2, STEPS - 5), rng.random() * 0.08
    lines = job.until(lambda ls: any(x.get("step") == at and x["rank"] == victim for x in ls))
    time.sleep(late_s)
    old = {x["pid"] for x in lines}
    os.kill(next(x["pid"] for x in reversed(lines) if x["rank"] == victim), signal.SIGKILL)
    killed = time.time()
    while time.time() - killed < budget_s and job.process.poll() is None:
        new = [x["t"] for x in job.lines() if x["pid"] not in old and "step" in x]
        if new:
            return float(min(new)) - killed
        time.sleep(0.02)
    return None


def wrong(drilled: Path, control: Path, steps: int = STEPS) -> str:
    """What is not as in the undisturbed run of so many steps; empty for nothing."""
    a, b = step_folder(drilled / "run", steps), step_folder(control / "run", steps)
    bad = differences(a, b)
    seen, meant = (by_step(Job.read(folder / "log")) for folder in (drilled, control))
    bad += [f"step {s} rank {r}" for (s, r), values in seen.items() if values != meant.get((s, r))]
    bad += [f"step {s} rank {r} missing" for (s, r) in meant.keys() - seen.keys()]
    return ", ".join(bad)


def main() -> None:
    """Run the campaign that the command line names."""
    mode, nproc, runs = sys.argv[1], *(int(x) for x in [*sys.argv[2:4], *["4", "5"][len(sys.argv[2:4]) :]])
    took = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if mode == "gpt":
            with start(mode, root / "control", nproc, restarts=0) as job:
                assert job.wait(300) == 0, job.tail("the control run failed")
        for seed in range(runs):
            static, folder = seed % 4 == 3, root / str(seed)
            with start(mode, folder, nproc, static=static) as job:
                seconds = kill_one(job, random.Random(seed), nproc, budget_s=40)
                verdict = "never" if seconds is None else f"{seconds:.2f} s"
                if mode == "gpt" and seconds is not None:
                    status = job.wait(120)
                    bad = wrong(folder, root / "control") if status == 0 else f"status {status}"
                    verdict += ", bitwise equal" if not bad else f", WRONG: {bad[:300]}"
                    seconds = None if bad else seconds
            took += [] if seconds is None else [seconds]
            print(f"{mode} {nproc} ranks, {'static' if static else 'c10d'}: {verdict}", flush=True)
    took.sort()
    spread = f": median {took[len(took) // 2]:.2f} s, max {took[-1]:.2f} s" if took else ""
    print(f"{mode} {nproc} ranks: {len(took)} of {runs} recovered{spread}")


if __name__ == "__main__":
    main()
