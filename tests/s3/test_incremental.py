"""References on an object store, where a key has no "..": the library resolves them, and retention leaves them."""

from __future__ import annotations

import json

import pytest
import torch

import ckpt
from ckpt import cli
from tests.s3server import S3

pytestmark = pytest.mark.s3


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_incremental_steps_on_s3(s3: S3, client: str) -> None:
    url = s3.url(s3.new_bucket(), "run")
    model = torch.nn.ParameterDict({"frozen": torch.nn.Parameter(torch.randn(300, 300)), "moves": torch.zeros(9)})
    state = ckpt.State(model=model)
    written = []
    with ckpt.open(url, incremental=True, keep=ckpt.Latest(1), grace_s=0.0, client=client, **s3.options) as store:
        store.resume(state)
        for step in (1, 2, 3):
            model["moves"].data += 1
            written.append(store.save(step, state).wait().bytes)
    assert max(written[1:]) < 0.1 * written[0]
    want = model["frozen"].data.clone()
    model["frozen"].data.zero_()
    got = ckpt.open(url, client=client, **s3.options).load(state)
    assert (got.step, got.proof) == (3, "2 tensors proven")
    assert torch.equal(model["frozen"].data, want)
    assert model["moves"].tolist() == [3.0] * 9
    words = ["--client", client]
    for k, v in s3.options.items():
        words += ["-o", f"{k}={json.dumps(v) if isinstance(v, dict) else v}"]
    assert cli.run(["validate", url, "--level", "full", *words]) == 0
