"""The smallest worker: one all_reduce a step, no state. ``ring.py elastic|stock STEPS LOG``."""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist


def main() -> None:
    mode, steps, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    log = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)

    def write(**fields: object) -> None:
        os.write(log, (json.dumps({**fields, "pid": os.getpid(), "t": time.time()}) + "\n").encode())

    write(event="start", rank=int(os.environ["RANK"]))
    if mode == "stock":
        dist.init_process_group("gloo")
        token = None
    else:
        import elastic
        from elastic import membership

        elastic.init()
        token = membership.generation()
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        total = torch.ones(1000)
        dist.all_reduce(total)
        assert total[0].item() == world
        write(step=step, rank=rank, generation=token)
        time.sleep(0.05)
    if mode == "stock":
        dist.destroy_process_group()


main()
