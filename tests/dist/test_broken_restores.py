"""Five restores that go wrong after every checksum was good: each is caught and named, and plain DCP says nothing.

Run with ``-s`` to see what each says.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.engine import reader
from ckpt.errors import NotProven
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist
_HAND_OVER = reader._hand_over


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, ckpt.State]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 30), nn.Linear(30, 6))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 12)).square().mean().backward()
    optim.step()
    return model, optim, ckpt.State(model=model, optim=optim)


def save(url: str) -> None:
    _, _, state = build(0)
    torch.manual_seed(100 + dist.get_rank())
    with ckpt.open(url) as store:
        store.resume(state)
        store.save(1, state).wait()


# --- the defects: what a bug in a resharding, a planner, an optimizer or a memory does ------------------------------


def off_by_one(state: ckpt.State) -> None:
    """The slice that rank 1 takes of one tensor begins one element late."""

    def shifted(need: Any, payload: memoryview, planner: Any) -> None:
        if need.item.fqn == "model.0.weight" and dist.get_rank() == 1:
            payload = memoryview(bytes(payload[4:]) + bytes(payload[:4]))
        _HAND_OVER(need, payload, planner)

    reader._hand_over = shifted


def flipped(state: ckpt.State) -> None:
    """One bit of rank 1's memory flips after the read."""
    real = state.apply

    def flip(*args: Any, **kwargs: Any) -> str:
        done = real(*args, **kwargs)
        if dist.get_rank() == 1:
            state["model"][1].weight.to_local().data.view(torch.int32)[0, 3] ^= 1 << 13
        return done

    state.apply = flip  # type: ignore[method-assign]


def cast(state: ckpt.State) -> None:
    """An optimizer keeps a moment in fewer bits than it is given."""
    optim = state["optim"]
    real = optim.load_state_dict

    def lossy(given: dict[str, Any]) -> None:
        given["state"][2]["exp_avg"] = given["state"][2]["exp_avg"].bfloat16().float()
        real(given)

    optim.load_state_dict = lossy


def swapped(state: ckpt.State) -> None:
    """The streams of two ranks change places."""
    real = state.rng.restore

    def other(saved: dict[str, Any]) -> None:
        both: list[Any] = [None, None]
        dist.all_gather_object(both, saved)
        real(both[1 - dist.get_rank()])

    state.rng.restore = other  # type: ignore[method-assign]


def stale(state: ckpt.State) -> None:
    """One tensor keeps what it held before the load."""
    bias, real = state["model"][1].bias, state.apply
    old = bias.to_local().clone()

    def keep(*args: Any, **kwargs: Any) -> str:
        done = real(*args, **kwargs)
        bias.to_local().data.copy_(old)
        return done

    state.apply = keep  # type: ignore[method-assign]


CAUGHT: dict[Callable[[ckpt.State], None], tuple[int, tuple[str, ...]]] = {  # ranks of the restore, what is named
    off_by_one: (3, ("model.0.weight: fp1:", "model.0.weight[", "block 0 of 1 in __0_0.distcp (on rank 1)")),
    flipped: (2, ("model.1.weight: fp1:", "model.1.weight[3, 3]: ", "block 0 of 1 in __1_0.distcp (on rank 1)")),
    cast: (2, ("optim.state.1.weight.exp_avg: fp1:", "optim.state.1.weight.exp_avg[0, 0]: ", "(on rank 0)")),
    swapped: (2, ("rng.rank00000: numpy, python, torch differ, it is rng.rank00001",)),
    stale: (2, ("model.1.bias: fp1:", "model.1.bias[0]: ", "(on rank 0)")),
}


def restore(url: str, defect: Callable[[ckpt.State], None]) -> str:
    _, _, state = build(50)
    defect(state)
    try:
        ckpt.open(url).resume(state)
    except NotProven as e:
        return str(e)
    return "nothing"


@pytest.mark.parametrize("defect", CAUGHT, ids=lambda d: d.__name__)
def test_each_is_caught_and_named(tmp_path: Path, defect: Callable[[ckpt.State], None]) -> None:
    url = str(tmp_path / "run")
    run_ranks(2, save, url)
    ranks, named = CAUGHT[defect]
    texts = run_ranks(ranks, restore, url, defect)
    assert texts == texts[:1] * ranks, "every rank hears it"
    print(f"\n{defect.__doc__}\n{texts[0]}")
    assert all(name in texts[0] for name in named), texts[0]
    assert not list(Path(url).glob("quarantine/*")), "what is stored is good"


# --- the same on plain DCP -------------------------------------------------------------------------------------------


@contextmanager
def slices_off_by_one() -> Iterator[None]:
    real = filesystem.narrow_tensor_by_index

    def late(tensor: torch.Tensor, offsets: Any, sizes: Any) -> torch.Tensor:
        return real(tensor.flatten().roll(-1).view(tensor.shape), offsets, sizes)

    filesystem.narrow_tensor_by_index = late
    try:
        yield
    finally:
        filesystem.narrow_tensor_by_index = real


def plain_off_by_one(folder: str, target: dict[str, Any]) -> None:
    with slices_off_by_one():
        dcp.load(target, checkpoint_id=folder)


def plain_flipped(folder: str, target: dict[str, Any]) -> None:
    dcp.load(target, checkpoint_id=folder)
    target["weight"].view(torch.int32)[3, 3] ^= 1 << 13


def plain_cast(folder: str, target: dict[str, Any]) -> None:
    target["weight"] = target["weight"].bfloat16()
    dcp.load(target, checkpoint_id=folder)


def plain_swapped(folder: str, target: dict[str, Any]) -> None:
    dcp.load(target, checkpoint_id=folder)
    target["rng.0"], target["rng.1"] = target["rng.1"], target["rng.0"]


def plain_stale(folder: str, target: dict[str, Any]) -> None:
    old = target.pop("bias")
    dcp.load(target, checkpoint_id=folder)
    target["bias"] = old


@pytest.mark.parametrize(
    "defect", [plain_off_by_one, plain_flipped, plain_cast, plain_swapped, plain_stale], ids=lambda d: d.__name__
)
def test_plain_dcp_says_nothing_of_the_same(tmp_path: Path, defect: Callable[[str, dict[str, Any]], None]) -> None:
    """Each load returns without a word and leaves what was not saved. Should a release of torch tell, this tells us."""
    saved = {
        "weight": torch.randn(8, 8),
        "bias": torch.randn(8),
        "rng.0": torch.arange(9),
        "rng.1": torch.ones(9).long(),
    }
    target = {k: torch.zeros_like(v) for k, v in saved.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is one process
        dcp.save(dict(saved), checkpoint_id=str(tmp_path / "dcp"))
        defect(str(tmp_path / "dcp"), target)
    assert any(target[k].dtype != v.dtype or not torch.equal(target[k], v) for k, v in saved.items())
