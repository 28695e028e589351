"""``elastic compare`` of real jobs on 1, 2 and 4 ranks: ``python -m tests.bench.compare_worlds [FOLDER]``.

Each rank stands for a device: a step sleeps for as long as a device would compute, so that ranks do not compete for
the cores of this machine. The batch a rank is the same, so four ranks do nearly four times the samples a second; the
learning rate is the same, too, so a larger global batch takes about as many steps, and each is a little longer. Hence
the order by samples a second and the order by the time to the same validation loss are opposite. Prints the table, and
the samples a second and the way to the target by the watch of the job's own log; ends with 1 where they differ by more
than 1 % (3 % for the time to the target, which the log knows to a step).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

RANKS, STEPS, BATCH, COMPUTE_S = (1, 2, 4), 120, 32, 0.03


def worker(url: str, log: str) -> None:
    """One rank: a linear model learns a linear teacher."""
    import os

    born = time.time()
    import torch
    import torch.distributed as dist
    from torch import nn

    import ckpt
    import elastic

    torch.set_num_threads(1)
    elastic.init()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    teacher, model = torch.randn(32, 1), nn.Linear(32, 1, bias=False)
    optim = torch.optim.SGD(model.parameters(), lr=0.02)
    held = torch.randn(256, 32)
    own = torch.Generator().manual_seed(1 + rank)
    rows: list[dict[str, Any]] = [{"born": born}]
    with elastic.Run(url, ckpt.State(model=model, optim=optim), every=1000) as run:
        for step, _ in run.steps(until=STEPS):
            x = torch.randn(BATCH, 32, generator=own)
            loss = nn.functional.mse_loss(model(x), x @ teacher + 0.1 * torch.randn(BATCH, 1, generator=own))
            optim.zero_grad()
            loss.backward()
            time.sleep(COMPUTE_S)
            if world > 1:
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                    assert p.grad is not None
                    p.grad /= world
            optim.step()
            run.log(samples=BATCH)
            if step % 5 == 4:
                with run.evaluation(), torch.no_grad():
                    value = nn.functional.mse_loss(model(held), held @ teacher).item()
                run.metric(val_loss=value)
                rows.append({"step": step, "t": time.time(), "val_loss": value})
            else:
                rows.append({"step": step, "t": time.time()})
    if rank == 0:
        Path(log).write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.sched_yield()


def main(folder: Path) -> int:
    """Run the jobs, compare them, print."""
    from click.testing import CliRunner

    from elastic.cli import cli
    from tests.dist.launch import torchrun

    for n in RANKS:
        if not (folder / f"n{n}").exists():
            log = folder / f"n{n}.log"
            with torchrun(Path(__file__), "worker", str(folder / f"n{n}"), str(log), nproc=n, log=log) as job:
                assert job.wait(120) == 0, job.tail("the job failed")
    runs = [str(folder / f"n{n}") for n in RANKS]
    files = ["--svg", str(folder / "compare.svg"), "--html", str(folder / "compare.html")]
    print(CliRunner().invoke(cli, ["compare", *runs, *files]).output)
    answer = json.loads(CliRunner().invoke(cli, ["compare", *runs, "--json"]).stdout)
    worst = 0.0
    for n, told in zip(RANKS, answer["runs"], strict=True):
        rows = [json.loads(line) for line in (folder / f"n{n}.log").read_text().splitlines()]
        steps = [row for row in rows if "step" in row]
        apart = [b["t"] - a["t"] for a, b in pairwise(steps) if "val_loss" not in b]
        watch = n * BATCH / (sum(apart) / len(apart))
        reached = next(row["t"] for row in rows if row.get("val_loss", 9e9) <= answer["target"]) - rows[0]["born"]
        speed = told["speed_per_s"] / watch - 1
        way = told["reached"]["at_s"] / reached - 1
        worst = max(worst, abs(speed) / 0.01, abs(way) / 0.03)
        print(f"n{n}: samples a second {told['speed_per_s']:.1f}, by the watch {watch:.1f} ({speed:+.2%}); to the "
              f"target {told['reached']['at_s']:.2f} s, by the watch {reached:.2f} s ({way:+.2%})")  # fmt: skip
    opposite = answer["order_by_speed"] == [f"n{n}" for n in reversed(RANKS)] and (
        answer["order_by_quality"] != answer["order_by_speed"]
    )
    return int(worst > 1 or not opposite)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*sys.argv[2:])
    elif len(sys.argv) > 1:
        sys.exit(main(Path(sys.argv[1])))
    else:
        with tempfile.TemporaryDirectory() as name:
            sys.exit(main(Path(name)))
