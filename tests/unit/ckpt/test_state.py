"""State: what is captured, how it is named, what comes back, and what is refused by name."""

from __future__ import annotations

import collections
import enum
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ckpt
from ckpt.errors import Mismatch, Refused
from ckpt.parts import canonical
from ckpt.values import differing_values, value_digest


def roundtrip(tmp_path: Path, saved: ckpt.State, target: ckpt.State, step: int = 1) -> ckpt.Resumed:
    with ckpt.open(str(tmp_path / "run")) as store:
        store.resume(saved)
        store.save(step, saved).wait()
    return ckpt.open(str(tmp_path / "run")).load(target)


def draws() -> tuple[Any, ...]:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


def test_random_streams_of_python_numpy_and_torch_come_back(tmp_path: Path) -> None:
    draws()
    state = ckpt.State(n=1)
    with ckpt.open(str(tmp_path)) as store:
        store.resume(state)
        store.save(1, state).wait()
    want = [draws() for _ in range(3)]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    other = ckpt.State(n=2)
    assert ckpt.open(str(tmp_path)).load(other).rng == "restored"
    assert [draws() for _ in range(3)] == want
    other.restore_rng()
    assert [draws() for _ in range(3)] == want
    assert other["n"] == 1


@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), amsgrad=True, foreach=False),
        lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.RMSprop(p, centered=True),
        lambda p: torch.optim.Adafactor(p),
    ],
    ids=["sgd", "adamw tensor lr", "adam fused", "adagrad", "rmsprop", "adafactor"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizers_go_on_as_if_nothing_happened(tmp_path: Path, build: Any, dtype: torch.dtype) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).to(dtype)
        return model, build(model.parameters())

    def train(model: nn.Module, optim: torch.optim.Optimizer) -> None:
        torch.manual_seed(42)
        for _ in range(3):
            optim.zero_grad()
            model(torch.randn(4, 5, dtype=dtype)).square().mean().backward()
            optim.step()

    model, optim = make(0)
    train(model, optim)
    model2, optim2 = make(1)
    roundtrip(tmp_path, ckpt.State(model=model, optim=optim), ckpt.State(model=model2, optim=optim2))
    for p, q in zip(model.parameters(), model2.parameters(), strict=True):
        for k, v in optim.state[p].items():
            other = optim2.state[q][k]
            assert type(v) is type(other), k
            if isinstance(v, torch.Tensor):
                assert v.dtype == other.dtype, k
    train(model, optim)
    train(model2, optim2)
    for (n, a), (_, b) in zip(model.state_dict().items(), model2.state_dict().items(), strict=True):
        assert torch.equal(a, b), n


