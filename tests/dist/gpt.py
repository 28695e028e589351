"""A small GPT whose sizes divide by nothing, wrapped for any mesh; and what a full copy of its state is."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

VOCAB, WIDTH, CONTEXT = 97, 30, 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 3, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 77), nn.GELU(), nn.Linear(77, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.numel()
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).clone()  # FSDP2 warns about an output that is a view


def build(mesh_shape: tuple[int, ...] | None, seed: int) -> tuple[Gpt, torch.optim.AdamW, Any]:
    """Model, optimizer, scheduler; sharded by FSDP2 over a mesh, or plain where ``mesh_shape`` is None."""
    torch.manual_seed(seed)
    model = Gpt()
    if mesh_shape is not None:
        names = ("replicate", "shard")[-len(mesh_shape) :]
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optim, torch.optim.lr_scheduler.LambdaLR(optim, lambda n: 1 / (1 + n))


def train(model: Gpt, optim: torch.optim.Optimizer, sched: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, VOCAB, (4, CONTEXT))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optim.zero_grad()
        loss.backward()
        optim.step()
        sched.step()
        losses.append(loss.item())
    return losses


def full_state(model: Gpt, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every parameter, buffer and optimizer tensor, gathered; called by all ranks."""
    names = {id(p): n for n, p in model.named_parameters()}
    out = {n: _full(t) for n, t in model.state_dict().items()}
    for p, state in optim.state.items():
        out |= {f"{names[id(p)]}.{k}": _full(v) for k, v in state.items() if isinstance(v, torch.Tensor)}
    return out


def _full(t: torch.Tensor) -> torch.Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for k in a:
        assert a[k].dtype == b[k].dtype, k
        assert a[k].shape == b[k].shape, k
        assert a[k].numpy().tobytes() == b[k].numpy().tobytes(), k


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
