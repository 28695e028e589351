"""What a checksum cannot see: right bytes that arrive wrong. Each is caught by fingerprint and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt import proof
from ckpt.engine import planner, reader, writer
from ckpt.errors import Incomplete, NotProven
from ckpt.format import blocks
from ckpt.format.digest import digest
from ckpt.format.fingerprint import Partial
from ckpt.format.manifest import dump, load_commit


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, ckpt.State]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 6)).square().mean().backward()
    optim.step()
    return model, optim, ckpt.State(model=model, optim=optim)


@pytest.fixture
def url(tmp_path: Path) -> str:
    _, _, state = build(0)
    with ckpt.open(str(tmp_path)) as store:
        store.resume(state)
        store.save(1, state).wait()
    return str(tmp_path)


def test_a_good_restore_is_proven_and_says_so(url: str) -> None:
    _, _, state = build(1)
    assert ckpt.open(url).load(state).proof == "16 tensors proven"
    assert ckpt.open(url, proof=False).load(state).proof == "not verified (switched off)"


def off_by_one(monkeypatch: pytest.MonkeyPatch, state: ckpt.State) -> None:
    real = reader._hand_over

    def shifted(need: Any, payload: memoryview, planner: Any) -> None:
        if need.item.fqn == "model.0.weight":
            payload = memoryview(np.roll(np.frombuffer(payload, np.uint8), 4).tobytes())
        real(need, payload, planner)

    monkeypatch.setattr(reader, "_hand_over", shifted)


def flipped_in_memory(monkeypatch: pytest.MonkeyPatch, state: ckpt.State) -> None:
    real = state.apply

    def flip(*args: Any, **kwargs: Any) -> str:
        done = real(*args, **kwargs)
        state["model"][0].weight.data.view(torch.int32)[3, 3] ^= 1
        return done

    monkeypatch.setattr(state, "apply", flip)


def cast_on_the_way(monkeypatch: pytest.MonkeyPatch, state: ckpt.State) -> None:
    optim = state["optim"]
    real = optim.load_state_dict

    def cast(given: dict[str, Any]) -> None:
        given["state"][0]["exp_avg"] = given["state"][0]["exp_avg"].bfloat16().float()
        real(given)

    monkeypatch.setattr(optim, "load_state_dict", cast)


def left_stale(monkeypatch: pytest.MonkeyPatch, state: ckpt.State) -> None:
    optim = state["optim"]
    old = {k: v.clone() for k, v in optim.state[optim.param_groups[0]["params"][0]].items()}
    real = optim.load_state_dict

    def keep(given: dict[str, Any]) -> None:
        given["state"][0] = old
        real(given)

    monkeypatch.setattr(optim, "load_state_dict", keep)


def swapped(monkeypatch: pytest.MonkeyPatch, state: ckpt.State) -> None:
    real = state.apply

    def swap(*args: Any, **kwargs: Any) -> str:
        done = real(*args, **kwargs)
        first, second = (state["optim"].state[p] for p in state["optim"].param_groups[0]["params"][::2])
        first["step"], second["step"] = first["step"] + 1, second["step"]
        return done

    monkeypatch.setattr(state, "apply", swap)


@pytest.mark.parametrize(
    ("defect", "named"),
    [
        (off_by_one, "model.0.weight"),
        (flipped_in_memory, "model.0.weight"),
        (cast_on_the_way, "optim.state.0.weight.exp_avg"),
        (left_stale, "optim.state.0.weight.exp_avg_sq"),
        (swapped, "optim.state.0.weight.step"),
    ],
)
def test_a_defective_restore_is_refused_and_named(
    url: str, monkeypatch: pytest.MonkeyPatch, defect: Callable[..., None], named: str
) -> None:
    _, _, state = build(1)
    defect(monkeypatch, state)
    with pytest.raises(NotProven) as caught:
        ckpt.open(url).resume(state)
    assert any(value.startswith(f"{named}: fp1:") for _, value in caught.value.facts)
    assert not list(Path(url).glob("quarantine/*")), "the stored step is good"


def test_chunks_that_do_not_cover_a_tensor_are_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "partial", lambda *_: Partial(3))
    _, _, state = build(0)
    store = ckpt.open(str(tmp_path))
    store.resume(state)
    with pytest.raises(Incomplete, match="3 elements were written"):
        store.save(1, state).wait()
    assert store.newest_valid() is None


def test_the_first_difference_is_named_with_its_block(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, state = build(1)
    flipped_in_memory(monkeypatch, state)
    with pytest.raises(NotProven) as caught:
        ckpt.open(url).load(state)
    (text,) = [v for k, v in caught.value.facts if k == "first difference"]
    assert text.startswith("model.0.weight[3, 3]: ")
    assert text.endswith("in the step, block 0 of 1 in __0_0.distcp (on rank 0)")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize(("shape", "place"), [((), ()), ((7,), (6,)), ((300, 70), (299, 1)), ((5, 4, 3), (2, 3, 1))])
def test_the_first_difference_in_any_dtype_and_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, shape: tuple[int, ...], place: tuple[int, ...]
) -> None:
    """In blocks of 64 bytes and reads of 1 KiB, so that most differences lie far inside."""
    monkeypatch.setattr(writer, "block_bytes_for", lambda *of: blocks.block_bytes_for(*of, target=64))
    monkeypatch.setattr(proof, "PIECE_BYTES", 1024)
    kind = getattr(torch, dtype)
    model = nn.Module()
    model.register_buffer("t", torch.ones(shape).to(kind).clone())
    state = ckpt.State(model=model)
    store = ckpt.open(tmp_path / "run")
    store.resume(state)
    store.save(1, state).wait()
    real = state.apply

    def flip(*args: Any, **kwargs: Any) -> str:
        done = real(*args, **kwargs)
        model.t[place] = torch.zeros(()).to(kind)
        return done

    monkeypatch.setattr(state, "apply", flip)
    with pytest.raises(NotProven) as caught:
        ckpt.open(tmp_path / "run").load(state)
    (text,) = [v for k, v in caught.value.facts if k == "first difference"]
    assert text.startswith(f"model.t{list(place)}: ")
    if shape == (300, 70):
        z = model.t.element_size()
        assert f"block {(299 * 70 + 1) * z // 64} of " in text


def test_a_torn_copy_is_refused_where_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, state = build(0)
    store = ckpt.open(tmp_path / "run", verify_snapshot=True)
    store.resume(state)
    store.save(1, state).wait()
    real = planner.Snapshot._stage

    def stage(self: planner.Snapshot, item: Any) -> Any:
        copy = real(self, item)
        if item.index.fqn == "model.0.weight":  # what a step of an optimizer does meanwhile
            state["model"][0].weight.data.view(torch.int32)[0, 1] ^= 1
        return copy

    monkeypatch.setattr(planner.Snapshot, "_stage", stage)
    with pytest.raises(NotProven, match="the copy of 1 tensors") as caught:
        store.save(2, state)
    assert ("differs", "model.0.weight") in caught.value.facts
    assert store.newest_valid() == "000000000001-e00000001-0"


def test_a_step_without_fingerprints_is_not_called_proven(url: str) -> None:
    """As written by a version that had none, or has another kind."""
    (path,) = Path(url).glob("steps/*/*/manifest.json")
    body = json.loads(path.read_text())
    body["tensors"]["model.0.bias"]["fingerprint"] = None
    body["tensors"]["model.1.bias"]["fingerprint"] = "fp9:0"
    path.write_text(json.dumps(body))
    (commit,) = Path(url).glob("commits/*")
    record = load_commit(commit.read_bytes(), "x")
    commit.write_bytes(dump("commit", replace(record, manifest_digest=digest(path.read_bytes()))))
    _, _, state = build(1)
    assert ckpt.open(url).load(state).proof == "14 tensors proven, 2 not verified (saved without a fingerprint)"
