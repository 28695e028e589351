"""A rank that hangs: ``hanging.py HOW VICTIM LOG [RUN]``; in the first generation only. With RUN, in a Run's loop."""

import ctypes
import json
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

import ckpt
import elastic

how, victim, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
AT, STEPS = 25, 60
torch.set_num_threads(1)
log = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
elastic.init()
rank, first = dist.get_rank(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def write(**fields: object) -> None:
    os.write(log, (json.dumps({**fields, "rank": rank, "pid": os.getpid(), "mono": time.monotonic()}) + "\n").encode())


def wait_for_ever() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hang() -> None:
    write(event="hang")
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "gil":
        ctypes.PyDLL(None).sleep(1000)
    elif how == "lock":
        wait_for_ever()


def body(step: int) -> None:
    mine = first and rank == victim and step == AT
    if mine:
        hang()
    if not (mine and how == "skip"):
        dist.all_reduce(torch.ones(10))
    dist.broadcast(torch.ones(5), src=0)
    write(event="step", step=step)
    time.sleep(0.05)


if len(sys.argv) > 4:
    with elastic.Run(sys.argv[4], ckpt.State(n=1), every=10) as run:
        for step, _ in run.steps(until=STEPS):
            body(step)
else:
    for step in range(STEPS):
        body(step)
