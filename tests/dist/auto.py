"""A loop with ``every="auto"``: ``auto.py URL STEPS SAVE_AT LOG``. It asks for a save at every SAVE_AT steps."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import ckpt
import elastic
from elastic.run import Run

url, steps, save_at, log = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
elastic.init()
torch.manual_seed(0)
model = nn.Linear(256, 256)
optim = torch.optim.AdamW(model.parameters())
with Run(url, ckpt.State(model=model, optim=optim), every="auto") as run:
    for step, _ in run.steps(until=steps):
        model(torch.ones(256)).sum().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optim.step()
        optim.zero_grad()
        time.sleep(0.02)
        if (step + 2) % save_at == 0:
            run.save()
        with open(log, "a") as file:
            pacer = run._cadence._pacer.state_dict() if run._rank == 0 else None
            file.write(json.dumps({"rank": run._rank, "pid": os.getpid(), "step": step, "pacer": pacer}) + "\n")
