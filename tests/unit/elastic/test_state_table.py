"""Everything that a bitwise resume needs, row by row: it comes back, or is refused by name, or is named by the audit.

Here is what one process shows; ``tests/dist/test_state_table.py`` has the rows that need several. Rows with a place of
their own: random streams and loaders (``tests/unit/ckpt/test_per_rank.py``, ``tests/dist/test_per_rank.py``,
``tests/dist/test_loaders.py``), what workers draw (``test_samples.py``), what nobody registered (``test_audit.py``).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import TensorDataset

import ckpt
from ckpt.errors import Refused
from ckpt.values import value_digest
from elastic import ElasticSampler, Run, environment
from elastic.audit import unregistered
from elastic.ledger.events import Event, RunStarted
from tests.dist.readback import differences, step_folder
from tests.unit.ckpt.test_state import roundtrip

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: int = 3, then: Callable[[], object] = int) -> None:
    for _ in range(steps):
        model(X).square().mean().backward()
        optim.step()
        optim.zero_grad()
        then()


def bits(*objects: Any) -> list[str]:
    """Digests of what objects say of themselves, or of plain values."""
    return [value_digest(o.state_dict() if hasattr(o, "state_dict") else o) for o in objects]


def same_from_here(tmp_path: Path, make: Callable[[int], tuple[dict[str, Any], Callable[[], None]]]) -> None:
    """``make(seed)`` builds a State's entries and how to train on: a copy restored half-way ends with the same bits."""
    first, go_on = make(0)
    go_on()
    second, go_on_too = make(1)
    roundtrip(tmp_path, ckpt.State(**first), ckpt.State(**second))
    assert bits(*second.values()) == bits(*first.values())
    torch.manual_seed(7)
    go_on()
    torch.manual_seed(7)
    go_on_too()
    assert bits(*second.values()) == bits(*first.values())


# --- parameters, buffers, averages ------------------------------------------------------------------------------------


def test_averages_of_weights_and_their_counters(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[dict[str, Any], Callable[[], None]]:
        model = net(seed)
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        swa, rate = AveragedModel(model), SWALR(optim, swa_lr=0.05, anneal_epochs=4)

        def after_step() -> None:
            ema.update_parameters(model)
            swa.update_parameters(model)
            rate.step()

        return (
            {"model": model, "optim": optim, "ema": ema, "swa": swa, "rate": rate},
            lambda: train(model, optim, then=after_step),
        )

    same_from_here(tmp_path, make)
    entries, go_on = make(1)
    ckpt.open(str(tmp_path / "run")).load(ckpt.State(**entries))
    assert entries["swa"].n_averaged == 3
    go_on()
    update_bn([X], entries["swa"])


class Cached(nn.Module):
    """A buffer that is rebuilt from nothing and never changes, and one that counts but is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.weight + self.angles


def test_a_buffer_that_is_not_persistent_is_named_when_training_changes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Cached()
    state = ckpt.State(model=nn.Sequential(model))
    with ckpt.open(str(tmp_path)) as store:
        store.resume(state)
        for step in range(1, 5):
            model(X)
            store.save(step, state).wait()
    told = [r.getMessage() for r in caplog.records if r.name == "ckpt.state"]
    assert told == ["model.0.calls changes in training and is not saved: register_buffer(…, persistent=True)"]


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    a, b = make(0), make(1)
    optims = [torch.optim.AdamW(m.parameters()) for m in (a, b)]
    for m, optim in zip((a, b), optims, strict=True):
        m["head"](m["embed"](torch.arange(5))).square().sum().backward()
        optim.step()
    roundtrip(tmp_path, ckpt.State(model=a, optim=optims[0]), ckpt.State(model=b, optim=optims[1]))
    assert b["head"].weight is b["embed"].weight
    assert bits(b, optims[1]) == bits(a, optims[0])


# --- optimizer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_flags_that_change_bits_come_back_with_the_optimizer(tmp_path: Path, flag: str) -> None:
    a, b = net(0), net(1)
    saved = torch.optim.AdamW(a.parameters(), **{flag: True})
    train(a, saved)
    target = torch.optim.AdamW(b.parameters())
    roundtrip(tmp_path, ckpt.State(model=a, optim=saved), ckpt.State(model=b, optim=target))
    assert target.param_groups[0][flag] == saved.param_groups[0][flag]
    steps = [s["step"] for s in target.state.values()]
    assert {(type(s), s.dtype, s.device.type, s.item()) for s in steps} == {(torch.Tensor, torch.float32, "cpu", 3.0)}
    assert bits(b, target) == bits(a, saved)


class MasterSGD(torch.optim.SGD):
    """Keeps the weights in full precision in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            master = self.state[p].setdefault("master", p.float().clone())
            master.sub_(p.grad.float(), alpha=1e-3)
            p.copy_(master)


def test_masters_in_the_state_of_an_optimizer_keep_their_precision(tmp_path: Path) -> None:
    """torch casts what an optimizer loads to the dtype of its parameter."""

    def make(seed: int) -> tuple[dict[str, Any], Callable[[], None]]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 3).bfloat16()
        optim = MasterSGD(model.parameters())

        def go_on() -> None:
            for _ in range(5):
                model(X.bfloat16()).square().mean().backward()
                optim.step()
                optim.zero_grad()

        return {"model": model, "optim": optim}, go_on

    same_from_here(tmp_path, make)


