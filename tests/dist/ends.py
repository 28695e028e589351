"""A rank that ends as asked: ``ends.py LOG HOW``; HOW is kill-once, raise, exit-N, late-6, sleep, or none."""

import json
import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

import elastic

path, how = sys.argv[1:3]
torch.set_num_threads(1)
elastic.init()
rank = dist.get_rank() if dist.is_initialized() else 0
log = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
if how == "sleep":
    subprocess.Popen(["setsid", "sleep", "300"])  # an orphan-to-be, in a session of its own
os.write(log, (json.dumps({"rank": rank, "pid": os.getpid(), "count": int(count), "argv": sys.argv[1:],
                           "name": __name__, "path0": sys.path[0]}) + "\n").encode())  # fmt: skip
total = torch.ones(3)
if dist.is_initialized():
    dist.all_reduce(total)
print(f"rank {rank} has summed {total[0].item():g}", flush=True)
if how == "sleep":
    time.sleep(300)
if how == "kill-once" and rank == 1 and count == "0":
    os.kill(os.getpid(), 9)
if how == "raise" and rank == 1:
    raise ValueError("a poisoned batch\nwith two lines")
if how == "late-6":  # one rank finds out what the other only suffers from
    if rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(0.1)
    raise SystemExit(6 if rank == 1 else 1)
if how.startswith("exit-"):
    raise SystemExit(int(how.removeprefix("exit-")))
