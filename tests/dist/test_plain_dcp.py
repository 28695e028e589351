"""ObjectWriter and ObjectReader under plain ``dcp.save`` and ``dcp.load``, on disk and on a real S3 server."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt
from ckpt.errors import Damaged, NotFound, Refused
from tests.dist import gpt
from tests.ranks import run_ranks
from tests.s3server import S3

pytestmark = pytest.mark.dist


def content(mesh: tuple[int, ...] | None, seed: int) -> dict[str, Any]:
    model, optim, sched = gpt.build(mesh, seed)
    gpt.train(model, optim, sched, 1)
    names = {id(p): n for n, p in model.named_parameters()}
    return {
        "model": model.state_dict(),
        "optim": {names[id(p)]: dict(s) for p, s in optim.state.items()},
        "note": {"text": "hello", "numbers": [1, 2.5]},
    }


def flat(d: dict[str, Any]) -> dict[str, torch.Tensor]:
    out = {k: gpt._full(v) for k, v in d["model"].items()}
    for n, s in d["optim"].items():
        out |= {f"{n}.{k}": gpt._full(v) for k, v in s.items()}
    return out


def save(url: str, options: dict[str, Any], reference: str) -> None:
    d = content((2,), seed=1)
    # the folder comes as checkpoint_id, so that the writer's options must survive its reset
    dcp.save(d, checkpoint_id=url, storage_writer=ckpt.ObjectWriter(url + "-unused", **options))
    full = flat(d)
    if torch.distributed.get_rank() == 0:
        torch.save(full, reference)


def load(mesh: tuple[int, ...], url: str, options: dict[str, Any], reference: str) -> None:
    d = content(mesh, seed=2)
    dcp.load(d, checkpoint_id=url, storage_reader=ckpt.ObjectReader(url + "-unused", **options))
    gpt.assert_same_bits(torch.load(reference), flat(d))
    assert d["note"] == {"text": "hello", "numbers": [1, 2.5]}


def test_on_disk(tmp_path: Path) -> None:
    url, reference = str(tmp_path / "folder"), str(tmp_path / "reference.pt")
    run_ranks(2, save, url, {}, reference)
    run_ranks(3, load, (3,), url, {}, reference)


@pytest.mark.s3
@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_on_s3(s3: S3, tmp_path: Path, client: str) -> None:
    url, reference = s3.url(s3.new_bucket(), "some/folder"), str(tmp_path / "reference.pt")
    options = {**s3.options, "client": client}
    run_ranks(2, save, url, options, reference)
    run_ranks(3, load, (3,), url, options, reference)


@pytest.fixture
def alone() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@pytest.mark.usefixtures("alone")
def test_nothing_is_overwritten_and_nothing_uncommitted_is_read(tmp_path: Path) -> None:
    url = str(tmp_path / "folder")
    with pytest.raises(BaseException) as caught:  # noqa: PT011 (DCP wraps errors in a BaseException)
        dcp.load({"x": torch.zeros(2)}, storage_reader=ckpt.ObjectReader(url))
    assert (
        "NotFound" in repr(caught.value)
        or isinstance(caught.value, NotFound)
        or "no manifest.json" in str(caught.value)
    )
    dcp.save({"x": torch.ones(2)}, storage_writer=ckpt.ObjectWriter(url))
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        dcp.save({"x": torch.zeros(2)}, storage_writer=ckpt.ObjectWriter(url))
    assert "is not empty" in str(caught.value)
    x = torch.zeros(2)
    dcp.load({"x": x}, storage_reader=ckpt.ObjectReader(url))
    assert x.tolist() == [1, 1]


@pytest.mark.usefixtures("alone")
def test_a_flipped_bit_and_a_silent_cast_are_refused(tmp_path: Path) -> None:
    url = tmp_path / "folder"
    dcp.save({"x": torch.ones(2000)}, storage_writer=ckpt.ObjectWriter(str(url)))
    with pytest.raises(BaseException, match="casts are not made silently"):
        dcp.load({"x": torch.zeros(2000, dtype=torch.int8)}, storage_reader=ckpt.ObjectReader(str(url)))
    data = bytearray((url / "__0_0.distcp").read_bytes())
    data[3000] ^= 1
    (url / "__0_0.distcp").write_bytes(data)
    with pytest.raises(BaseException, match="stored bytes differ") as caught:
        dcp.load({"x": torch.zeros(2000)}, storage_reader=ckpt.ObjectReader(str(url)))
    assert Damaged.__name__ in repr(caught.value) or "x, block 0 of 1" in str(caught.value)


def test_memory_is_for_one_process() -> None:
    for text in run_ranks(2, open_memory):
        assert "lives in one process and 2 ranks" in text


def open_memory() -> str:
    with pytest.raises(Refused) as caught:
        ckpt.open("memory://x")
    return str(caught.value)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("how", ["missing", "short"])
def test_an_object_that_is_not_as_the_manifest_says_is_named_before_anything_is_read(tmp_path: Path, how: str) -> None:
    url = tmp_path / "folder"
    dcp.save({"x": torch.ones(2000)}, storage_writer=ckpt.ObjectWriter(str(url)))
    if how == "missing":
        (url / "__0_0.distcp").unlink()
    else:
        (url / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(
        BaseException, match=r"__0_0.distcp: expected \d+ bytes, (missing|5 bytes) \(written by rank 0\)"
    ):
        dcp.load({"x": torch.zeros(2000)}, storage_reader=ckpt.ObjectReader(str(url)))
