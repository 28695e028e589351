"""The independent reader: what it sees, and that it is independent."""

from __future__ import annotations

import ast
import io
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from drills.history import Commit
from drills.oracle import READER, Storage, by_step, compare, parse_commit, read_pairs
from drills.reader import decode, tensor_difference, value_difference


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "model.w": torch.randn(6, 5),
        "model.nan": torch.tensor([float("nan"), -0.0, 0.0]),
        "model.empty": torch.empty(0, 3),
        "model.half": torch.randn(4).bfloat16(),
        "optim.state.w.step": torch.tensor(3.0),
        "optim.mask": torch.tensor([True]),
        "optim.param_groups": [{"lr": 0.1, "betas": (0.9, 0.999)}],
        "data": {"position": 40},
        "rng.rank00000": {"torch": torch.get_rng_state(), "numpy": np.random.RandomState(1).get_state()},
    }


def save(folder: Path, content: dict[str, Any]) -> str:
    dcp.save(content, checkpoint_id=folder, no_dist=True)
    return f"file://{folder}"


def damaged() -> dict[str, Any]:
    content = state()
    content["model.w"][3, 4] = torch.nextafter(content["model.w"][3, 4], torch.tensor(9.0))
    content["model.nan"][1] = 0.0  # -0.0 and 0.0 are equal to ==
    content["model.half"] = content["model.half"].float()
    content["optim.param_groups"][0]["lr"] = 0.2
    content["data"]["position"] = 41
    del content["optim.mask"]
    return content


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One folder compared with an equal one, a damaged one and a torn one, in one process of the reader."""
    root = tmp_path_factory.mktemp("folders")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        urls = {
            n: save(root / n, damaged() if n == "damaged" else state()) for n in ("left", "equal", "damaged", "torn")
        }
    for path in (root / "torn").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:700])
    names = ["equal", "damaged", "torn"]
    request = [{"step": n, "left": urls["left"], "right": urls[name]} for n, name in enumerate(names)]
    answer = read_pairs(request, options={}, timeout_s=120)
    assert answer["foreign"] == []
    return dict(zip(names, answer["pairs"], strict=True))


def test_equal_folders_are_equal_nan_signed_zero_and_empty_included(pairs: dict[str, dict[str, Any]]) -> None:
    pair = pairs["equal"]
    assert pair["error"] is None
    assert pair["different_keys"] == []
    assert pair["tensors"] == 7  # one of them inside the random state
    assert pair["groups"]["model"] == [4, 0]


def test_every_kind_of_difference_is_named_in_the_order_of_keys(pairs: dict[str, dict[str, Any]]) -> None:
    pair = pairs["damaged"]
    found = {d["key"]: d for d in pair["differences"]}
    assert found["model.w"]["index"] == [3, 4]
    assert found["model.w"]["elements"] == 1
    assert "0x" in found["model.w"]["left"]
    assert found["model.nan"]["left"].startswith("-0.0 (0x80000000)")
    assert found["model.half"]["what"] == "layout"
    assert found["optim.mask"] == {"key": "optim.mask", "what": "missing", "in": "right"}
    assert list(found) == sorted(found)
    assert pair["groups"]["optim"][1] == 2
    assert pair["groups"]["data"][1] == 1


def test_a_torn_folder_is_an_error_of_its_side(pairs: dict[str, dict[str, Any]]) -> None:
    error = pairs["torn"]["error"]
    assert error["side"] == "right"
    assert not error["lacks"]
    assert len(error["text"]) < 500


def test_the_reader_imports_torch_numpy_and_nothing_of_the_project() -> None:
    nodes = list(ast.walk(ast.parse(READER.read_text())))
    names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
    assert {n.split(".")[0] for n in names} - set(sys.stdlib_module_names) == {"torch", "numpy"}


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
def test_one_bit_of_any_dtype_is_seen(dtype: torch.dtype) -> None:
    a = torch.ones(4, 3, dtype=dtype)
    b = a.clone()
    b.view(torch.uint8)[2, 1 * dtype.itemsize] ^= 1
    found = tensor_difference(a, b)
    assert found is not None
    assert found["index"] == [2, 1]
    assert tensor_difference(a, a.clone()) is None


def saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("left", "right", "at"),
    [
        ({"a": [1, {"lr": 0.1}]}, {"a": [1, {"lr": 0.2}]}, "a[1].lr"),
        ({"a": 1}, {"a": 1.0}, "a"),
        ({"a": float("nan")}, {"a": float("nan")}, None),
        ({"a": 0.0}, {"a": -0.0}, "a"),
        ((1, 2), (1, 2, 3), ""),
        ({"a": 1}, {"a": 1, "b": 2}, "b"),
        ({"t": torch.arange(3)}, {"t": torch.tensor([0, 5, 2])}, "t[1]"),
        ({"n": np.arange(3)}, {"n": np.array([0, 1, 9])}, "n[2]"),
        (["text"], ["other"], "[0]"),
    ],
)
def test_values_are_compared_after_decoding_and_the_place_is_named(left: object, right: object, at: str | None) -> None:
    found = value_difference(saved(left), saved(right))
    assert (found is None) if at is None else (found is not None and found["at"] == at)


def test_equal_values_with_other_bytes_are_no_difference() -> None:
    key = "".join(["k", "ey"])  # pickle writes a shared string once, and equal ones that are not shared twice
    shared, apart = saved([key, key]), saved([key, "".join(["k", "ey"])])
    assert shared != apart
    assert value_difference(shared, apart) is None


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("code from a checkpoint",))


def test_no_code_from_a_value_is_run(capfd: pytest.CaptureFixture[str]) -> None:
    found = value_difference(saved(Evil()), saved({"a": 1}))
    assert found is not None
    assert found["what"] == "undecodable"
    assert capfd.readouterr().out == ""
    with pytest.raises(pickle.UnpicklingError):
        decode(saved(Evil()))


def test_commit_names_are_taken_apart_without_the_toolkit() -> None:
    name = "000000000042-e00000007-1.json"
    assert parse_commit(name) == Commit(step=42, name=name, folder="steps/000000000042/e00000007-1")
    assert parse_commit("000000000042-e00000007.0a1b2c3d-0.json") is not None
    for foreign in ("000000000042-e00000007-1.json.tmp", "x.json", "42-e7-1.json"):
        assert parse_commit(foreign) is None


def test_of_two_commits_of_a_step_that_of_the_higher_epoch_counts() -> None:
    names = ["000000000042-e00000010-0.json", "000000000042-e00000009-3.json", "000000000042-e00000010-1.json"]
    found = by_step(c for c in map(parse_commit, names) if c)
    assert [c.name for c in found.values()] == ["000000000042-e00000010-1.json"]


def test_nothing_in_common_is_a_reason_and_no_equality() -> None:
    one, two = parse_commit("000000000001-e00000001-0.json"), parse_commit("000000000002-e00000001-0.json")
    assert one
    assert two
    for right, said in (([], "no commit records"), ([two], "no committed step in common")):
        answer = compare(("control", "file:///x", [one]), ("drilled", "file:///y", right), options={}, timeout_s=5)
        assert said in answer["reason"]
        assert answer["pairs"] == []


def test_what_lies_on_the_storage_is_surveyed(tmp_path: Path) -> None:
    for name in ("steps/000000000001/e00000001-0/a", "steps/000000000002/e00000001-0/b"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"12345")
    (tmp_path / "commits").mkdir()
    for name in ("000000000001-e00000001-0.json", "000000000003-e00000001-0.json"):
        (tmp_path / "commits" / name).write_text("{}")
    found = Storage(f"file://{tmp_path}", {}).survey()
    assert found["unnamed"] == [{"folder": "steps/000000000002/e00000001-0", "bytes": 5}]
    assert found["hollow"] == ["000000000003-e00000001-0.json"]
    assert Storage(f"file://{tmp_path}/none", {}).survey()["commits"] == []
