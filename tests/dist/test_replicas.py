"""Replicas that differ: refused where they are parameters, rank 0's as a whole where they are buffers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.errors import Refused
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist


def diverged(url: str) -> str:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, dist.get_rank() + 1)
    nn.init.constant_(model.bias, 0)
    state = ckpt.State(model=model)
    store = ckpt.open(url)
    store.resume(state)
    with pytest.raises(Refused) as caught:
        store.save(1, state).wait()
    return str(caught.value)


def test_a_diverged_parameter_is_named_and_not_saved(tmp_path: Path) -> None:
    for text in run_ranks(3, diverged, str(tmp_path / "run")):
        assert "model.weight  rank 0 | rank 1 | rank 2 differ, none held by most" in text
        assert "last equal    never seen by this start" in text
        assert "model.bias" not in text
    assert ckpt.open(str(tmp_path / "run")).newest_valid() is None


def norms(url: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    ddp = DistributedDataParallel(model)
    torch.manual_seed(dist.get_rank())
    ddp(torch.randn(8, 4)).sum().backward()  # running statistics differ between ranks from here on
    own = [b.clone() for b in model.buffers()]
    state = ckpt.State(model=ddp)
    store = ckpt.open(url)
    store.resume(state)
    store.save(1, state).wait()
    ckpt.open(url).load(state)
    return own, [b.clone() for b in model.buffers()]


def test_buffers_come_back_as_rank_0_had_them(tmp_path: Path) -> None:
    results = run_ranks(2, norms, str(tmp_path / "run"))
    (first, _), (second, _) = results
    assert not torch.equal(first[0], second[0])
    for _, restored in results:
        assert all(torch.equal(a, b) for a, b in zip(first, restored, strict=True))


FLIPPED_ON, FLIPPED = 2, "model.2.weight"


def struck_in_mid_training(url: str, policy: str) -> list[tuple[int, str, bool]]:
    """Four replicas train; after step 2 one bit flips in the memory of one; each save with what it said."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    ddp = DistributedDataParallel(model)
    optim = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    state = ckpt.State(model=ddp, optim=optim)
    said = []
    store = ckpt.open(url, replicas=policy)
    store.resume(state)
    for step in range(1, 5):
        torch.manual_seed(10 * step + dist.get_rank())
        ddp(torch.randn(8, 4)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        try:
            saved = store.save(step, state).wait()
            said.append((step, " ".join(saved.diverged), saved.quarantined))
        except Refused as e:
            said.append((step, str(e), False))
        if step == 2 and dist.get_rank() == FLIPPED_ON:
            model[2].weight.data.view(torch.int32)[1, 5] ^= 1 << 22
        if step == 3:  # what a restore would do
            for p in model.parameters():
                dist.broadcast(p.data, src=0)
    return said


@pytest.mark.parametrize("policy", ["raise", "quarantine", "warn", "warn:2", "off"])
def test_one_bit_that_flips_in_one_replica_is_named_at_the_next_save(tmp_path: Path, policy: str) -> None:
    run = tmp_path / "run"
    results = run_ranks(4, struck_in_mid_training, str(run), policy)
    assert results == results[:1] * 4, "all ranks hear the same"
    said = {step: (text, quarantined) for step, text, quarantined in results[0]}
    assert all(said[step] == ("", False) for step in (1, 2, 4))
    text, quarantined = said[3]
    if policy in ("warn:2", "off"):  # the third save is not looked at
        assert said[3] == ("", False)
        return
    assert FLIPPED in text
    assert "rank 2 differs from ranks 0, 1, 3" in text
    assert "optim" not in text, "no other tensor"
    steps = [p.name[:12].lstrip("0") for p in sorted((run / "commits").iterdir())]
    (third,) = [a for a in (run / "steps").iterdir() if a.name.endswith("3")] if policy != "raise" else [None]
    if policy == "raise":
        assert text.startswith("[C-U] step 3: 1 tensors differ between replicas")
        assert "last equal      step 2" in text
        assert steps == ["1", "2", "4"]
        return
    assert third is not None
    assert steps == ["1", "2", "3", "4"]
    assert quarantined == (policy == "quarantine")
    next((run / "commits").glob("*4-e*")).rename(tmp_path / "aside")  # as it was after the third save
    newest = ckpt.open(run).newest_valid()
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    state = ckpt.State(model=model, optim=torch.optim.AdamW(model.parameters()))
    assert newest == f"00000000000{2 if quarantined else 3}-e00000001-0"
    assert ckpt.open(run).load(state).step == (2 if quarantined else 3)
    if quarantined:
        mark = json.loads(next((run / "quarantine").iterdir()).read_text())
        assert mark["reason"] == "replicas differ"
        assert mark["details"] == [f"{FLIPPED}: rank 2 differs from ranks 0, 1, 3", "last equal: step 2"]
        next((run / "quarantine").iterdir()).unlink()  # a reader that listed the marks just before
        assert ckpt.open(run).newest_valid() == "000000000002-e00000001-0"


def test_a_policy_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    for text in ("", "raise:0", "never", "warn:x"):
        with pytest.raises(Refused, match="replicas="):
            ckpt.open(tmp_path / "run", replicas=text)


def skewed_shapes(url: str) -> str:
    state = ckpt.State(model=nn.ParameterDict({"p": torch.zeros(2 + dist.get_rank())}))
    store = ckpt.open(url, replicas="warn")
    store.resume(state)
    with pytest.raises(Refused) as caught:
        store.save(1, state).wait()
    return str(caught.value)


def test_tensors_of_other_shapes_are_never_saved_as_replicas(tmp_path: Path) -> None:
    for text in run_ranks(2, skewed_shapes, str(tmp_path / "run")):
        assert "model.p" in text


def ranked_names(url: str) -> str:
    state = ckpt.State(rank_offset=dist.get_rank())
    store = ckpt.open(url)
    store.resume(state)
    with pytest.raises(Refused) as caught:
        store.save(1, state).wait()
    return str(caught.value)


def test_a_name_that_begins_with_rank_makes_nothing_per_rank(tmp_path: Path) -> None:
    for text in run_ranks(2, ranked_names, str(tmp_path / "run")):
        assert "rank_offset" in text
