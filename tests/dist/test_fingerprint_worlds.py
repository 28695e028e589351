"""One fingerprint a tensor, whatever holds it: any number of ranks, any mesh, FSDP2, HSDP, TP, FSDP+TP, DDP."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ckpt.engine.fingerprint import boxes, partial, report
from ckpt.engine.planner import dtype_name
from ckpt.format.fingerprint import Differing, Partial, covers, digest, merge, whole
from tests.dist import gpt
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist
SEED = 4
KINDS = ("gpt", "wide")
Wrap = Callable[[nn.Module, Any], nn.Module]


class Wide(nn.Module):
    """Tensors of several rows each, none of whose sizes divides by anything, and narrow, long and scalar ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4099, 7)
        self.down = nn.Linear(7, 4099)
        self.bias = nn.Parameter(torch.randn(33_331))
        self.conv = nn.Conv2d(13, 11, 3)
        self.narrow = nn.Parameter(torch.randn(9001, 3))
        self.scale = nn.Parameter(torch.randn(1))
        self.register_buffer("seen", torch.tensor(12))


def build(kind: str) -> nn.Module:
    torch.manual_seed(SEED)
    model = gpt.Gpt() if kind == "gpt" else Wide()
    for p in model.parameters():  # no two alike, so that nothing hides a mix-up
        nn.init.normal_(p)
    return model


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers, and what an optimizer would hold beside them, in other dtypes."""
    state = {k.removeprefix("module."): v.detach() for k, v in model.state_dict().items()}
    moments = {f"optim.{k}.exp_avg": v * 1.25 for k, v in state.items() if v.is_floating_point()}
    halves = {f"half.{k}": v.to(torch.bfloat16) for k, v in state.items() if v.is_floating_point()}
    return {**state, **moments, **halves, "optim.step": torch.tensor(3.0)}


def digests(state: dict[str, torch.Tensor], totals: dict[str, Partial]) -> dict[str, str]:
    assert all(covers(t.shape, totals[k]) for k, t in state.items())
    return {k: digest(dtype_name(t.dtype), t.shape, totals[k]) for k, t in state.items()}


def gathered(state: dict[str, torch.Tensor]) -> dict[str, str]:
    """One digest a tensor: every rank reports its boxes, equal boxes are counted once."""
    reports: list[Any] = [None] * gpt.world()
    if gpt.world() > 1:
        dist.all_gather_object(reports, report(state))
    else:
        reports = [report(state)]
    totals, differing = merge(reports)
    assert not differing
    return digests(state, totals)


@functools.lru_cache
def alone(kind: str) -> dict[str, str]:
    return gathered(state_of(build(kind)))


# --- ways to wrap a model -------------------------------------------------------------------------------------


def ddp(model: nn.Module, mesh: Any) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: nn.Module, mesh: Any) -> nn.Module:
    """FSDP2 on a mesh of one dimension, HSDP on one of two."""
    for block in getattr(model, "blocks", []):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if isinstance(model, gpt.Gpt):
        plan = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel()}
        plan |= {"blocks.*.mlp.0": ColwiseParallel(), "blocks.*.mlp.2": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def fsdp_and_tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    tensor_parallel(model, mesh["tp"])
    return fully_shard(model, mesh=mesh["dp"])


def wrapped(wrap: Wrap, mesh_shape: tuple[int, ...]) -> tuple[dict[str, dict[str, str]], set[str]]:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")[: len(mesh_shape)])
    states = {kind: state_of(wrap(build(kind), mesh)) for kind in KINDS}
    placements = {str(t.placements) for s in states.values() for t in s.values() if isinstance(t, DTensor)}
    return {kind: gathered(state) for kind, state in states.items()}, placements


# --- placements by hand ---------------------------------------------------------------------------------------

PLACEMENTS: dict[int, list[Any]] = {
    1: [[Shard(0)], [Shard(1)], [Shard(2)], [Replicate()]],
    2: [[Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Shard(0)], [Shard(2), Shard(2)],
        [Replicate(), Shard(1)], [Shard(2), Replicate()], [Replicate(), Replicate()]],
}  # fmt: skip


def odd_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(SEED)
    return {
        "cube": torch.randn(5, 7, 11),
        "folded": torch.randn(3, 9001, 2),
        "wide": torch.randint(-128, 128, (2, 3, 70_001), dtype=torch.int8),
        "double": torch.randn(4, 5, 1030, dtype=torch.float64),
        "smaller than the mesh": torch.randn(1, 2, 3),
    }


def placed(mesh_shape: tuple[int, ...]) -> list[dict[str, str]]:
    mesh = init_device_mesh("cpu", mesh_shape)
    full = odd_tensors()
    return [gathered({k: distribute_tensor(t, mesh, p) for k, t in full.items()}) for p in PLACEMENTS[len(mesh_shape)]]


# --- every world once -----------------------------------------------------------------------------------------

CASES: list[tuple[Wrap, tuple[int, ...], str | None]] = [
    (ddp, (2,), None),
    (fsdp, (2,), "Shard(dim=0)"),
    (tensor_parallel, (2,), "Shard(dim=1)"),
    (ddp, (3,), None),
    (fsdp, (3,), "Shard(dim=0)"),
    (tensor_parallel, (3,), "Shard(dim=1)"),
    (fsdp, (4,), "Shard(dim=0)"),
    (fsdp, (2, 2), "Replicate(), Shard(dim=0)"),
    (fsdp_and_tensor_parallel, (2, 2), "_StridedShard"),
    (fsdp, (6,), "Shard(dim=0)"),
    (fsdp, (2, 3), "Replicate(), Shard(dim=0)"),
    (fsdp_and_tensor_parallel, (2, 3), "_StridedShard"),
]


def title(value: object) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return value.__name__ if callable(value) else ""


def every_case(ranks: int) -> dict[str, Any]:
    """Several meshes in one world: starting processes takes longer than what they do."""
    cases = [(wrap, mesh) for wrap, mesh, _ in CASES if math.prod(mesh) == ranks]
    meshes = dict.fromkeys(mesh for _, mesh in cases)
    return {f"{title(wrap)} {title(mesh)}": wrapped(wrap, mesh) for wrap, mesh in cases} | {
        title(mesh): placed(mesh) for mesh in meshes
    }


@functools.lru_cache
def world(ranks: int) -> list[dict[str, Any]]:
    return run_ranks(ranks, every_case, ranks, timeout_s=300.0)


@pytest.mark.parametrize(("wrap", "mesh", "sharded"), CASES, ids=title)
def test_one_digest_a_tensor(wrap: Wrap, mesh: tuple[int, ...], sharded: str | None) -> None:
    want = {kind: alone(kind) for kind in KINDS}
    for rank in world(math.prod(mesh)):
        found, placements = rank[f"{title(wrap)} {title(mesh)}"]
        assert found == want
        assert whole(found["wide"]) == whole(want["wide"])
        assert sharded is None or any(sharded in p for p in placements), placements
    for of_kind in want.values():
        assert len(set(of_kind.values())) == len(of_kind)


@pytest.mark.parametrize("mesh", [(2,), (3,), (4,), (6,), (2, 2), (2, 3)], ids=title)
def test_any_placement(mesh: tuple[int, ...]) -> None:
    want = gathered(odd_tensors())
    for rank in world(math.prod(mesh)):
        assert rank[title(mesh)] == [want] * len(PLACEMENTS[len(mesh)])


def sharded_tensor() -> dict[str, str]:
    from torch.distributed._shard import sharded_tensor as st
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    full = odd_tensors()["double"]
    spec = ChunkShardingSpec(dim=1, placements=[f"rank:{r}/cpu" for r in range(gpt.world())])
    x = st.empty(spec, *full.shape, dtype=full.dtype)
    for shard in x.local_shards():
        box = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        shard.tensor.copy_(full[tuple(slice(o, o + n) for o, n in box)])
    return gathered({"double": x})


@pytest.mark.filterwarnings("ignore")
def test_the_older_sharded_tensor() -> None:
    want = gathered({"double": odd_tensors()["double"]})
    assert run_ranks(3, sharded_tensor) == [want] * 3


# --- what goes wrong among ranks ------------------------------------------------------------------------------


def diverged() -> list[Differing]:
    state = state_of(build("gpt"))
    if dist.get_rank() == 2:
        state["head.weight"].view(torch.int32)[3, 5] ^= 1
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report(state))
    return merge(reports)[1]


def test_a_replica_with_one_flipped_bit_is_named() -> None:
    for found in run_ranks(4, diverged):  # the two tensors made from it differ too
        assert {f.ranks for f in found} == {(2,)}
        assert "head.weight" in {f.name for f in found}
        assert all("head.weight" in f.name for f in found)


def misplaced() -> str:
    """Every rank takes its shard one row too early, as a broken resharding would."""
    mesh = init_device_mesh("cpu", (3,))
    t = distribute_tensor(torch.randn(9, 40, generator=torch.Generator().manual_seed(1)), mesh, [Shard(0)])
    ((local, offsets),) = boxes(t)
    off = partial(local, t.shape, (max(offsets[0] - 1, 0), 0))
    parts: list[Any] = [None] * 3
    dist.all_gather_object(parts, off.encode())
    return digest("float32", t.shape, sum(map(Partial.decode, parts), Partial()))


def test_a_resharding_off_by_one_is_seen() -> None:
    full = torch.randn(9, 40, generator=torch.Generator().manual_seed(1))
    (found, *others) = run_ranks(3, misplaced)
    assert others == [found] * 2
    assert found != gathered({"t": full})["t"]
