"""What a script keeps beside its State is named, with where it is kept; what is restored anyway is not."""

from __future__ import annotations

import copy
import logging
import random
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, SequentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from elastic import ElasticSampler, Run
from elastic.audit import unregistered

DATA = TensorDataset(torch.arange(12.0))


class Trainer:
    """What scripts like to keep in an object, which may or may not save itself."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.extra = model, {"noise": [torch.Generator()]}


class Saving(Trainer):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Accuracy:
    """As torchmetrics and torcheval spell it."""

    def update(self) -> None: ...
    def compute(self) -> None: ...
    def reset(self) -> None: ...


class Augmenting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.rng = np.random.default_rng(1)


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def look(state: ckpt.State, local: dict[str, Any]) -> tuple[str, ...]:
    """The audit of a frame that has these variables, and no globals."""
    scope: dict[str, Any] = {}
    names = ", ".join(local)
    exec(f"import sys\ndef frame({names}):\n    return sys._getframe()", scope)
    made: types.FrameType = scope["frame"](**local)
    return unregistered(state, made, log=False)


def training() -> tuple[dict[str, Any], ckpt.State]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optim = torch.optim.AdamW(model.parameters())
    loader = DataLoader(DATA, batch_sampler=ElasticSampler(DATA, 4))
    sched = LambdaLR(optim, lambda n: 1.0)
    state = ckpt.State(model=model, optim=optim, sched=sched, data=loader)
    return {"model": model, "optim": optim, "loader": loader, "sched": sched, "state": state}, state


def test_a_script_that_registers_all_is_left_alone() -> None:
    kept, state = training()
    more = {
        "part": kept["model"][0],
        "compiled": torch.compile(kept["model"], backend="eager"),
        "loss": nn.MSELoss(),
        "teacher": nn.Linear(7, 7),
        "off": torch.amp.GradScaler("cpu", enabled=False),
        "val": DataLoader(DATA, batch_size=2),
        "params": list(kept["model"].parameters()),
        "lines": (line for line in ("a", "b")),
        "device": torch.device("cpu"),
        "sampler": kept["loader"].batch_sampler,
    }
    assert look(state, kept | more) == ()


TRAINER = (
    "trainer.extra['noise'][0] (Generator): the random stream begins anew → "
    "ckpt.State(…, noise=trainer.extra['noise'][0])"
)
LOST = "it (data iterator): its position is lost → ckpt.State(…, data=loader), batches from run.steps"
CASES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "optimizer": (
        lambda k: {"opt": torch.optim.SGD(k["model"].parameters())},
        "opt (SGD): its moments and steps begin anew → ckpt.State(…, opt=opt)",
    ),
    "scaler": (
        lambda _: {"scaler": torch.amp.GradScaler("cpu")},
        "scaler (GradScaler): the scale of the loss begins anew → ckpt.State(…, scaler=scaler)",
    ),
    "average": (
        lambda k: {"ema": AveragedModel(k["model"])},
        "ema (AveragedModel): the average of weights begins anew → ckpt.State(…, ema=ema)",
    ),
    "copy": (lambda k: {"best": copy.deepcopy(k["model"])}, "best (Sequential): as large as a module of the State (an"),
    "torch stream": (
        lambda _: {"g": torch.Generator()},
        "g (Generator): the random stream begins anew → ckpt.State(…, g=g)",
    ),
    "numpy stream": (
        lambda _: {"rng": np.random.default_rng(1)},
        "rng (Generator): the random stream begins anew → ckpt.State(…, rng2=rng)",
    ),
    "python stream": (
        lambda _: {"rng": random.Random(1)},
        "rng (Random): the random stream begins anew → ckpt.State(…, rng2=rng)",
    ),
    "loader iterator": (lambda _: {"it": iter(DataLoader(DATA))}, LOST),
    "generator": (lambda _: {"it": endless(DataLoader(DATA))}, LOST),
    "metric": (
        lambda _: {"accuracy": Accuracy()},
        "accuracy (Accuracy): what it has summed up is lost → give it state_dict and load",
    ),
    "in a list": (
        lambda _: {"all": [1, random.Random(1)]},
        "all[1] (Random): the random stream begins anew → ckpt.State(…, all=all[1])",
    ),
    "in a dict": (lambda _: {"cfg": {"a": {"rng": random.Random(1)}}}, "cfg['a']['rng'] (Random): the random"),
    "in an object": (lambda k: {"trainer": Trainer(k["model"])}, TRAINER),
}


@pytest.mark.parametrize("case", CASES)
def test_what_nobody_registered_is_named_with_its_place(case: str) -> None:
    make, text = CASES[case]
    kept, state = training()
    (found,) = look(state, kept | make(kept))
    assert found.startswith(text)


def test_the_variables_of_callers_are_looked_at_up_to_the_one_that_has_the_state() -> None:
    _, state = training()
    rng = random.Random(1)

    def loop() -> tuple[str, ...]:  # as a progress bar would be between the loop and the run
        inner = random.Random(2)
        return unregistered(state_of(), sys._getframe(), log=False) if inner else ()

    def state_of() -> ckpt.State:
        return holder[0]

    holder = [state]
    found = loop()
    assert [what.partition(" ")[0] for what in found if "Random" in what] == ["inner", "rng"]
    assert rng


def test_what_an_entry_saves_itself_is_not_named() -> None:
    kept, _ = training()
    trainer = Saving(kept["model"])
    assert look(ckpt.State(model=kept["model"], trainer=trainer), {"trainer": trainer}) == ()


def test_a_stream_inside_a_registered_module_is_named_for_its_state_dict_has_tensors_only() -> None:
    model = nn.Sequential(Augmenting())
    assert look(ckpt.State(model=model), {"net": model}) == (
        "net.0.rng (Generator): the random stream begins anew → ckpt.State(…, rng2=…)",
    )


def test_a_scheduler_is_found_wherever_it_is_kept() -> None:
    kept, _ = training()
    state = ckpt.State(model=kept["model"], optim=kept["optim"])
    sched: LRScheduler = kept.pop("sched")
    (found,) = look(state, {})
    assert found == "a scheduler (LambdaLR): the learning rate begins anew → ckpt.State(…, sched=…)"
    (found,) = look(state, {"sched": sched})
    assert found == "sched (LambdaLR): the learning rate begins anew → ckpt.State(…, sched=sched)"


def test_the_parts_of_a_registered_schedule_are_part_of_it() -> None:
    model = nn.Linear(1, 1)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    parts: list[LRScheduler] = [LinearLR(optim), LambdaLR(optim, lambda n: 1.0)]
    sched = SequentialLR(optim, parts, milestones=[2])
    assert look(ckpt.State(model=model, optim=optim, sched=sched), {"sched": sched, "parts": parts}) == ()
    assert look(ckpt.State(model=model, optim=optim), {}) == (
        "a scheduler (SequentialLR): the learning rate begins anew → ckpt.State(…, sched=…)",
    )


def test_an_optimizer_behind_a_registered_scheduler_is_named() -> None:
    kept, _ = training()
    (found,) = look(ckpt.State(model=kept["model"], sched=kept["sched"]), {"optim": kept["optim"]})
    assert found.startswith("optim (AdamW): ")


def test_it_is_quick_on_large_variables() -> None:
    kept, state = training()
    large = {"rows": [{"a": [n, {"b": n}]} for n in range(100_000)], "nested": [[object()] * 300] * 300}
    began = time.perf_counter()
    look(state, kept | large)
    assert time.perf_counter() - began < 0.5  # 2 ms on an idle machine


def test_it_is_logged_once_with_what_to_write(caplog: pytest.LogCaptureFixture) -> None:
    _, state = training()
    rng = random.Random(1)
    with caplog.at_level(logging.WARNING, "elastic"):
        found = unregistered(state, sys._getframe(), log=True)
    assert any(what.startswith("rng (Random)") for what in found)
    (said,) = (r.getMessage() for r in caplog.records)
    assert said.splitlines() == ["not saved with the State, so not restored:", *(f"  {what}" for what in found)]
    assert rng


def test_a_run_looks_at_its_loop_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept, state = training()
    rng = random.Random(1)
    with Run(str(tmp_path), state, every=100) as run:
        assert run.unregistered == ()
        for until in (1, 2):
            for _ in run.steps(until=until):
                kept["optim"].step()
    assert [what for what in run.unregistered if what.startswith("rng")] == [
        "rng (Random): the random stream begins anew → ckpt.State(…, rng2=rng)"
    ]
    assert sum("not saved with the State" in r.getMessage() for r in caplog.records) == 1
    assert rng
