"""The README's code runs as it stands; its commands exist; its links lead somewhere."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
import elastic

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


class Data(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, n: int) -> torch.Tensor:
        return torch.full((4,), float(n))


def build() -> tuple[Any, ...]:
    model = nn.Linear(4, 1)
    optim = torch.optim.AdamW(model.parameters())
    sched = torch.optim.lr_scheduler.ConstantLR(optim)
    loader = torch.utils.data.DataLoader(Data(), batch_sampler=elastic.ElasticSampler(64, 8))
    return model, optim, sched, loader


def train_step(model: nn.Module, optim: Any, sched: Any, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    optim.zero_grad()
    loss.backward()
    optim.step()
    sched.step()
    return loss


@pytest.mark.parametrize("n", range(len(BLOCKS)))
def test_code_block(n: int, tmp_path: Path) -> None:
    model, optim, sched, _ = build()
    names: dict[str, Any] = {
        "build": build, "train_step": train_step, "model": model, "optim": optim, "sched": sched,
        "state": ckpt.State(model=model, optim=optim), "batches": itertools.cycle([torch.ones(2, 4)]),
        "dataset": Data(), "loss_fn": lambda out: out.square().mean(),
    }  # fmt: skip
    code = BLOCKS[n].replace("s3://bucket", str(tmp_path)).replace("100_000", "1000").replace("% 500", "% 250")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        exec(compile(code, f"README.md block {n}", "exec"), names)
    assert list(tmp_path.iterdir()), "the block wrote nothing"


def test_there_are_blocks() -> None:
    assert len(BLOCKS) == 5


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`((?:ckpt|elastic|drills) [a-z][a-z-]*)", README))))
def test_command_exists(command: str) -> None:
    tool, sub = command.split()
    done = subprocess.run(
        [Path(sys.executable).with_name(tool), sub, "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Exit status" in done.stdout or "exit status" in done.stdout.lower()


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_error_code_exists() -> None:
    codes = {v.code for v in vars(ckpt.errors).values() if isinstance(v, type) and issubclass(v, ckpt.errors.CkptError)}
    for code in re.findall(r"\bC-[A-Z]\b", README):
        assert code in codes, code
