"""A small data-parallel job on plain torch.distributed.checkpoint: a target that owes nothing to this project.

It keeps the folder layout that the oracle knows (steps/, commits/), resumes by itself, and logs a JSON line a step.
``DEFECT`` in the environment plants mistakes, most of them in its restore, so that drills can be seen to find them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

DATA, BATCH = 240, 4
DEFECTS = frozenset(os.environ.get("DEFECT", "").split(","))


def init_group() -> tuple[int, int]:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return rank, world
    # the store of torchrun still holds the addresses of the generation that died: each one gets its own prefix
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    prefix = f"generation-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    dist.init_process_group("gloo", store=dist.PrefixStore(prefix, store), rank=rank, world_size=world)
    return rank, world


class Job:
    def __init__(self, root: Path, seed: int, rank: int, world: int) -> None:
        self.root, self.seed, self.rank, self.world = root, seed, rank, world
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.sched = torch.optim.lr_scheduler.LambdaLR(self.optim, lambda n: 1 / (1 + 0.05 * n))
        g = torch.Generator().manual_seed(seed)
        self.x, self.w = torch.randn(DATA, 8, generator=g), torch.randn(8, generator=g)
        self.y = self.x @ self.w
        self.position = 0
        torch.manual_seed(seed * 1000 + rank)

    def batch(self) -> list[int]:
        """This rank's sample ids: the order is a function of seed and epoch, the position is one number."""
        ids = []
        for n in range(self.position + self.rank * BATCH, self.position + (self.rank + 1) * BATCH):
            order = list(range(DATA))
            random.Random(f"{self.seed}/{n // DATA}").shuffle(order)
            ids.append(order[n % DATA])
        return ids

    def step(self) -> tuple[float, list[int]]:
        ids = self.batch()
        if "noise" in DEFECTS:
            torch.manual_seed(time.time_ns() % 2**31)
        loss = nn.functional.mse_loss(self.model(self.x[ids]).squeeze(1), self.y[ids])
        self.optim.zero_grad()
        loss.backward()
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= self.world
        self.optim.step()
        self.sched.step()
        self.position += BATCH * self.world
        return loss.item(), ids

    def state(self) -> dict[str, Any]:
        names = {id(p): n for n, p in self.model.named_parameters()}
        flat: dict[str, Any] = {f"model.{n}": p.detach() for n, p in self.model.state_dict().items()}
        for p, entries in self.optim.state.items():
            flat |= {f"optim.state.{names[id(p)]}.{k}": v for k, v in entries.items()}
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optim.param_groups]
        ranks = [torch.empty(0)] * self.world
        dist.all_gather_object(ranks, torch.get_rng_state())
        flat |= {f"rng.rank{r:05d}.torch_cpu": s for r, s in enumerate(ranks)}
        return flat | {
            "optim.param_groups": groups,
            "sched": self.sched.state_dict(),
            "data": {"position": self.position},
        }

    def save(self, step: int, epoch: int) -> None:
        name = f"e{epoch:08d}-0"
        dcp.save(self.state(), checkpoint_id=self.root / "steps" / f"{step:012d}" / name)
        if self.rank == 0:
            (self.root / "commits").mkdir(exist_ok=True)
            record = self.root / "commits" / f"{step:012d}-{name}.json"
            record.with_suffix(".tmp").write_text("{}")
            record.with_suffix(".tmp").rename(record)
        dist.barrier()

    def resume(self) -> tuple[int, int]:
        """Load the newest committed step; returns it and the epoch of this start."""
        found = [[]]
        if self.rank == 0:
            folder = self.root / "commits"
            names = sorted(p.stem for p in folder.glob("*.json")) if folder.is_dir() else []
            found = [[re.fullmatch(r"(\d{12})-(e(\d{8})-0)", n).groups() for n in names]]
        dist.broadcast_object_list(found, src=0)
        if not found[0]:
            return 0, 1
        epoch = 1 + max(int(e) for _, _, e in found[0])
        if "zero" in DEFECTS:
            return 0, epoch
        step, folder, _ = found[0][-1]
        for p in self.model.parameters():  # the moments exist once a step was made
            p.grad = torch.zeros_like(p)
        self.optim.step()
        state = self.state()
        dcp.load(state, checkpoint_id=self.root / "steps" / step / folder)
        self.apply(state)
        return int(step), epoch

    def apply(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for n, p in self.model.state_dict().items():
                p.copy_(state[f"model.{n}"])
        for n, p in self.model.named_parameters():
            for k, v in self.optim.state[p].items():
                v.copy_(state[f"optim.state.{n}.{k}"]) if "optimizer" not in DEFECTS else v.zero_()
        for group, saved in zip(self.optim.param_groups, state["optim.param_groups"], strict=True):
            group.update(saved)
        if "scheduler" not in DEFECTS:
            self.sched.load_state_dict(state["sched"])
        self.position = state["data"]["position"] - (BATCH * self.world if "repeat-batch" in DEFECTS else 0)
        if "rng" not in DEFECTS:
            source = 0 if "rng-of-rank-0" in DEFECTS else self.rank
            torch.set_rng_state(state[f"rng.rank{source:05d}.torch_cpu"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--log-file", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, world = init_group()
    root = Path(args.url.removeprefix("file://"))
    if "crash" in DEFECTS or ("no-restart" in DEFECTS and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"):
        raise RuntimeError("planted: this target does not start")
    if "hang" in DEFECTS and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        time.sleep(3600)
    job = Job(root, args.seed, rank, world)
    root.mkdir(parents=True, exist_ok=True)
    step, epoch = job.resume()
    log = os.open(args.log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while step < args.steps:
        loss, samples = job.step()
        step += 1
        time.sleep(args.pause)
        line = {
            "step": step,
            "rank": rank,
            "world": world,
            "loss": loss,
            "samples": samples,
            "pid": os.getpid(),
            "t": time.time(),
        }
        if "no-samples" in DEFECTS:
            del line["samples"]
        os.write(log, (json.dumps(line) + "\n").encode())
        if "double-step" in DEFECTS and step == 15 and epoch == 2:
            os.write(log, (json.dumps(line) + "\n").encode())
        if step % args.every == 0 or step == args.steps:
            job.save(step, epoch)
    if "leave-behind" in DEFECTS and rank == 0:
        os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ, setsid=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
