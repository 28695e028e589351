"""A loop that times itself with a watch of its own: ``hours.py URL STEPS EVERY LOG``. One JSON line an event."""

import json
import os
import sys
import time

FILE = os.open(sys.argv[4], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
RANK = int(os.environ.get("RANK", "0"))


def say(**fields):
    row = {"t": time.time(), "rank": RANK, "pid": os.getpid(), **fields}
    os.write(FILE, (json.dumps(row) + "\n").encode())


say(event="born")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import ckpt  # noqa: E402
import elastic  # noqa: E402


class Slow:
    """Batches that take their time, which it adds up."""

    waited_s = 0.0

    def __iter__(self):
        while True:
            began = time.monotonic()
            time.sleep(0.005)
            self.waited_s = time.monotonic() - began
            yield torch.ones(64)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def work(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


url, steps, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
elastic.init()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optim = torch.optim.AdamW(model.parameters())
slow, start = Slow(), elastic.Run  # which is imported when it is first asked for
say(event="enters")
with start(url, ckpt.State(model=model, optim=optim, data=slow), every=every) as run:
    say(event="trains")
    try:
        for step, batch in run.steps(until=steps):
            began, waited = time.time(), slow.waited_s
            work(0.012 if RANK else 0.006)
            model(batch).sum().backward()
            if dist.is_initialized():
                for p in model.parameters():
                    dist.all_reduce(p.grad)
            time.sleep(0.02)
            optim.step()
            optim.zero_grad()
            run.log(tokens=100 + RANK)
            say(step=step + 1, began=began, waited=waited)
    except BaseException:
        say(event="heard")
        raise
    say(event="done")
say(event="left")
