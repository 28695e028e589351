"""Two ranks: rank 1 freezes in its first step, rank 0 fails in its second. ``stuck.py URL LOG``."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import ckpt
import elastic

elastic.init()
with elastic.Run(sys.argv[1], ckpt.State(model=torch.nn.Linear(1, 1)), every=100) as run:
    for step, _ in run.steps(until=5):
        if os.environ["RANK"] == "1":
            time.sleep(0.5)  # for the agreement before this step to come through
            os.kill(os.getpid(), signal.SIGSTOP)
        if step == 1:
            raise ZeroDivisionError
