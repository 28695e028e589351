"""The forecast against a real loop that is really killed: ``python -m tests.bench.interval_end_to_end [MODE...]``.

A PyTorch loop trains, saves to a local disk, and is killed with SIGKILL at exponential times, those of its restarts
included. Three ways to save: ``blocking`` (wait for each), ``async`` (``elastic.Run``) and ``lazy`` (a save counts
when the next one is called, which ``elastic.Run`` never does: here by DCP's ``async_save`` through
``ckpt.ObjectWriter`` and a file that names the newest save). Useful are the steps that a restart found saved, times
their undisturbed length. The forecast knows the injector's MTBF and the costs as measured; chance is in the kills.

Steps are paced to 30 ms, as those of a host that waits for its device. A life forks from a parent which has imported
torch, so that restarts are short against the MTBF. Lives are appended to out/bench/interval_end_to_end.jsonl: a
campaign that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckpt
import ckpt.checkpoints
import elastic.run
from ckpt.store import open_store
from elastic.economics import Costs, Job, Rates, recommend
from elastic.economics.models import Setting
from elastic.ledger.events import SaveCommitted
from elastic.ledger.reader import read

MODES = ("blocking", "async", "lazy")
STEP_S, CALIBRATION_S, GUESS = 0.03, 15.0, 25
ROOT = Path(__file__).resolve().parents[2] / "out" / "bench"
FOREVER = 10**9


class Training:
    """A small model that learns, beside a frozen one that makes its checkpoints heavy."""

    def __init__(self, megabytes: float) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.frozen = nn.Linear(1024, int(megabytes * 256), bias=False).requires_grad_(False)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        end = time.monotonic() + STEP_S
        x = torch.randn(64, 64)
        loss = (self.model(x) - x.flip(1)).square().mean()
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        time.sleep(max(0.0, end - time.monotonic()))

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "frozen": self.frozen, "optim": self.optim}


class Diary:
    """What a life writes down as it goes, a line at a time, for whoever buries it."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def write(self, *words: Any) -> None:
        os.write(self._fd, (json.dumps(words) + "\n").encode())


# --- three ways to save -----------------------------------------------------------------------------------------------


def train_async(folder: Path, training: Training, every: int, diary: Diary) -> None:
    state = ckpt.State(**training.parts)
    keep: dict[str, Any] = {"keep": ckpt.Latest(2), "storage_options": {"grace_s": 5.0}}
    with elastic.run.Run(str(folder), state, every=every, **keep) as run:
        diary.write("resumed", run.step)
        for step, _ in run.steps(until=FOREVER):
            diary.write("step", step, time.monotonic())
            training.step()


def train_blocking(folder: Path, training: Training, every: int, diary: Diary) -> None:
    state = ckpt.State(**training.parts)
    store = ckpt.open(str(folder), keep=ckpt.Latest(2), grace_s=5.0)
    done = store.resume(state).step
    diary.write("resumed", done)
    while True:
        diary.write("step", done, time.monotonic())
        training.step()
        done += 1
        if done % every == 0:
            store.save(done, state).wait()


def train_lazy(folder: Path, training: Training, every: int, diary: Diary) -> None:
    newest, done = folder / "newest", 0
    state = {"model": training.model.state_dict(), "frozen": training.frozen.state_dict(), "done": torch.tensor(0)}
    state["optim"] = {}
    if newest.exists():
        dcp.load(state, storage_reader=ckpt.ObjectReader(str(folder / newest.read_text())))
        training.model.load_state_dict(state["model"])
        done = int(state["done"])
    diary.write("resumed", done)
    pending, saving, began = None, 0, 0.0
    while True:
        diary.write("step", done, time.monotonic())
        training.step()
        done += 1
        if done % every:
            if pending is not None and began and pending.done():
                diary.write("persisted", time.monotonic() - began)
                began = 0.0
            continue
        if pending is not None:
            pending.result()
            publish(folder, newest, str(saving))
        state["done"] = torch.tensor(done)
        saving = done
        shutil.rmtree(folder / str(done), ignore_errors=True)  # a save that no next one made count
        pending = dcp.async_save(state, storage_writer=ckpt.ObjectWriter(str(folder / str(done))))
        began = time.monotonic()


def publish(folder: Path, newest: Path, name: str) -> None:
    """The save that was begun an interval ago counts from here on."""
    old = newest.read_text() if newest.exists() else None
    (folder / "next").write_text(name)
    (folder / "next").rename(newest)
    if old and old != name:
        shutil.rmtree(folder / old, ignore_errors=True)


TRAIN: dict[str, Callable[[Path, Training, int, Diary], None]] = {
    "blocking": train_blocking,
    "async": train_async,
    "lazy": train_lazy,
}

# --- lives and deaths -------------------------------------------------------------------------------------------------


