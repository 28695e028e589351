"""The five mistakes of a first day: each is a clear error within seconds, and none reads as "nothing saved yet"."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ckpt
import elastic
from ckpt.errors import AccessDenied, CkptError, NoContainer, Unreachable
from tests.s3server import S3

LIMIT_S = 15
pytestmark = pytest.mark.s3


def fails(kind: type[CkptError], url: str, **options: Any) -> str:
    """Start a Run, as a user would, and return the error's text."""
    client = options.pop("client", None)
    began = time.monotonic()
    with pytest.raises(CkptError) as caught, elastic.Run(url, ckpt.State(n=1), client=client, storage_options=options):
        pytest.fail("the run started, from zero")
    assert time.monotonic() - began < LIMIT_S
    assert isinstance(caught.value, kind), caught.value
    text = str(caught.value)
    assert url.split("://")[-1].split("/")[0] in text
    assert "testsecret" not in text
    assert "\n  next" in text
    return text


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
class TestRemote:
    def test_wrong_credentials(self, s3: S3, client: str) -> None:
        url = s3.url(s3.new_bucket())
        assert "access denied" in fails(AccessDenied, url, **{**s3.options, "secret": "wrong-one"}, client=client)

    def test_missing_bucket(self, s3: S3, client: str) -> None:
        assert "no such bucket" in fails(NoContainer, "s3://not-there-at-all/run", **s3.options, client=client)

    def test_closed_port(self, s3: S3, client: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        options = s3.options_for(f"http://127.0.0.1:{port}")
        assert f"127.0.0.1:{port}" in fails(Unreachable, s3.url(s3.new_bucket()), **options, client=client)

    def test_a_port_that_never_answers(self, s3: S3, client: str) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=64) as mute:
            options = s3.options_for(f"http://127.0.0.1:{mute.getsockname()[1]}")
            fails(Unreachable, s3.url(s3.new_bucket()), **options, client=client)

    def test_an_object_instead_of_a_run(self, s3: S3, client: str) -> None:
        bucket = s3.new_bucket()
        with s3.server.client() as boto:
            boto.put_object(Bucket=bucket, Key="model.safetensors", Body=b"not a run")
        text = fails(NoContainer, s3.url(bucket, "model.safetensors"), **s3.options, client=client)
        assert "is an object" in text


def test_a_file_instead_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"x")
    with (
        pytest.raises(NoContainer, match="is a file") as caught,
        elastic.Run(str(tmp_path / "model.pt"), ckpt.State(n=1)),
    ):
        pytest.fail("the run started, from zero")
    assert "model.pt" in str(caught.value)


def test_an_empty_run_is_said_to_be_empty(s3: S3) -> None:
    url = s3.url(s3.new_bucket(), "nothing")
    options = [f"-o{k}={v}" for k, v in s3.options.items() if isinstance(v, str)]
    for command in ("ls", "inspect", "validate"):
        done = subprocess.run(
            [sys.executable, "-m", "ckpt", command, url, *options],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 4, done.stderr
        assert url in done.stderr
        assert "zero" not in done.stderr
        assert done.stdout == ""


def test_nothing_was_left_behind_by_a_refused_start(s3: S3) -> None:
    bucket = s3.new_bucket()
    fails(AccessDenied, s3.url(bucket), **{**s3.options, "secret": "wrong-one"})
    with s3.server.client() as boto:
        assert boto.list_objects_v2(Bucket=bucket)["KeyCount"] == 0