def test_an_optimizer_that_never_stepped_is_not_stepped_by_a_save(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optim = torch.optim.AdamW(model.parameters())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    roundtrip(tmp_path, ckpt.State(model=model, optim=optim), ckpt.State(model=model, optim=optim))
    assert not optim.state
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_two_models_and_an_optimizer_over_both(tmp_path: Path) -> None:
    def make() -> ckpt.State:
        g, d = nn.Linear(3, 3), nn.Linear(3, 3)
        both = torch.optim.Adam([{"params": g.parameters()}, {"params": d.parameters(), "lr": 0.5}])
        sum(m(torch.ones(3)).sum() for m in (g, d)).backward()
        both.step()
        return ckpt.State(G=g, D=d, opt=both)

    a, b = make(), make()
    roundtrip(tmp_path, a, b)
    assert torch.equal(a["G"].weight, b["G"].weight)
    assert b["opt"].param_groups[1]["lr"] == 0.5
    assert value_digest(a["opt"].state_dict()) == value_digest(b["opt"].state_dict())


def test_names_are_without_wrappers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)  # a user's own name that DDP uses too

    compiled = torch.compile(Net(), backend="eager")
    assert canonical(compiled, "_orig_mod.module.weight") == "module.weight"


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(d, s) for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool,
                      torch.complex64, torch.float8_e4m3fn, torch.uint32) for s in ((), (0, 3), (5,), (3, 4, 2))],
)  # fmt: skip
def test_every_dtype_and_shape_as_a_buffer(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    class Holder(nn.Module):
        def __init__(self, fill: bool) -> None:
            super().__init__()
            raw = (
                torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
                if fill
                else torch.zeros(*shape, dtype.itemsize, dtype=torch.uint8)
            )
            t = raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
            self.register_buffer("b", t)

    a, b = Holder(True), Holder(False)
    roundtrip(tmp_path, ckpt.State(m=a), ckpt.State(m=b))
    assert b.b.dtype == dtype
    assert a.b.flatten().view(torch.uint8).tolist() == b.b.flatten().view(torch.uint8).tolist()


def test_views_transposes_and_tied_weights(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            big = torch.randn(50, 40)
            self.register_buffer("column", big[:, 3])
            self.register_buffer("turned", big.t())
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

    a, b = Odd(), Odd()
    roundtrip(tmp_path, ckpt.State(m=a), ckpt.State(m=b))
    for k, v in a.state_dict().items():
        assert torch.equal(v, b.state_dict()[k]), k
    assert b.a.weight is b.b.weight
    (item,) = (tmp_path / "run" / "steps").glob("*/*/__0_0.distcp")
    assert item.stat().st_size < 50 * 40 * 4 + 30_000  # the column did not drag its whole storage in


def test_a_save_takes_the_values_of_its_moment(tmp_path: Path) -> None:
    model = nn.Linear(100, 100)
    state = ckpt.State(model=model)
    with ckpt.open(str(tmp_path)) as store:
        store.resume(state)
        want = model.weight.detach().clone()
        pending = store.save(1, state)
        with torch.no_grad():
            model.weight.fill_(0)  # training goes on while the save is written
        pending.wait()
    ckpt.open(str(tmp_path)).load(state)
    assert torch.equal(model.weight, want)


def test_differences_are_named(tmp_path: Path) -> None:
    saved = ckpt.State(model=nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), extra=1)
    target = ckpt.State(model=nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1, bias=False)).double(), more=2)
    with pytest.raises(Mismatch) as caught:
        roundtrip(tmp_path, saved, target)
    text = str(caught.value)
    for part in (
        "missing",
        "more: in memory, not in the step",
        "extra: in the step, not in memory",
        "model.1.bias",
        "model.0.weight: shape in memory (4, 2), in the step (3, 2)",
        "dtype in memory torch.float64",
    ):
        assert part in text


class Odd:
    def state_dict(self) -> dict[str, Any]:
        return {"fine": 1, "list": [{"deep": lambda: 1}]}

    def load_state_dict(self, _: Any) -> None: ...


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"x": object()}, "State(x=…): object has no state_dict"),
        ({"data": DataLoader([1, 2])}, "State(data=…): this DataLoader has no position that could be saved"),  # type: ignore[arg-type]
        ({"data": (n for n in (1, 2))}, "State(data=…): this generator has no position that could be saved"),
        ({"data": iter(DataLoader([1, 2]))}, "ElasticSampler"),  # type: ignore[arg-type]
        ({"rng": 1}, "'rng' is the name of the random streams"),
        ({"a.b": 1}, "no dots"),
        ({"optim": torch.optim.SGD(nn.Linear(1, 1).parameters())}, "are in no module of it"),
    ],
)
def test_what_cannot_be_a_state_is_refused_at_once(entries: dict[str, Any], text: str) -> None:
    with pytest.raises(Refused, match=r"(?s).*" + text.replace("(", r"\(").replace(")", r"\)").replace(".", r"\.")):
        ckpt.State(**entries)


def test_a_value_that_is_no_plain_data_is_named_before_anything_is_written(tmp_path: Path) -> None:
    state = ckpt.State(odd=Odd())
    store = ckpt.open(str(tmp_path))
    store.resume(state)
    with pytest.raises(Refused, match=r"odd\['list'\]\[0\]\['deep'\] is a builtins.function"):
        store.save(1, state)
    assert not (tmp_path / "steps").exists()


