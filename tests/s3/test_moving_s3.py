"""Moving in and out over a real S3 server: safetensors and plain DCP as sources, a run as the target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt
from ckpt import cli
from ckpt.store import open_store
from tests.corpus.foreign import GOOD
from tests.s3server import S3

pytestmark = [pytest.mark.s3, pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")]


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_in_from_a_bucket_and_out_of_it(s3: S3, tmp_path: Path, client: str) -> None:
    root = s3.url(s3.new_bucket(), "x")
    store = open_store(root, **s3.options)
    store.put("hub/model.safetensors", [GOOD])
    dcp.save({"w": torch.arange(500.0)}, checkpoint_id=tmp_path / "plain", no_dist=True)
    for path in (tmp_path / "plain").iterdir():
        store.put(f"plain/{path.name}", [path.read_bytes()])
    options = [w for k, v in s3.options.items() if isinstance(v, str) for w in ("-o", f"{k}={v}")]
    options += ["--client", client]
    for source, status in (("hub", 3), ("hub/model.safetensors", 3), ("plain", 0)):
        assert cli.run(["validate", f"{root}/{source}", "--level", "full", *options]) == status
        assert cli.run(["inspect", f"{root}/{source}", "--tree", *options]) == 0
    assert cli.run(["adopt", f"{root}/hub/model.safetensors", f"{root}/run", *options]) == 0
    assert cli.run(["adopt", f"{root}/plain", f"{root}/run", "--step", "2", "--rename", "w=net.weight", *options]) == 0
    net = torch.nn.Module()
    net.weight = torch.nn.Parameter(torch.zeros(500))
    with ckpt.open(f"{root}/run", **s3.options) as run:
        assert run.resume(ckpt.State(net=net)).step == 2
    assert torch.equal(net.weight, torch.arange(500.0))
    assert cli.run(["export", f"{root}/run@2", str(tmp_path / "x.pt"), "--to", "torch", *options]) == 0
    assert torch.equal(torch.load(tmp_path / "x.pt", weights_only=True)["net"]["weight"], torch.arange(500.0))
