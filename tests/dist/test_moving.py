"""A job of several ranks moves in from plain DCP, goes on on another number of ranks, and moves out again."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt import cli
from ckpt.store import open_store
from tests.dist import gpt
from tests.ranks import run_ranks
from tests.s3server import S3

pytestmark = pytest.mark.dist


def train_plain(folder: str, reference: str) -> None:
    """What such a job does today."""
    model, optim, sched = gpt.build((2,), seed=1)
    gpt.train(model, optim, sched, 2)
    msd, osd = get_state_dict(model, optim)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"app": {"model": msd, "optim": osd, "sched": sched.state_dict()}}, checkpoint_id=folder)
    keep(model, optim, sched, reference)


def keep(model: Any, optim: Any, sched: Any, reference: str) -> None:
    full = {
        "model": {k: gpt._full(v) for k, v in model.state_dict().items()},
        "optim": [{k: gpt._full(v) for k, v in optim.state[p].items()} for p in model.parameters()],
        "sched": sched.state_dict()["last_epoch"],
    }
    if torch.distributed.get_rank() == 0:
        torch.save(full, reference)


def resume(mesh: tuple[int, ...], url: str, options: dict[str, Any], reference: str) -> str:
    model, optim, sched = gpt.build(mesh, seed=5)
    with ckpt.open(url, **options) as run:
        resumed = run.resume(ckpt.State(model=model, optim=optim, sched=sched))
        want = torch.load(reference)
        gpt.assert_same_bits(want["model"], {k: gpt._full(v) for k, v in model.state_dict().items()})
        for saved, p in zip(want["optim"], model.parameters(), strict=True):
            gpt.assert_same_bits(saved, {k: gpt._full(v) for k, v in optim.state[p].items()})
        assert sched.state_dict()["last_epoch"] == want["sched"]
        gpt.train(model, optim, sched, 1)
        run.save(resumed.step + 1, ckpt.State(model=model, optim=optim, sched=sched)).wait()
    keep(model, optim, sched, reference)
    return str(resumed)


def load_plain(folder: str, reference: str) -> None:
    model, _, _ = gpt.build((2,), seed=9)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    gpt.assert_same_bits(torch.load(reference)["model"], {k: gpt._full(v) for k, v in model.state_dict().items()})


@pytest.mark.s3
def test_in_on_two_ranks_on_with_three_and_out_again(s3: S3, tmp_path: Path) -> None:
    plain, reference = str(tmp_path / "plain"), str(tmp_path / "reference.pt")
    run_ranks(2, train_plain, plain, reference)
    url = s3.url(s3.new_bucket(), "run")
    options = [w for k, v in s3.options.items() if isinstance(v, str) for w in ("-o", f"{k}={v}")]
    assert cli.run(["adopt", plain, url, "--step", "2", "--rename", "app.=", *options]) == 0
    for said in run_ranks(3, resume, (3,), url, s3.options, reference):
        assert "resumed step 2" in said
        assert "tensors proven" in said
    out = str(tmp_path / "out")
    assert cli.run(["export", url, out, "--to", "dcp", *options]) == 0
    run_ranks(2, load_plain, out, reference)
    assert cli.run(["export", url, f"{out}.pt", "--to", "torch", "--only", "model.*", *options]) == 0
    model, _, _ = gpt.build(None, seed=9)
    model.load_state_dict(torch.load(f"{out}.pt", weights_only=True)["model"])
    gpt.assert_same_bits(torch.load(reference)["model"], dict(model.state_dict()))


def save_columns(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    w = torch.arange(7 * 10, dtype=torch.float32).reshape(7, 10)
    state = {"w": distribute_tensor(w, mesh, [Shard(1), Shard(0)]), "u": distribute_tensor(w.t(), mesh, [Shard(0)] * 2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)


def test_chunks_in_several_dimensions_are_put_together(tmp_path: Path) -> None:
    folder, w = str(tmp_path / "plain"), torch.arange(7 * 10, dtype=torch.float32).reshape(7, 10)
    run_ranks(4, save_columns, folder)
    assert cli.run(["validate", folder, "--level", "full"]) == 0
    assert cli.run(["export", folder, str(tmp_path / "x.pt"), "--to", "torch"]) == 0
    got = torch.load(tmp_path / "x.pt", weights_only=True)
    assert torch.equal(got["w"], w)
    assert torch.equal(got["u"], w.t())
    assert open_store(folder).list(".metadata")