def test_value_digests_see_types_and_order_and_nothing_else() -> None:
    text = "ab" * 3
    assert value_digest({"a": [text, text]}) == value_digest({"a": ["ababab", "".join(["aba", "bab"])]})
    values = [
        1,
        1.0,
        True,
        "1",
        b"1",
        None,
        [1],
        (1, 1),
        {"1": 1},
        0.0,
        -0.0,
        torch.tensor(1),
        torch.tensor(1.0),
        [[1], 2],
        [1, [2]],
    ]
    assert len({value_digest(v) for v in values}) == len(values)


def test_values_that_differ_between_ranks_are_named() -> None:
    (d,) = differing_values([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "1", "b": "2"}])
    assert (d.key, d.ranks) == ("b", (1,))


def test_saving_into_a_run_that_was_not_resumed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="not resumed"):
        ckpt.open(str(tmp_path)).save(1, ckpt.State(n=1))


def test_fresh_starts_over_beside_what_is_there(tmp_path: Path) -> None:
    for fresh, want, step in ((False, 0, 5), (False, 5, 6), (True, 0, 5), (False, 5, 6)):
        state = ckpt.State(n=1)
        with ckpt.open(str(tmp_path), fresh=fresh) as store:
            assert store.resume(state).step == want
            store.save(step, state).wait()


def test_an_older_start_cannot_commit_any_more(tmp_path: Path) -> None:
    state = ckpt.State(n=1)
    old = ckpt.open(str(tmp_path))
    old.resume(state)
    old.save(1, state).wait()
    new = ckpt.open(str(tmp_path))
    assert new.resume(state).step == 1
    with pytest.raises(ckpt.CkptError, match="newer start of this run") as caught:
        old.save(2, state).wait()
    assert caught.value.exit_status == 6
    new.save(3, state).wait()
    assert ckpt.open(str(tmp_path)).newest_valid() == f"{3:012d}-e00000002-0"


def test_retention_keeps_the_newest_and_deletes_after_the_grace(tmp_path: Path) -> None:
    state = ckpt.State(n=1)
    with ckpt.open(str(tmp_path), keep=ckpt.Latest(2), grace_s=3600) as store:
        store.resume(state)
        for step in range(1, 6):
            store.save(step, state).wait()
    assert sorted(int(p.name[:12]) for p in (tmp_path / "commits").iterdir()) == [4, 5]
    assert len(list((tmp_path / "steps").iterdir())) == 5  # readers may still be at the older ones
    with ckpt.open(str(tmp_path), keep=ckpt.Latest(2), grace_s=0) as store:
        assert store.resume(state).step == 5
        store.save(6, state).wait()
    assert [int(p.parent.parent.name) for p in sorted((tmp_path / "steps").glob("*/*/manifest.json"))] == [5, 6]
    assert not list(tmp_path.glob("retire/*"))


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    "value",
    [
        Level.HIGH,
        collections.namedtuple("P", "x")(1),
        collections.defaultdict(int),
        frozenset({1}),
        10**2000,
        lambda: 1,
        b"",
    ],
    ids=["enum", "namedtuple", "defaultdict", "frozenset", "huge int", "function", "no bytes"],
)
def test_what_a_load_would_refuse_is_refused_by_the_save(tmp_path: Path, value: Any) -> None:
    state = ckpt.State(deep={"list": [1]})
    store = ckpt.open(str(tmp_path))
    store.resume(state)
    state["deep"] = {"list": [value]}
    if isinstance(value, int) and not isinstance(value, enum.Enum):  # pickle may or may not take it: both are honest
        try:
            store.save(1, state).wait()
        except Refused:
            return
        ckpt.open(str(tmp_path)).load(state)
        return
    with pytest.raises(Refused, match=r"deep"):
        store.save(1, state)


def test_numpy_numbers_become_plain_ones(tmp_path: Path) -> None:
    """As a schedule written with numpy leaves them in a learning rate."""
    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    sched = torch.optim.lr_scheduler.LambdaLR(optim, lambda n: 0.5 * (1 + np.cos(n / 10)))
    optim.step()
    sched.step()
    state = ckpt.State(model=model, optim=optim, sched=sched, best=np.float64(0.25))
    roundtrip(tmp_path, state, state)
    assert type(optim.param_groups[0]["lr"]) is float
    assert state["best"] == 0.25