def test_masters_in_full_precision_belong_to_a_module(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[dict[str, Any], Callable[[], None]]:
        model = net(seed).bfloat16()
        masters = nn.ParameterList(p.detach().float() for p in model.parameters())
        optim = torch.optim.AdamW(masters, lr=1e-4)

        def go_on() -> None:
            for _ in range(3):
                model(X.bfloat16()).square().mean().backward()
                for p, m in zip(model.parameters(), masters, strict=True):
                    m.grad, p.grad = p.grad.float(), None
                optim.step()
                for p, m in zip(model.parameters(), masters, strict=True):
                    p.data.copy_(m)

        return {"model": model, "masters": masters, "optim": optim}, go_on

    same_from_here(tmp_path, make)
    model = net()
    loose = torch.optim.AdamW([p.detach().double().requires_grad_() for p in model.parameters()])
    with pytest.raises(Refused, match="6 of 6 parameters of the optimizer are in no module of it"):
        ckpt.State(model=model, optim=loose)


# --- schedule, early stop, gradient scaler ----------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "warm-up, then cosine": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=4), lr.CosineAnnealingLR(o, 9)], milestones=[4]
    ),
    "chained": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.5, 4), lr.ExponentialLR(o, 0.9)]),
    "one cycle": lambda o: lr.OneCycleLR(o, 0.2, total_steps=20),
    "warm restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 4),
    "lambda": lambda o: lr.LambdaLR(o, lambda n: 1 / (1 + n)),
    "cyclic": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on_where_it_was(tmp_path: Path, kind: str) -> None:
    def make(seed: int) -> tuple[dict[str, Any], Callable[[], None]]:
        model = net(seed)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        sched = SCHEDULES[kind](optim)
        return {"model": model, "optim": optim, "sched": sched}, lambda: train(model, optim, then=sched.step)

    same_from_here(tmp_path, make)


