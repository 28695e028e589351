"""A run of two ranks over a storage that fails: one request in twenty, and for a while all of them.

What the suite samples and ``python -m tests.soak.faulty_storage`` plays. The real client talks to the real server
through a proxy that answers 503 and 500, resets connections, loses answers, and cuts bodies short.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

import ckpt
from drills.faults.proxy import CutResponse, FaultProxy, LostReply, Request, Reset, Stall, Status, any_request, is_get
from tests.dist import gpt
from tests.ranks import run_ranks
from tests.s3server import S3

SAVES = 5
RATE = 0.05
KINDS = (Status(503, "SlowDown"), Status(500, "InternalError"), Reset(), Reset(300), LostReply(), Stall(1.0))


def content(model: torch.nn.Module, optim: torch.optim.Optimizer) -> list[bytes]:
    """Every parameter and moment of this rank, as bytes."""
    each = [optim.state[p] for g in optim.param_groups for p in g["params"]]
    moments = [s[k] for s in each for k in sorted(s) if isinstance(s[k], torch.Tensor)]
    local = [getattr(t, "to_local", lambda t=t: t)() for t in [*model.state_dict().values(), *moments]]
    return [t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in local]


def train_and_save(url: str, options: dict[str, Any]) -> tuple[list[str], float, list[bytes]]:
    """Five steps, each saved. On every rank; what was saved, the longest save in seconds, and what was trained."""
    model, optim, sched = gpt.build((torch.distributed.get_world_size(),), seed=1)
    state = ckpt.State(model=model, optim=optim, sched=sched)
    saved, longest = [], 0.0
    with ckpt.open(url, keep=ckpt.Latest(2), grace_s=0.0, **options) as store:
        store.resume(state)
        for step in range(1, SAVES + 1):
            gpt.train(model, optim, sched, 1)
            began = time.monotonic()
            saved.append(store.save(step, state).wait().attempt)
            longest = max(longest, time.monotonic() - began)
    return saved, longest, content(model, optim)


def resume(url: str, options: dict[str, Any]) -> tuple[int, int, list[bytes]]:
    """A new start: its step, how many steps it skipped, and what it restored. On every rank."""
    model, optim, sched = gpt.build((torch.distributed.get_world_size(),), seed=9)
    state = ckpt.State(model=model, optim=optim, sched=sched)
    with ckpt.open(url, **options) as store:
        got = store.resume(state)
    return got.step, len(got.skipped), content(model, optim)


@dataclass(frozen=True)
class Result:
    """One seed: what was struck, how long the longest save took in seconds, and what went wrong, if anything."""

    seed: int
    client: str
    requests: int
    faults: int
    outage_s: float
    longest_save_s: float
    seconds: float
    wrong: str | None


def play(s3: S3, seed: int, *, client: str = "obstore", outage_s: float = 0.0) -> Result:
    """Train, save and resume through the faults; the outage begins with the first data object of the third save."""
    began = time.monotonic()
    url = s3.url(s3.new_bucket(), f"run-{client}-{seed}")
    with FaultProxy(s3.server.port, seed=seed) as proxy:
        each = RATE / (len(KINDS) + 1)
        for kind in KINDS:
            proxy.add(any_request, kind, times=None, probability=each)
        proxy.add(is_get, CutResponse(100), times=None, probability=each)
        options = {**s3.options_for(proxy.endpoint), "client": client}
        watch = threading.Thread(target=_outage, args=(proxy, outage_s), daemon=True)
        watch.start()
        wrong, longest = None, 0.0
        try:
            trained = run_ranks(2, train_and_save, url, options)
            longest = max(t[1] for t in trained)
            restored = run_ranks(2, resume, url, options)
            if any(len(t[0]) != SAVES for t in trained) or [r[0] for r in restored] != [SAVES, SAVES]:
                wrong = f"saved {[t[0] for t in trained]}, resumed {[r[0] for r in restored]}"
            elif any(r[1] for r in restored):
                wrong = "steps were skipped"
            elif [t[2] for t in trained] != [r[2] for r in restored]:
                wrong = "the restored state differs"
        except Exception as e:
            wrong = f"{type(e).__name__}: {e}"
        watch.join()
        return Result(seed, client, len(proxy.log), proxy.faults(), outage_s, round(longest, 1),
                      round(time.monotonic() - began, 1), wrong)  # fmt: skip


def _outage(proxy: FaultProxy, seconds: float) -> None:
    def third_save(r: Request) -> bool:
        return r.method == "PUT" and f"steps/{3:012d}/" in r.path

    end = time.monotonic() + 120
    while seconds and time.monotonic() < end:
        if proxy.count(third_save):
            all_of_it = proxy.rules[:]
            proxy.rules[:] = []
            proxy.add(any_request, Reset(), times=None)
            time.sleep(seconds)
            proxy.rules[:] = all_of_it
            return
        time.sleep(0.01)
