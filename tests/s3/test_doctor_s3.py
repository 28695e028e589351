"""``ckpt doctor`` on the real S3 server: what it tries, what it says, and that its count of requests is true."""

from __future__ import annotations

import json

import pytest
import torch

import ckpt
from ckpt import cli
from ckpt.store import open_store
from drills.faults.proxy import FaultProxy, Request, is_list
from tests.s3server import S3

pytestmark = pytest.mark.s3


def options(s3: S3, **other: object) -> list[str]:
    given = {**s3.options, **other}
    return [w for k, v in given.items() for w in ("-o", f"{k}={json.dumps(v) if isinstance(v, dict) else v}")]


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_a_bucket_is_tried_and_left_as_it_was(client: str, s3: S3, capsys: pytest.CaptureFixture[str]) -> None:
    url = s3.url(s3.new_bucket())
    assert cli.run(["doctor", f"{url}/run", "--client", client, "--json", *options(s3)]) == 0
    said = json.loads(capsys.readouterr().out)
    checks = {c["name"]: c for c in said["checks"]}
    for name in ("list", "put", "get", "put large", "get ranges", "overwrite", "conditional put", "delete", "clock"):
        assert checks[name]["verdict"] == "good", checks[name]
    assert "kept" in checks["conditional put"]["what"]
    assert {"encryption", "versioning", "lifecycle rules"} <= checks.keys()
    assert "s3:PutObject" in said["permissions"][1]
    assert open_store(url, **s3.options).list() == []


def test_wrong_credentials_are_told(s3: S3, capsys: pytest.CaptureFixture[str]) -> None:
    url = s3.url(s3.new_bucket())
    assert cli.run(["doctor", url, "--json", *options(s3, secret="wrong")]) == 5
    said = json.loads(capsys.readouterr().out)
    assert all(c["verdict"] == "bad" for c in said["checks"] if c["name"] in ("put", "get", "list", "delete"))


def test_a_missing_bucket_ends_it(s3: S3, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", s3.url("no-such-bucket-here"), *options(s3)]) == 5
    assert "[C-B]" in capsys.readouterr().err


def test_the_requests_of_a_save_are_as_counted(s3: S3, capsys: pytest.CaptureFixture[str]) -> None:
    """A large object goes up in parts: what the formula says is what the wire sees."""
    url = f"{s3.url(s3.new_bucket())}/run"
    state = ckpt.State(model=torch.nn.Linear(2048, 3000, bias=False))  # 24 MB: two parts
    with FaultProxy(s3.server.port) as proxy:
        given = s3.options_for(proxy.endpoint)
        with ckpt.open(url, **given) as store:
            store.resume(state)
            store.save(1, state).wait()
            proxy.heal()
            store.save(2, state).wait()
        sent = [request for request, _ in proxy.log]
    writes = [r for r in sent if _is_write(r)]
    lists = [r for r in sent if is_list(r)]
    assert cli.run(["doctor", url, "--json", "--price-per-1000-put", "0.005", *options(s3)]) == 0
    said = json.loads(capsys.readouterr().out)
    cost = said["requests_per_save"]
    assert (cost["writes"], cost["lists"]) == (len(writes), len(lists)), [
        f"{r.method} {r.path} {r.query}" for r in sent
    ]
    assert said["cost_per_save"] == pytest.approx((len(writes) + len(lists)) / 1000 * 0.005)


def _is_write(request: Request) -> bool:
    return request.method in ("PUT", "POST")