def live(mode: str, folder: Path, every: int, megabytes: float, lifetime_s: float) -> dict[str, Any]:
    """One life, killed after ``lifetime_s``; what it did."""
    diary = folder / "diary"
    sys.stdout.flush()
    born = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            TRAIN[mode](folder, Training(megabytes), every, Diary(diary))
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(3)
    time.sleep(max(0.0, born + lifetime_s - time.monotonic()))
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status):
        raise SystemExit(f"{mode}: the loop ended by itself with {os.WEXITSTATUS(status)}")
    row = {"mode": mode, "every": every, "megabytes": megabytes, "life_s": killed - born}
    return row | told(diary, born, every) | {"wall_s": time.monotonic() - born}


def told(diary: Path, born: float, every: int) -> dict[str, Any]:
    """Where a life started from, when its first step began, and how long steps with and without a save took."""
    lines = [json.loads(line) for line in (diary.read_text() if diary.exists() else "").split("\n")[:-1]]
    diary.unlink(missing_ok=True)
    steps = [(n, t) for word, n, *t in lines if word == "step" for t in t]
    lasted = [(n, b - a) for (n, a), (_, b) in pairwise(steps)]
    return {
        "resumed": next((line[1] for line in lines if line[0] == "resumed"), None),
        "recovery_s": steps[0][1] - born if steps else None,
        "saving_s": [s for n, s in lasted if (n + 1) % every == 0],
        "since_save_s": [[(n % every), s] for n, s in lasted[1:] if (n + 1) % every and n >= every],
        "persist_s": [line[1] for line in lines if line[0] == "persisted"],
    }


class Measured(NamedTuple):
    """Costs of a campaign, means over all of its lives."""

    step_s: float
    stall_s: float
    persist_s: float
    slowdown: float
    recovery_s: float
    dead_s: float


