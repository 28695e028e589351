"""A writer that is stopped by a real SIGSTOP in the middle of a save while another start of the run goes on."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import ckpt
from ckpt.checkpoints import Checkpoints
from ckpt.engine.group import current_group
from ckpt.errors import CkptError
from ckpt.store import open_store
from tests.ranks import run_ranks

CALLS = (34, 6)  # of which one is struck: rank 0's in a save with its retention, another rank's in the last three saves
STEPS = 5


class Stopping:
    """A store whose process stops itself at the n-th call, before or after it."""

    def __init__(self, inner: Any, note: Path) -> None:
        self._inner, self._note, self.url = inner, note, inner.url
        self.left: int | None = None
        self.after = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        return lambda *args, **how: self._call(method, *args, **how)

    def _call(self, method: Any, *args: Any, **how: Any) -> Any:
        stop = self.left == 0
        if self.left is not None:
            self.left -= 1
        if stop and not self.after:
            self._stop(method, args)
        result = method(*args, **how)
        if stop and self.after:
            self._stop(method, args)
        return result

    def _stop(self, method: Any, args: Any) -> None:
        self._note.write_text(f"{os.getpid()} {'after' if self.after else 'before'} {method.__name__} {args[:1]}")
        os.kill(os.getpid(), signal.SIGSTOP)


def build(number: int = 0) -> tuple[ckpt.State, torch.nn.Module]:
    net = torch.nn.Module()
    for name in ("one", "two"):
        net.register_buffer(name, torch.full((50,), number))
    return ckpt.State(net=net, value=number), net


def fill(state: ckpt.State, net: torch.nn.Module, number: int) -> None:
    for t in net.buffers():
        t.fill_(number)
    state["value"] = number


def held(state: ckpt.State, net: torch.nn.Module) -> set[int]:
    return {int(x) for t in net.buffers() for x in t} | {state["value"]}


def job(url: str, number: int, note: str | None = None, stop: tuple[int, int, bool] | None = None) -> dict[str, Any]:
    """Resume and save ``STEPS`` times; rank ``stop[0]`` stops at call ``stop[1]`` of the third save."""
    store = open_store(url)
    if stop is not None:
        store = Stopping(store, Path(note or ""))  # type: ignore[assignment]
    run = Checkpoints(store, current_group(), keep=ckpt.Latest(2), deadline_s=60, grace_s=0,
                      allow_fallback=False)  # fmt: skip
    state, net = build()
    resumed = run.resume(state)
    out: dict[str, Any] = {"epoch": run.epoch, "resumed": resumed.attempt, "loaded": sorted(held(state, net)),
                           "reported": [], "error": None}  # fmt: skip
    for n in range(1, STEPS + 1):
        step = resumed.step + n
        fill(state, net, number * 1000 + step)
        if stop is not None and n == 3 and current_group_rank() == stop[0]:
            store.left, store.after = stop[1], stop[2]  # type: ignore[attr-defined]
        try:
            out["reported"].append(run.save(step, state).wait().attempt)
        except CkptError as e:
            out["error"] = type(e).__name__
            break
    return out


def current_group_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


@dataclass(frozen=True, slots=True)
class Result:
    """What one seed did: ``stale`` names a violation, empty is good."""

    seed: int
    ranks: int
    stopped: str
    old: dict[str, Any] | None
    new: dict[str, Any]
    chosen: str | None
    stale: str
    seconds: float


def play(seed: int, folder: Path) -> Result:
    """Stop a writer at a seeded call of its third save, let another start save, continue the writer, and judge."""
    began = time.monotonic()
    rng = random.Random(seed)
    ranks = 2 if seed % 4 == 3 else 1
    rank = rng.randrange(ranks)
    stop = (rank, rng.randrange(CALLS[rank]), rng.random() < 0.5)
    url, note = str(folder / "run"), folder / "stopped"
    old: list[list[Any]] = []
    writer = threading.Thread(target=lambda: old.append(run_ranks(ranks, job, url, 1, str(note), stop, timeout_s=240)))
    writer.start()
    while writer.is_alive() and not stopped(note):
        time.sleep(0.002)
    (new,) = run_ranks(1, job, url, 2, timeout_s=240)
    if writer.is_alive():
        os.kill(int(note.read_text().split()[0]), signal.SIGCONT)
    writer.join()
    stale, chosen = judge(url, old[0][0], new)
    where = note.read_text().partition(" ")[2] if note.exists() else "never: the call was not reached"
    return Result(seed, ranks, where, old[0][0], new, chosen, stale, round(time.monotonic() - began, 2))


def stopped(note: Path) -> bool:
    words = note.read_text().split() if note.exists() else []
    return bool(words) and psutil.Process(int(words[0])).status() == psutil.STATUS_STOPPED


def judge(url: str, old: dict[str, Any], new: dict[str, Any]) -> tuple[str, str | None]:
    """What went wrong, if anything, and the step that is chosen in the end."""
    if new["error"] or len(new["reported"]) != STEPS:
        return f"the new start failed: {new}", None
    expected = new["reported"][-1]
    state, net = build()
    with ckpt.open(url) as run:
        chosen = run.newest_valid()
        resumed = run.resume(state)
    before = [name for name in old["reported"] if int(name[:12]) > int(new["resumed"][:12])]
    wrong = [
        (chosen != expected, f"{chosen} is the newest valid step, {expected} should be"),
        (resumed.attempt != expected, f"{resumed.attempt} was resumed, {expected} should be"),
        (held(state, net) != {2000 + resumed.step}, f"the resumed step holds {held(state, net)}"),
        (bool(before), f"{before} were reported and the new start resumed {new['resumed']}"),
        (new["loaded"] != [1000 + int(new["resumed"][:12])], f"the new start loaded {new['loaded']}"),
        (old["error"] not in ("Superseded", None), f"the old start ended with {old['error']}"),
        (old["error"] is None and len(old["reported"]) != STEPS, "the old start ended early and without an error"),
    ]
    return "; ".join(text for bad, text in wrong if bad), chosen
