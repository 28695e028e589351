"""A rank that really is slowed, on two ranks of gloo: found, and for the right reason."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from elastic.launch.straggler import WINDOW, StepRecord, Stragglers
from elastic.launch.telemetry import Files, between, read
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist
STEPS = 12 * WINDOW
PAUSES = """
import os, signal, sys, time
pid = int(sys.argv[1])
try:
    while True:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.012)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.004)
except ProcessLookupError:
    pass
"""


def train(how: str) -> list[StepRecord]:
    slow, pid, out = dist.get_rank() == 1, os.getpid(), []
    a = torch.randn(160, 160)
    pauses = None
    if slow and how == "descheduled":
        pauses = subprocess.Popen([sys.executable, "-c", PAUSES, str(pid)])
    try:
        for _ in range(STEPS):
            before, began, cpu = read(Files(), pid), time.perf_counter(), time.thread_time()
            if slow and how == "data":
                time.sleep(0.015)
            fetched = time.perf_counter()
            for _ in range(90 if slow and how == "compute" else 30):
                a = torch.nn.functional.normalize(a @ a)
            done, used = time.perf_counter(), time.thread_time() - cpu
            queued = between(before, read(Files(), pid)).queued_s or 0.0
            waiting = time.perf_counter()
            dist.all_reduce(torch.ones(100))
            out.append(StepRecord(compute_s=done - fetched, wait_s=time.perf_counter() - waiting, cpu_s=used,
                                  data_s=fetched - began, queued_s=queued))  # fmt: skip
    finally:
        if pauses is not None:
            pauses.kill()
            pauses.wait()
    return out


@pytest.mark.parametrize("how", ["compute", "data", "descheduled"])
def test_a_slowed_rank_is_found_and_its_cause_is_named(how: str) -> None:
    records = dict(enumerate(run_ranks(2, train, how)))
    stragglers, found = Stragglers(), []
    for n in range(0, STEPS, WINDOW):
        found += stragglers.window({rank: r[n : n + WINDOW] for rank, r in records.items()})
    mine = [v for v in found if v.rank == 1]
    assert mine, [(v.rank, v.factor, v.said) for v in found]
    causes = [v.cause for v in mine]
    assert max(set(causes), key=causes.count) == how, [v.said for v in mine]