def measure(mode: str, folder: Path, rows: list[dict[str, Any]], mtbf_s: float) -> Measured:
    """What saves and restarts cost in these lives.

    A recovery is seen only where no kill came first, with probability e^(−R/M): weighting each by the inverse gives
    E[e^(−R/M)] without bias, and −M·ln of that is the constant that a random recovery acts like.
    """
    seen = [row["recovery_s"] for row in rows if row["recovery_s"] is not None]
    persists = [p for row in rows for p in row["persist_s"]]
    if mode == "async":
        events = read(open_store(str(folder))).events
        persists = [e.data.persist_s for e in events if isinstance(e.data, SaveCommitted)]
    persist = 0.0 if mode == "blocking" else mean(persists)
    busy = persist / STEP_S + 1
    quiet = [s for row in rows for at, s in row["since_save_s"] if at > busy or mode == "blocking"]
    loaded = [s for row in rows for at, s in row["since_save_s"] if 0 < at < busy - 1 and mode != "blocking"]
    step = mean(quiet or loaded)
    slowdown = max(0.0, 1 - step / mean(loaded)) if loaded else 0.0
    stall = mean([s for row in rows for s in row["saving_s"]]) - step
    return Measured(
        step_s=step,
        stall_s=stall,
        persist_s=persist,
        slowdown=slowdown if persist else 0.0,
        recovery_s=mtbf_s * math.log(mean([math.exp(r / mtbf_s) for r in seen])),
        dead_s=mean([row["wall_s"] - row["life_s"] for row in rows]),
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def inputs(mode: str, m: Measured, mtbf_s: float) -> tuple[Rates, Costs, Job]:
    costs = Costs(
        stall_s=m.stall_s, persist_s=m.persist_s, slowdown=m.slowdown, detect_s=m.dead_s, load_s=m.recovery_s,
        commit="next-save" if mode == "lazy" else "eager",
    )  # fmt: skip
    return Rates(mtbf_s=mtbf_s), costs, Job(step_s=m.step_s)


class Outcome(NamedTuple):
    """Measured and forecast goodput, as shares."""

    measured: float
    error: float
    sharp: float
    """The same with the luck of the lives' lengths taken out: their mean is known."""
    its_error: float
    forecast: float
    lives: int
    every: int
    best: int
    costs: Measured

    @property
    def z(self) -> float:
        return (self.measured - self.forecast) / self.error

    @property
    def sharp_z(self) -> float:
        return (self.sharp - self.forecast) / self.its_error


def outcome(mode: str, folder: Path, chain: list[dict[str, Any]], mtbf_s: float) -> Outcome:
    """Renewal-reward estimate over lives, its error by the ratio estimator, beside the exact model's forecast.

    A life's gain is where its successor started less where it started; one that died before it had loaded gained 0.
    Lives before a pause are left out unless one that is not counted shows where they had got to.
    """
    for row, successor in reversed(list(pairwise(chain))):
        if row["kind"] != "pause" and row["resumed"] is None:
            row["resumed"] = successor["resumed"]
    counted = [(row, after["resumed"]) for row, after in pairwise(chain) if row["kind"] == "life"]
    counted = [(row, start) for row, start in counted if start is not None and row["resumed"] is not None]
    rows = [row for row, _ in counted]
    m = measure(mode, folder, rows, mtbf_s)
    gains = [(start - row["resumed"]) * m.step_s for row, start in counted]
    walls, lengths = [row["wall_s"] for row in rows], [row["life_s"] for row in rows]
    g, error = ratio(gains, walls, [0.0] * len(rows))
    sharp, its_error = ratio(gains, walls, [length - mtbf_s for length in lengths])
    plan = recommend(*inputs(mode, m, mtbf_s))
    every = rows[0]["every"]
    assert plan.steps is not None
    forecast = plan.model.goodput(Setting(every * m.step_s))
    return Outcome(g, error, sharp, its_error, forecast, len(rows), every, plan.steps, m)


def ratio(gains: list[float], walls: list[float], luck: list[float]) -> tuple[float, float]:
    """Mean gain over mean wall time, and its standard error; ``luck`` of known mean 0 is regressed out of both."""
    n, spread = len(gains), sum(x * x for x in centred(luck))

    def slope(values: list[float]) -> float:
        return sum(x * y for x, y in zip(centred(luck), values, strict=True)) / spread if spread else 0.0

    gain, wall = (mean(v) - slope(v) * mean(luck) for v in (gains, walls))
    g = gain / wall
    left = [a - g * b for a, b in zip(gains, walls, strict=True)]
    rest = [a - slope(left) * x for a, x in zip(centred(left), centred(luck), strict=True)]
    return g, math.sqrt(sum(x * x for x in rest) / (n - 2) / n) / wall


def centred(values: list[float]) -> list[float]:
    return [x - mean(values) for x in values]


def campaign(mode: str, out: Path, kills: int, mtbf_s: float, megabytes: float) -> Outcome:
    """Lives of one mode until there are ``kills``, those on file included."""
    folder, log = out / f"end_to_end_{mode}", out / "interval_end_to_end.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for row in on_file(log) if row["mode"] == mode and row["megabytes"] == megabytes]
    lives = [row for row in rows if row["kind"] == "life" and row["mtbf_s"] == mtbf_s]
    tuning = next((row for row in rows if row["kind"] == "calibration"), None)

    def note(kind: str, row: dict[str, Any]) -> dict[str, Any]:
        row |= {"kind": kind, "mtbf_s": mtbf_s, "unix_s": round(time.time(), 1)}
        with log.open("a") as file:
            file.write(json.dumps(row, default=lambda x: round(x, 6)) + "\n")
        return row

    if tuning is None:
        tuning = note("calibration", live(mode, folder, GUESS, megabytes, CALIBRATION_S))
    calibrated = measure(mode, folder, [tuning], mtbf_s)
    plan = recommend(*inputs(mode, calibrated, mtbf_s))
    assert plan.steps is not None
    print(f"{mode}: calibrated {calibrated}; save every {plan.steps} steps", flush=True)
    every = lives[0]["every"] if lives else plan.steps
    draw = random.Random(f"{mode} {len(lives)}")
    if len(lives) < kills:
        note("pause", {"mode": mode, "megabytes": megabytes, "resumed": None})
    for _ in range(len(lives), kills):
        note("life", live(mode, folder, every, megabytes, draw.expovariate(1 / mtbf_s)))
    chain = [row for row in on_file(log) if (row["mode"], row["mtbf_s"], row["megabytes"]) == (mode, mtbf_s, megabytes)]
    chain = [row for row in chain if row["kind"] != "calibration"]
    while chain[-1]["kind"] != "last" or chain[-1]["resumed"] is None:  # a life only to see where it starts from
        chain.append(note("last", live(mode, folder, every, megabytes, 10.0)))
    return outcome(mode, folder, chain, mtbf_s)


def on_file(log: Path) -> Iterator[dict[str, Any]]:
    for line in (log.read_text() if log.exists() else "").split("\n")[:-1]:
        yield json.loads(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("modes", nargs="*", default=MODES, metavar="MODE", help="of " + ", ".join(MODES))
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--mtbf", type=float, default=10.0, help="seconds")
    parser.add_argument("--megabytes", type=float, default=24.0, help="size of a checkpoint")
    parser.add_argument("--out", type=Path, default=ROOT)
    args = parser.parse_args()
    torch.set_num_threads(1)  # and nothing computed before a fork, so that there are no threads to lose
    good = True
    for mode in args.modes or MODES:
        o = campaign(mode, args.out, args.kills, args.mtbf, args.megabytes)
        good &= abs(o.z) <= 2 and abs(o.sharp_z) <= 2
        m = o.costs
        print(
            f"{mode}: goodput {o.measured:.4f} ± {o.error:.4f} (z {o.z:+.2f}), without the luck of the kills "
            f"{o.sharp:.4f} ± {o.its_error:.4f} (z {o.sharp_z:+.2f}), forecast {o.forecast:.4f}; "
            f"{o.lives} kills, a save every {o.every} steps (best {o.best}) of {m.step_s * 1e3:.1f} ms; stall "
            f"{m.stall_s * 1e3:.0f} ms, persist {m.persist_s * 1e3:.0f} ms, slowdown {m.slowdown:.1%}, "
            f"restart {m.recovery_s * 1e3:.0f} ms + {m.dead_s * 1e3:.0f} ms",
            flush=True,
        )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
