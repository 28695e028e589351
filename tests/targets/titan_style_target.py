"""A loop as torchtitan writes it: a config, a stateful Trainer and loader, FSDP2; only its checkpointing is ``ckpt``.

torchrun --nproc-per-node N --max-restarts R titan_style_target.py URL --log-file FILE
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
import elastic


@dataclass(frozen=True)
class JobConfig:
    folder: str
    steps: int
    interval: int
    seed: int
    log_file: str | None
    global_batch: int = 16
    dim: int = 32
    vocab: int = 64
    seq_len: int = 24


class Loader(Stateful):
    """Parallel-aware: the stream of tokens is one, each data-parallel rank takes its part of a batch."""

    def __init__(self, config: JobConfig, rank: int, world: int) -> None:
        self.config, self.rank, self.world = config, rank, world
        self.sample = 0

    def __iter__(self) -> Iterator[tuple[list[int], Tensor]]:
        share = self.config.global_batch // self.world
        while True:
            ids = [self.sample + self.rank * share + n for n in range(share)]
            rows = [self._row(n) for n in ids]
            self.sample += self.config.global_batch
            yield ids, torch.stack(rows)

    def _row(self, n: int) -> Tensor:
        g = torch.Generator().manual_seed(self.config.seed * 1_000_003 + n)
        return torch.randint(self.config.vocab, (self.config.seq_len + 1,), generator=g)

    def state_dict(self) -> dict[str, int]:
        return {"sample": self.sample}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.sample = state_dict["sample"]


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.RMSNorm(dim), nn.GRU(dim, dim, batch_first=True)
        self.drop, self.out = nn.Dropout(0.1), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.out(self.mix(self.norm(x))[0]))


class Model(nn.Module):
    def __init__(self, config: JobConfig) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleDict({str(n): Layer(config.dim) for n in range(2)})
        self.output = nn.Linear(config.dim, config.vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(h)


class Trainer(Stateful):
    """Its own state is what it counts: steps and tokens."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        elastic.init()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        torch.set_num_threads(1)
        torch.manual_seed(config.seed)
        self.model: nn.Module = Model(config)
        if self.world > 1:
            mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp_shard",))
            for layer in self.model.layers.values():  # type: ignore[union-attr, operator]
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: min(1.0, (n + 1) / 10))
        self.dataloader = Loader(config, self.rank, self.world)
        self.step = self.ntokens_seen = 0
        for seeded in (random.seed, np.random.seed, torch.manual_seed):
            seeded(config.seed + 1 + self.rank)
        self.states = ckpt.State(model=self.model, optimizer=self.optimizer, lr_scheduler=self.lr_scheduler,
                                 data=self.dataloader, train_state=self)  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]

    def train_step(self, tokens: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.lr_scheduler.step()
        return loss.detach()

    def train(self) -> None:
        path = self.config.log_file
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if path else None
        with ckpt.open(self.config.folder, keep=ckpt.Latest(4), grace_s=0.0) as checkpointer:
            checkpointer.resume(self.states)
            batches = iter(self.dataloader)
            self.states.restore_rng()
            while self.step < self.config.steps:
                ids, tokens = next(batches)
                loss = self.train_step(tokens)
                self.step += 1
                self.ntokens_seen += self.config.global_batch * self.config.seq_len
                line = {"step": self.step, "rank": self.rank, "world": self.world, "loss": loss.item(),
                        "samples": ids, "pid": os.getpid(), "t": time.time()}  # fmt: skip
                if log is not None:
                    os.write(log, (json.dumps(line) + "\n").encode())
                if self.step % self.config.interval == 0 or self.step == self.config.steps:
                    checkpointer.save(self.step, self.states)
        if dist.is_initialized():
            dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--interval", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-file")
    Trainer(JobConfig(**vars(parser.parse_args()))).train()


if __name__ == "__main__":
    main()