def test_early_stop_best_metric_and_a_schedule_that_looks_at_it(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[ckpt.State, lr.ReduceLROnPlateau]:
        model = net(seed)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        sched = lr.ReduceLROnPlateau(optim, patience=1)
        return ckpt.State(model=model, optim=optim, sched=sched, best=float("inf"), waited=0, run_id=""), sched

    (a, sched), (b, again) = make(0), make(1)
    for loss in (0.5, 0.4, 0.45):
        sched.step(loss)
        a["waited"] = 0 if loss < a["best"] else a["waited"] + 1
        a["best"] = min(a["best"], loss)
    a["run_id"] = "run-42"
    roundtrip(tmp_path, a, b)
    assert (b["best"], b["waited"], b["run_id"], again.num_bad_epochs) == (0.4, 1, "run-42", 1)
    for s in (sched, again):
        s.step(0.46)
    assert bits(again) == bits(sched)
    assert again.get_last_lr() == pytest.approx([0.01])


def test_the_scale_of_the_loss_its_growth_and_skipped_steps(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[dict[str, Any], Callable[[], None]]:
        model = net(seed)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)

        def go_on() -> None:
            for n in range(6):
                loss = model(X).square().mean() * (float("inf") if n == 1 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optim)
                scaler.update()
                optim.zero_grad()

        return {"model": model, "optim": optim, "scaler": scaler}, go_on

    same_from_here(tmp_path, make)
    entries, _ = make(1)
    ckpt.open(str(tmp_path / "run")).load(ckpt.State(**entries))
    assert entries["scaler"].state_dict()["scale"] == 2.0**8  # halved by the step that was skipped, then grown
    assert entries["scaler"].state_dict()["_growth_tracker"] == 0


# --- the loop: accumulation, counters, metrics ------------------------------------------------------------------------


class Loop:
    """Micro-batches, a metric, a user's stream of each kind; one draw of each belongs to the bits of a step."""

    def __init__(self, folder: Path, seed: int) -> None:
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        data = TensorDataset(torch.randn(20, 4, generator=torch.Generator().manual_seed(3)))
        self.data = ElasticSampler(data, 6, seed=1, micro=2)
        self.rows = data.tensors[0]
        self.model = net(seed)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.streams = {
            "g": torch.Generator().manual_seed(seed),
            "n": np.random.default_rng(seed),
            "p": random.Random(seed),
        }
        self.mean = Mean()
        self.state = ckpt.State(
            model=self.model, optim=self.optim, data=self.data, mean=self.mean, tokens=0, **self.streams
        )
        self.folder, self.seen = folder, list[tuple[int, int]]()

    def train(self, until: int, fail_at: tuple[int, int] | None = None) -> Run:
        with Run(str(self.folder), self.state, every=2) as run:
            for step in run.steps(until=until):
                for n, (samples, weight) in enumerate(step.micros):
                    noise = random.random() + np.random.rand() + torch.rand(()).item() + self.drawn()
                    (self.model(self.rows[samples]).square().mean() * weight * noise).backward()
                    if (step.number, n) == fail_at:
                        raise ZeroDivisionError
                self.optim.step()
                self.optim.zero_grad()
                self.mean.add(noise)
                self.state["tokens"] += 6
                self.seen += [(step.number, self.state["tokens"])]
        return run

    def drawn(self) -> float:
        g, n, p = self.streams.values()
        return torch.rand((), generator=g).item() + float(n.normal()) + p.gauss(0, 1)


class Mean:
    """A metric that is summed up over steps."""

    def __init__(self) -> None:
        self.total, self.n = torch.zeros(()), 0

    def add(self, value: float) -> None:
        self.total, self.n = self.total + value, self.n + 1

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.n = state["total"], state["n"]


@pytest.mark.parametrize("fail_at", [(4, 1), (5, 2), (6, 0)])
def test_a_step_that_failed_between_two_micro_batches_is_done_again_as_a_whole(
    tmp_path: Path, fail_at: tuple[int, int]
) -> None:
    Loop(tmp_path / "control", 1).train(8)
    with pytest.raises(ZeroDivisionError):
        Loop(tmp_path / "run", 1).train(8, fail_at)
    again = Loop(tmp_path / "run", 2)
    assert again.train(8).resumed.step == fail_at[0] // 2 * 2
    assert differences(step_folder(tmp_path / "run", 8), step_folder(tmp_path / "control", 8)) == []
    assert again.seen[-1] == (7, 48)
    assert again.mean.n == 8


def test_an_evaluation_leaves_every_stream_of_the_state_as_it_was(tmp_path: Path) -> None:
    loop = Loop(tmp_path, 1)
    with Run(str(tmp_path), loop.state) as run:
        before = value_digest(loop.state.own_values(0))
        with run.evaluation():
            loop.drawn()
        assert value_digest(loop.state.own_values(0)) == before


def test_gradients_that_a_step_leaves_half_summed_are_refused(tmp_path: Path) -> None:
    with Run(str(tmp_path), Loop(tmp_path, 1).state) as run:
        steps = run.steps(until=2)
        next(next(steps).micros)
        with pytest.raises(Refused, match="took 1 of 3 micro-batches"):
            next(steps)


def test_what_is_summed_up_beside_the_state_is_named() -> None:
    class Metric(Mean):
        update, compute, reset = Mean.add, Mean.state_dict, Mean.__init__

    accuracy = Metric()
    (found,) = (w for w in unregistered(ckpt.State(n=1), sys._getframe(), log=False) if w.startswith("accuracy"))
    assert found == "accuracy (Metric): what it has summed up is lost → ckpt.State(…, accuracy=accuracy)"
    assert accuracy.n == 0


# --- the environment --------------------------------------------------------------------------------------------------


def test_every_start_records_its_environment_and_a_changed_one_is_told(caplog: pytest.LogCaptureFixture) -> None:
    before = torch.get_float32_matmul_precision()
    now = environment.fingerprint()
    assert now.keys() >= {"python", "torch", "numpy", "cpu", "threads", "deterministic", "float32 matmul"}
    attempt = "000000000004-e00000002-0"
    events = [started("e00000001", {"threads": "99"}), started("e00000002", now)]
    assert environment.warn_of_changes(events, attempt) == ()
    assert environment.warn_of_changes(events, None) == ()
    try:
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True, warn_only=True)
        found = environment.warn_of_changes(events, attempt)
    finally:
        torch.set_float32_matmul_precision(before)
        torch.use_deterministic_algorithms(False)
    assert found == (
        f"deterministic: {now['deterministic']} then, warn only now",
        f"float32 matmul: {before} then, medium now",
    )
    assert "bits may differ: deterministic: " in caplog.text


def test_a_resume_in_another_environment_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (before, before, before + 1):
            assert "threads" not in caplog.text
            torch.set_num_threads(threads)
            with Run(str(tmp_path), ckpt.State(n=1), every=100) as run:
                for _ in run.steps(until=run.step + 1):
                    pass
    finally:
        torch.set_num_threads(before)
    assert f"bits may differ: threads: {before} then, {before + 1} now" in caplog.text


def started(epoch: str, versions: dict[str, str]) -> Event:
    return Event(
        epoch=epoch, generation=None, start="", rank=0, world=1, step=0, time="", mono_s=0.0, host="", pid=0,
        data=RunStarted(url="", every="auto", versions=versions),
    )  # fmt: skip


def test_a_step_of_an_older_version_says_nothing_of_the_rest() -> None:
    assert environment.changes({"torch": "2.13"}, {"torch": "2.13", "threads": "4"}) == ()
    assert environment.changes({"torch": "2.12", "gone": "1"}, {"torch": "2.13"}) == ("torch: 2.12 then, 2.13 now",)
