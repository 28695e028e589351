"""Credentials in a file that are replaced in mid-run, as a mounted secret is: the run goes on, and tells nobody."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.errors import AccessDenied
from ckpt.store import open_store
from tests.s3server import S3Server

pytestmark = pytest.mark.s3
SECOND, THIRD = ("second-key", "second-secret-0123456789"), ("third-key", "third-secret-0123456789")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    own = S3Server(tmp_path / "server")
    own.start()
    yield own
    own.kill()


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    return path


def write(path: Path, pair: tuple[str, str]) -> None:
    """Replace the file in one step, as a mounted secret is."""
    new = path.with_suffix(".new")
    new.write_text(f"[default]\naws_access_key_id={pair[0]}\naws_secret_access_key={pair[1]}\n")
    new.replace(path)


def refused(server: S3Server, pair: tuple[str, str]) -> bool:
    """Whether the server has stopped to know a key."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            open_store("s3://ready", endpoint_url=server.endpoint, key=pair[0], secret=pair[1]).list()
        except AccessDenied:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_the_run_goes_on_with_the_new_keys(
    server: S3Server, credentials: Path, client: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("botocore").setLevel(logging.INFO)
    keys = [(server.key, server.secret), SECOND, THIRD]
    write(credentials, keys[0])
    state = ckpt.State(model=torch.nn.Linear(64, 64))
    options = {"client": client, "endpoint_url": server.endpoint, "region": server.region}
    with ckpt.open("s3://ready/run", **options) as store:
        store.resume(state)
        store.save(1, state).wait()
        for step, (old, new) in enumerate(pairwise(keys), start=2):
            server.admit(old, new)
            time.sleep(0.3)
            write(credentials, new)
            server.admit(new)
            assert refused(server, old)
            store.save(step, state).wait()
    write(credentials, keys[0])
    with pytest.raises(AccessDenied) as caught:
        ckpt.open("s3://ready/run", **options)
    told = caplog.text + str(caught.value)
    write(credentials, keys[-1])
    reader = open_store("s3://ready/run", **options)
    stored = b"".join(reader.get(e.key) for e in reader.list())
    for _, secret in keys:
        assert secret not in told
        assert secret.encode() not in stored


def test_keys_that_the_caller_gave_are_not_looked_for_elsewhere(server: S3Server, credentials: Path) -> None:
    for client in ("obstore", "fsspec"):
        store = open_store("s3://ready/run", client=client, endpoint_url=server.endpoint, key="no", secret="nobody")
        write(credentials, (server.key, server.secret))
        with pytest.raises(AccessDenied):
            store.put("a", [b"x"])
