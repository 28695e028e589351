"""The job whose recovery is timed: ``recovery_worker.py elastic|dcp FOLDER STEPS LOG``; a line at each phase.

``elastic``: elastic.init and elastic.Run. ``dcp``: what PyTorch's own documentation shows: env:// and DCP.
"""

import json
import os
import sys
import time

LOG = os.open(sys.argv[4], os.O_APPEND | os.O_CREAT | os.O_WRONLY)


def write(**fields: object) -> None:
    line = {**fields, "rank": int(os.environ["RANK"]), "pid": os.getpid(), "mono": time.monotonic()}
    os.write(LOG, (json.dumps(line) + "\n").encode())


write(event="start")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

mode, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
EVERY = 50


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    return model, torch.optim.AdamW(model.parameters())


def train(model: nn.Module, optim: torch.optim.Optimizer, step: int) -> None:
    model(torch.ones(8, 256)).square().mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optim.step()
    optim.zero_grad()
    write(event="step", step=step)
    time.sleep(0.01)


def with_elastic() -> None:
    import ckpt
    import elastic
    from elastic.run import Run

    write(event="imported")
    elastic.init()
    write(event="met")
    model, optim = build()
    with Run(folder, ckpt.State(model=model, optim=optim), every=EVERY) as run:
        write(event="loaded")
        for step, _ in run.steps(until=steps):
            train(model, optim, step)


def with_dcp() -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    write(event="imported")
    dist.init_process_group("gloo")
    write(event="met")
    model, optim = build()
    done = sorted(int(n) for n in os.listdir(folder) if os.path.exists(f"{folder}/{n}/.metadata"))
    step = done[-1] if done else 0
    if done:
        weights, moments = get_state_dict(model, optim)
        dcp.load({"model": weights, "optim": moments}, checkpoint_id=f"{folder}/{step}")
        set_state_dict(model, optim, model_state_dict=weights, optim_state_dict=moments)
    write(event="loaded")
    while step < steps:
        train(model, optim, step)
        step += 1
        if step % EVERY == 0:
            weights, moments = get_state_dict(model, optim)
            dcp.save({"model": weights, "optim": moments}, checkpoint_id=f"{folder}/{step}")
    dist.destroy_process_group()


torch.set_num_threads(1)
os.makedirs(folder, exist_ok=True)
with_elastic() if mode == "elastic" else with_dcp()
