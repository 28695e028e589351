"""The commands that read a ledger, on a real S3 server with both clients; storage errors end with their own status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ckpt.store import open_store
from elastic.cli import cli
from tests.bench.ledger_report import write
from tests.s3server import S3
from tests.unit.elastic.ledgers import Job, Written

pytestmark = pytest.mark.s3


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words), prog_name="elastic")


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_a_ledger_in_a_bucket_is_read_and_left_as_it_was(s3: S3, tmp_path: Path, client: str) -> None:
    url = f"{s3.url(s3.new_bucket())}/runs/gpt"
    store = open_store(url, client=client, **s3.options)
    write(tmp_path / "run", Written(Job(kills=((33, 1), (61, 0)))).events)
    for path in (tmp_path / "run" / "ledger").iterdir():
        store.put(f"ledger/{path.name}", [path.read_bytes()])
    before = sorted((e.key, e.size) for e in store.list())
    options = ["--client", client]
    for name, value in s3.options.items():
        options += ["-o", f"{name}={json.dumps(value) if isinstance(value, dict) else value}"]
    here = json.loads(run("goodput", str(tmp_path / "run"), "--json").stdout)
    there = json.loads(run("goodput", url, "--json", *options).stdout)
    assert there["seconds"] == here["seconds"]
    assert run("failures", url, *options).exit_code == 0
    assert run("status", url, *options).exit_code == 0
    assert run("compare", url, f"again={url}", *options).exit_code == 0
    assert sorted((e.key, e.size) for e in store.list()) == before
    wrong = [w.replace(f"secret={s3.options['secret']}", "secret=Wr0ngSecret") for w in options]
    for name in ("goodput", "failures", "status"):
        result = run(name, url, *wrong)
        assert result.exit_code == 5, result.output
        assert "Traceback" not in result.output
    assert run("goodput", f"{url}-not", *options).exit_code == 4
