"""Makes the golden run of the format: two starts on two ranks, one step each. Its files stay as they were made.

``python -m tests.corpus.golden FOLDER`` writes a new one, for a new version of the format; the old ones stay.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

GOLDEN_V1 = Path(__file__).parent / "golden-v1"
STEPS = (1, 2)
LR = 0.5


def expected(step: int) -> dict[str, Any]:
    """What plain DCP loads from a golden step, by key: every number is exact."""
    import torch

    weight = torch.arange(24, dtype=torch.float32).reshape(6, 4) - LR * sum(
        2 - 0.5 ** (n - 1) for n in range(1, step + 1)
    )
    return {
        "model.weight": weight,
        "model.fine": torch.tensor([0.5, -1.0, 2.0, 1e4, -0.0], dtype=torch.bfloat16),
        "model.empty": torch.empty(0, 3),
        "model.count": torch.tensor(step, dtype=torch.int64),
        "optim.state.weight.momentum_buffer": torch.full((6, 4), 2 - 0.5 ** (step - 1)),
    }


def make_step(url: str) -> str:
    """Resume the run, train one step, save it. On every rank of the group; returns the attempt's name."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import ckpt

    model = torch.nn.Module()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    start = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    model.weight = torch.nn.Parameter(distribute_tensor(start, mesh, [Shard(0)]))
    model.register_buffer("fine", torch.tensor([0.5, -1.0, 2.0, 1e4, -0.0], dtype=torch.bfloat16))
    model.register_buffer("empty", torch.empty(0, 3))
    model.register_buffer("count", torch.tensor(0))
    optim = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
    state = ckpt.State(model=model, optim=optim, note={"name": "golden", "scale": 0.125})
    with ckpt.open(url) as run:
        step = run.resume(state).step + 1
        model.weight.grad = torch.ones_like(model.weight)
        optim.step()
        model.count += 1
        return run.save(step, state).wait().attempt


if __name__ == "__main__":
    from tests.ranks import run_ranks

    for _ in STEPS:
        print(run_ranks(2, make_step, sys.argv[1]))
