"""``ckpt`` on a real S3 server, with both clients: the same verdicts, the same five clear errors as on a disk."""

from __future__ import annotations

import json
import time

import pytest

from ckpt import cli
from ckpt.store import open_store
from tests.corpus.golden import GOLDEN_V1
from tests.corpus.recipes import FOLDER
from tests.s3server import S3

pytestmark = pytest.mark.s3


@pytest.fixture(params=["obstore", "fsspec"])
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _flags(options: dict[str, object], client: str) -> list[str]:
    words = ["--client", client]
    for name, value in options.items():
        words += ["-o", f"{name}={json.dumps(value) if isinstance(value, dict) else value}"]
    return words


def test_ls_inspect_validate(s3: S3, client: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"{s3.url(s3.new_bucket())}/runs/golden"
    store = open_store(url, client=client, **s3.options)
    for path in GOLDEN_V1.rglob("*"):
        if path.is_file():
            store.put(path.relative_to(GOLDEN_V1).as_posix(), [path.read_bytes()])
    flags = _flags(s3.options, client)
    assert cli.run(["ls", url, *flags]) == 0
    assert "newest valid 2" in capsys.readouterr().out
    assert cli.run(["inspect", f"{url}@1", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1
    assert cli.run(["validate", url, "--level", "full", "--all", *flags]) == 0
    assert capsys.readouterr().out.count("11 blocks") == 2
    data = bytearray(store.get(f"{FOLDER}/__1_0.distcp"))
    data[700] ^= 1
    store.put(f"{FOLDER}/__1_0.distcp", [data])
    assert cli.run(["validate", url, "--level", "full", *flags]) == 1
    said = capsys.readouterr().out
    assert "written by  rank 1" in said
    assert "newest good step: 1 (full)" in said


def test_errors_are_clear_and_quick(s3: S3, client: str, capsys: pytest.CaptureFixture[str]) -> None:
    bucket = s3.new_bucket()
    wrong = {**s3.options, "secret": "Wr0ngSecret"}
    away = {**s3.options, "endpoint_url": "http://127.0.0.1:9"}
    for url, options, status, code in (
        (f"{s3.url(bucket)}/empty", s3.options, 4, "C-N"),
        (f"{s3.url(bucket)}/run", wrong, 5, "C-A"),
        ("s3://no-such-bucket-here/run", s3.options, 5, "C-B"),
        (f"{s3.url(bucket)}/run", away, 5, "C-T"),
    ):
        began = time.monotonic()
        assert cli.run(["ls", url, *_flags(options, client)]) == status
        said = capsys.readouterr()
        assert said.err.startswith(f"[{code}] "), said.err
        assert "next" in said.err
        assert "Wr0ng" not in said.err + said.out
        assert time.monotonic() - began < 15
