"""A loop as Hugging Face writes it: arguments, a Trainer with callbacks, a TrainerState; a callback saves and resumes.

    [torchrun --nproc-per-node N --max-restarts R] hf_style_target.py URL --log-file FILE

Epochs are shuffled by a seeded generator of their own, and a resume skips the batches that were trained on, as
``Trainer`` does without a stateful loader.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ckpt
import elastic


@dataclass
class TrainingArguments:
    output_dir: str
    max_steps: int
    save_steps: int
    seed: int
    log_file: str | None
    per_device_train_batch_size: int = 8
    learning_rate: float = 5e-3


@dataclass
class TrainerState:
    global_step: int = 0
    epoch: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"global_step": self.global_step, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.global_step, self.epoch = state["global_step"], state["epoch"]


class Callback:
    def on_train_begin(self, trainer: Trainer) -> None: ...

    def on_step_end(self, trainer: Trainer, loss: Tensor, ids: list[int]) -> None: ...

    def on_train_end(self, trainer: Trainer) -> None: ...


class CheckpointCallback(Callback):
    """All of the hooks: resume as training begins, save as steps end, wait as it is over."""

    def on_train_begin(self, trainer: Trainer) -> None:
        self.state = ckpt.State(model=trainer.model, optimizer=trainer.optimizer, scheduler=trainer.lr_scheduler,
                                trainer_state=trainer.state)  # fmt: skip
        self.store = ckpt.open(trainer.args.output_dir)
        self.store.resume(self.state)

    def on_step_end(self, trainer: Trainer, loss: Tensor, ids: list[int]) -> None:
        step = trainer.state.global_step
        if step % trainer.args.save_steps == 0 or step == trainer.args.max_steps:
            self.store.save(step, self.state)

    def on_train_end(self, trainer: Trainer) -> None:
        self.store.close()


class LogCallback(Callback):
    def on_step_end(self, trainer: Trainer, loss: Tensor, ids: list[int]) -> None:
        if trainer.log is not None:
            line = {"step": trainer.state.global_step, "rank": trainer.rank, "world": trainer.world, "samples": ids,
                    "loss": loss.item(), "pid": os.getpid(), "t": time.time()}  # fmt: skip
            os.write(trainer.log, (json.dumps(line) + "\n").encode())


class Sentences(Dataset[dict[str, Any]]):
    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(160, 12, generator=g), torch.randint(4, (160,), generator=g)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, n: int) -> dict[str, Any]:
        return {"id": n, "x": self.x[n], "labels": self.y[n]}


class Trainer:
    def __init__(self, args: TrainingArguments, callbacks: list[Callback]) -> None:
        self.args, self.callbacks, self.state = args, callbacks, TrainerState()
        elastic.init()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        torch.set_num_threads(1)
        torch.manual_seed(args.seed)
        self.model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 4))
        self.wrapped: nn.Module = nn.parallel.DistributedDataParallel(self.model) if self.world > 1 else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.learning_rate)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: max(0.1, 1 - n / 100))
        self.data = Sentences(args.seed)
        self.log = os.open(args.log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if args.log_file else None
        for seeded in (random.seed, np.random.seed, torch.manual_seed):
            seeded(args.seed + 7 * (1 + self.rank))

    def train(self) -> None:
        sampler = DistributedSampler(self.data, self.world, self.rank, seed=self.args.seed)  # type: ignore[var-annotated]
        generator = torch.Generator()  # else each iterator draws a number from the stream that dropout uses
        loader = DataLoader(self.data, self.args.per_device_train_batch_size, sampler=sampler, generator=generator)
        self.call("on_train_begin")
        while self.state.global_step < self.args.max_steps:
            self.state.epoch, done = divmod(self.state.global_step, len(loader))
            sampler.set_epoch(self.state.epoch)
            for n, inputs in enumerate(loader):
                if n >= done and self.state.global_step < self.args.max_steps:
                    loss = self.training_step(inputs)
                    self.state.global_step += 1
                    self.call("on_step_end", loss=loss, ids=inputs["id"].tolist())
        self.call("on_train_end")
        if dist.is_initialized():
            dist.destroy_process_group()

    def training_step(self, inputs: dict[str, Any]) -> Tensor:
        loss = nn.functional.cross_entropy(self.wrapped(inputs["x"]), inputs["labels"])
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.lr_scheduler.step()
        return loss.detach()

    def call(self, event: str, **values: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, **values)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output_dir")
    parser.add_argument("--max-steps", type=int, default=80)
    parser.add_argument("--save-steps", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-file")
    args = TrainingArguments(**vars(parser.parse_args()))
    Trainer(args, [LogCallback(), CheckpointCallback()]).train()


if __name__ == "__main__":
    main()
