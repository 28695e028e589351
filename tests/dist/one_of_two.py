"""A job of small steps that saves often: ``one_of_two.py URL STEPS LOG``."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

import ckpt
import elastic

url, steps, log = sys.argv[1], int(sys.argv[2]), sys.argv[3]
elastic.init()
torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
with elastic.Run(url, ckpt.State(model=model), every=4) as run:
    for step, _ in run.steps(until=steps):
        time.sleep(0.03)
        dist.barrier()
        with open(log, "a") as f:
            f.write(json.dumps({"step": step, "rank": dist.get_rank(), "pid": os.getpid(), "t": time.time()}) + "\n")
