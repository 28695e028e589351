"""Logical shards: the same weights on any number of ranks, to the last bit; and what breaks that is refused by name."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt
import elastic
from ckpt.errors import Mismatch, Refused
from elastic.determinism import _largest, _split
from tests.ranks import run_ranks

SIZE, BATCH, SHARDS, STEPS = 500, 24, 12, 12
DATA = torch.randn(SIZE, 16, generator=torch.Generator().manual_seed(3))
LABELS = torch.randint(0, 5, (SIZE,), generator=torch.Generator().manual_seed(4))


def build() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(
        nn.Linear(16, 48), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(48),
        nn.TransformerEncoderLayer(48, 4, 96, dropout=0.1, batch_first=True), nn.Linear(48, 5),
    )  # fmt: skip


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def digest(model: nn.Module) -> str:
    h = hashlib.sha256()
    for p in model.parameters():
        h.update(p.detach().numpy().tobytes())
    return h.hexdigest()


def train(
    *, ddp: bool = False, naive: bool = False, url: str | None = None, stop: int = STEPS
) -> tuple[str, list[float]]:
    """Train to step ``stop``, from a run's newest step where ``url`` is given; weights as a digest, losses."""
    torch.set_num_threads(1)
    plain = build()
    model: nn.Module = DistributedDataParallel(plain) if ddp else plain
    optim = torch.optim.AdamW(plain.parameters(), lr=3e-3)
    sampler = elastic.ElasticSampler(SIZE, BATCH, seed=5)
    bits = elastic.LogicalShards(model, shards=SHARDS, seed=9)
    state = ckpt.State(model=plain, optim=optim, data=sampler, bits=bits)
    store = ckpt.open(url) if url else None
    first = store.resume(state).step if store else 0
    losses = []
    own = iter(sampler)
    for step in range(first, stop):
        numbers = next(own)
        if naive:  # what everybody does: the mean of the ranks' means, dropout from the rank's stream
            optim.zero_grad()
            loss = nn.functional.cross_entropy(plain(DATA[numbers]), LABELS[numbers])
            loss.backward()
            for p in plain.parameters():
                if world() > 1:
                    dist.all_reduce(p.grad)
                p.grad /= world()
            losses.append(float(loss))
        else:
            for x, y in bits.parts(step, (DATA[numbers], LABELS[numbers])):
                bits.backward(nn.functional.cross_entropy(model(x), y))
            losses.append(bits.reduce())
        optim.step()
        sampler.advance()
    if store:
        store.save(stop, state)
        store.close()
    return digest(plain), losses


def on(ranks: int, **how: Any) -> tuple[str, list[float]]:
    results = run_ranks(ranks, _train, how)
    assert all(r == results[0] for r in results), "the ranks do not agree among themselves"
    return results[0]


def _train(how: dict[str, Any]) -> tuple[str, list[float]]:
    return train(**how)


@pytest.mark.dist
def test_weights_and_losses_do_not_depend_on_the_number_of_ranks() -> None:
    alone = on(1)
    assert all(on(n) == alone for n in (2, 3, 4))
    assert on(2, ddp=True) == alone
    assert alone[1][0] > alone[1][-1], "it learns"


@pytest.mark.dist
def test_without_logical_shards_they_do() -> None:
    """The test above can fail."""
    assert run_ranks(1, _train, {"naive": True})[0][0] != run_ranks(2, _train, {"naive": True})[0][0]


@pytest.mark.dist
def test_a_run_that_changes_its_size_ends_as_if_it_had_not(tmp_path: Any) -> None:
    url = str(tmp_path / "run")
    for ranks, stop in ((4, 4), (2, 7), (1, 9), (3, STEPS)):
        last = on(ranks, url=url, stop=stop)
    assert last[0] == on(1)[0]


def test_the_tree_is_the_same_whoever_holds_its_leaves() -> None:
    for shards in range(1, 40):
        leaves, nodes = [], [(0, shards)]
        while nodes:
            node = nodes.pop()
            if node[1] - node[0] == 1:
                leaves.append(node[0])
            else:
                left, right = _split(node)
                assert node[0] == left[0] < left[1] == right[0] < right[1] == node[1]
                nodes += [left, right]
        assert sorted(leaves) == list(range(shards))
        for ranks in (r for r in range(1, shards + 1) if shards % r == 0):
            mine = shards // ranks
            held = [n for r in range(ranks) for n in _largest((0, shards), (r * mine, (r + 1) * mine))]
            assert [i for a, b in held for i in range(a, b)] == list(range(shards))


def parts_of(model: nn.Module, shards: int = 4, batch: int = 8, backwards: int = 4) -> None:
    bits = elastic.LogicalShards(model, shards=shards)
    for n, x in enumerate(bits.parts(0, torch.ones(batch, 16))):
        if n < backwards:
            bits.backward(model(x).sum())
    bits.reduce()


def test_what_depends_on_the_ranks_is_refused_by_name() -> None:
    with pytest.raises(Refused, match=r"buffer 1\.num_batches_tracked|buffer 1\.running_mean"):
        parts_of(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)))
    with pytest.raises(Refused, match="cannot be cut into 4 equal parts"):
        parts_of(nn.Linear(16, 1), batch=6)
    with pytest.raises(Refused, match="3 of 4 parts"):
        parts_of(nn.Linear(16, 1), backwards=3)


@pytest.mark.dist
def test_shards_that_ranks_cannot_share_and_sharded_models_are_refused() -> None:
    assert "12 logical shards cannot be shared evenly by 5 ranks" in run_ranks(5, _refusal)[0]
    assert "is sharded over ranks" in run_ranks(2, _fsdp_refusal)[0]


def _refusal() -> str:
    try:
        next(elastic.LogicalShards(nn.Linear(2, 2), shards=12).parts(0, torch.ones(12, 2)))
    except Refused as e:
        return str(e)
    return ""


def _fsdp_refusal() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    try:
        elastic.LogicalShards(model, shards=2)
    except Refused as e:
        return str(e)
    return ""


def test_a_parameter_that_some_shards_do_not_use() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.never = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + (self.b(x) if x[0, 0] > 0 else 0)

    model = Sometimes()
    bits = elastic.LogicalShards(model, shards=2)
    for x in bits.parts(0, torch.tensor([[1.0, 1.0], [-1.0, 1.0]])):
        bits.backward(model(x).mean())
    bits.reduce()
    assert model.b.weight.grad is not None
    assert torch.equal(model.b.weight.grad, torch.tensor([[0.5, 0.5]]))
    assert model.never.weight.grad is None


def test_other_threads_or_shards_are_refused_on_a_resume() -> None:
    bits = elastic.LogicalShards(nn.Linear(2, 2), shards=4, seed=1)
    saved = bits.state_dict()
    for key, other in (("shards", 8), ("seed", 2), ("threads", 99), ("torch", "1.0")):
        with pytest.raises(Mismatch, match="not bit for bit"):
            bits.load_state_dict({**saved, key: other})
    bits.load_state_dict(saved)


def test_streams_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
    before = torch.get_rng_state()
    parts_of(model)
    assert torch.equal(before, torch.get_rng_state())
