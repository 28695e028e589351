"""FSDP2 and torch.compile, from the meta device: no rank ever holds the whole model.

    [torchrun --nproc-per-node N --max-restarts R] examples/train_compiled.py URL --steps 40

The model is built without memory, sharded, given memory, compiled; ``init`` fills it where no step is restored.
"""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import ckpt
import elastic

WIDTH, LAYERS = 32, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("scale", torch.empty(WIDTH), persistent=False)  # in no checkpoint: ``init`` sets it

    @torch.no_grad()
    def init(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.LayerNorm)):
                module.reset_parameters()
        self.get_buffer("scale").copy_(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(backend: str) -> Net:
    with torch.device("meta"):
        model = Net()
    if dist.is_initialized() and dist.get_world_size() > 1:
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
    model.to_empty(device=torch.accelerator.current_accelerator() or "cpu")
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where checkpoints live")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", default="10 steps", help="when to save: '10 steps', '10m' or 'auto'")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--log-file", help="file to append a JSON line a step to")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    elastic.init()
    rank = dist.get_rank() if dist.is_initialized() else 0
    x = torch.randn(1000, WIDTH)
    data = TensorDataset(torch.arange(1000), x, x.sin().sum(1, keepdim=True))
    model = build(args.backend)
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(data, batch_sampler=elastic.ElasticSampler(data, 24, seed=1))
    device = next(model.parameters()).device

    state = ckpt.State(model=model, optim=optim, data=loader)
    with elastic.Run(args.url, state, every=args.every, init=model.init) as run:
        for step, (ids, inputs, targets) in run.steps(until=args.steps):
            loss = F.mse_loss(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optim.step()
            optim.zero_grad()
            run.log(loss=loss)
            if args.log_file:
                row = {"step": step, "rank": rank, "loss": loss.item(), "samples": ids.tolist(), "pid": os.getpid()}
                with open(args.log_file, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