def test_sets_and_dicts_have_no_order() -> None:
    assert value_digest({"a", "b", "c"}) == value_digest({"c", "a", "b"})
    assert value_digest({"a": 1, "b": 2}) == value_digest({"b": 2, "a": 1})
    assert value_digest({1}) != value_digest([1])


@pytest.mark.parametrize("step", [-1, 10**12, True, 1.0, "5"])
def test_what_is_no_step_is_refused(tmp_path: Path, step: Any) -> None:
    state = ckpt.State(n=1)
    store = ckpt.open(str(tmp_path))
    store.resume(state)
    with pytest.raises(Refused, match="a step is a count"):
        store.save(step, state)


def test_a_step_that_would_not_count_is_refused(tmp_path: Path) -> None:
    state = ckpt.State(n=1)
    with ckpt.open(str(tmp_path)) as store:
        store.resume(state)
        store.save(10, state).wait()
        store.save(10, state).wait()  # again is fine: the newer attempt counts
        with pytest.raises(Refused, match="would not count"):
            store.save(4, state)
    with ckpt.open(str(tmp_path)) as store:
        store.resume(state)
        for step in (4, 10):
            with pytest.raises(Refused, match="builds on step 10"):
                store.save(step, state)


def test_lack_of_memory_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = ckpt.State(n=1)
    with ckpt.open(str(tmp_path)) as store:
        store.resume(state)
        store.save(1, state).wait()

    def no_memory(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", no_memory)
        with pytest.raises(Exception, match="can't allocate"):
            ckpt.open(str(tmp_path)).resume(state)
    assert not list(tmp_path.glob("quarantine/*"))
    assert ckpt.open(str(tmp_path)).resume(state).step == 1


def test_a_finished_save_lets_go_of_its_copy(tmp_path: Path) -> None:
    state = ckpt.State(model=nn.Linear(3, 3))
    store = ckpt.open(str(tmp_path))
    store.resume(state)
    pending = store.save(1, state)
    pending.wait()
    assert not hasattr(pending, "_work")


def test_a_policy_that_fails_does_not_fail_a_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Bad:
        def choose(self, steps: Any) -> Any:
            raise KeyError("oops")

    state = ckpt.State(n=1)
    with ckpt.open(str(tmp_path), keep=Bad()) as store:
        store.resume(state)
        assert store.save(1, state).wait().step == 1
    assert "old steps were not deleted" in caplog.text


@pytest.mark.parametrize(
    "url", ["s3:/bucket/run", "s3//bucket", "memory:x", "file:/x", "", " ", "s3://b//run", "file://x/y"]
)
def test_a_mistyped_url_is_no_local_folder(url: str) -> None:
    with pytest.raises(Refused):
        ckpt.open(url)


def test_a_path_object_and_a_tilde_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    state = ckpt.State(n=1)
    for url in (tmp_path / "a", "~/b"):
        with ckpt.open(url) as store:
            store.resume(state)
            store.save(1, state).wait()
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b"}


def test_a_parameter_group_added_later_is_saved_too(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, ckpt.State]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optim = torch.optim.AdamW(model[0].parameters())
        state = ckpt.State(model=model, optim=optim)
        optim.add_param_group({"params": list(model[1].parameters()), "lr": 0.5})
        model(torch.ones(2)).sum().backward()
        optim.step()
        return model, optim, state

    _, first, a = make()
    _, second, b = make()
    roundtrip(tmp_path, a, b)
    assert value_digest(first.state_dict()) == value_digest(second.state_dict())


def test_a_schedule_that_counts_comes_back_as_it_was(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=1.0)
    sched = torch.optim.lr_scheduler.MultiStepLR(optim, [3, 6, 6])
    with ckpt.open(tmp_path) as store:
        store.resume(ckpt.State(model=model, optim=optim, sched=sched))
        store.save(1, ckpt.State(model=model, optim=optim, sched=sched))
    again = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(model.parameters(), lr=1.0), [99])
    state = ckpt.State(model=model, optim=again.optimizer, sched=again)
    store = ckpt.open(tmp_path)
    store.resume(state)
    assert again.milestones == collections.Counter({6: 2, 3: 1})
    assert type(again.milestones) is collections.Counter
    store.save(2, state).wait()
