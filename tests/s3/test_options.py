"""Every usual way of saying where and who, for both clients, up to a real server that checks signatures."""

from __future__ import annotations

import gc
import time
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ckpt.errors import AccessDenied, Refused
from ckpt.store import Entry, open_store
from ckpt.store.filesystems import S3fsStore
from tests.s3server import S3

pytestmark = pytest.mark.s3


@pytest.fixture(params=["obstore", "fsspec"])
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


def works(s3: S3, client: str | None, **options: Any) -> None:
    store = open_store(s3.url(s3.new_bucket()), client=client, **options)
    store.put("key", [b"x"])
    assert store.list() == [Entry("key", 1)]


def test_outer_options(s3: S3, client: str) -> None:
    server = s3.server
    works(s3, client, endpoint_url=s3.endpoint, key=server.key, secret=server.secret, region=server.region)


def test_client_kwargs(s3: S3, client: str) -> None:
    client_kwargs = {
        "endpoint_url": s3.endpoint,
        "aws_access_key_id": s3.server.key,
        "aws_secret_access_key": s3.server.secret,
        "region_name": s3.server.region,
    }
    works(s3, client, client_kwargs=client_kwargs, use_listings_cache=True, anon=False, token=None)


def test_options_of_obstore_itself(s3: S3) -> None:
    server = s3.server
    works(
        s3, None, endpoint=s3.endpoint, access_key_id=server.key, secret_access_key=server.secret, unsigned_payload=True
    )


def test_environment(s3: S3, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.server.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.server.secret)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", s3.server.region)
    works(s3, client)


@pytest.mark.parametrize("how", ["option", "variable", "default"])
def test_profile(s3: S3, client: str, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = "default" if how == "default" else "lab"
    (tmp_path / "credentials").write_text(
        f"[{name}]\naws_access_key_id = {s3.server.key}\naws_secret_access_key = {s3.server.secret}\n"
    )
    (tmp_path / "config").write_text(
        f"[{'' if name == 'default' else 'profile '}{name}]\nregion = {s3.server.region}\n"
    )
    if how == "variable":
        monkeypatch.setenv("AWS_PROFILE", name)
    works(s3, client, endpoint_url=s3.endpoint, **({"profile": name} if how == "option" else {}))


def test_unknown_profile(s3: S3, client: str) -> None:
    with pytest.raises((Refused, AccessDenied), match="nobody"):
        open_store(s3.url("bucket"), client=client, endpoint_url=s3.endpoint, profile="nobody").list()


def test_explicit_keys_win_over_the_environment(s3: S3, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    works(s3, client, **s3.options)


def test_anonymous(s3: S3, client: str) -> None:
    store = open_store(s3.url(s3.new_bucket()), client=client, endpoint_url=s3.endpoint, anon=True)
    with pytest.raises(AccessDenied):
        store.list()


def test_two_stores_keep_their_options_apart(s3: S3, client: str) -> None:
    url = s3.url(s3.new_bucket())
    good = open_store(url, client=client, **s3.options)
    bad = open_store(url, client=client, **s3.options | {"secret": "wrong-secret"})
    good.put("key", [b"x"])
    with pytest.raises(AccessDenied):
        bad.get("key")
    assert open_store(url, client=client, **s3.options).get("key") == b"x"


def test_an_instance_of_s3fs_that_others_share_is_left_alone(s3: S3) -> None:
    options = S3fsStore.prepared(s3.options)
    shared = fsspec.filesystem("s3", **options)
    before = shared.retries
    open_store(s3.url("bucket"), client="fsspec", **s3.options)
    assert fsspec.filesystem("s3", **options) is shared
    assert shared.retries == before


def test_a_store_that_goes_leaves_no_open_session(s3: S3) -> None:
    store = open_store(s3.url(s3.new_bucket()), client="fsspec", **s3.options)
    store.list()
    fsspec.asyn.get_loop().call_soon_threadsafe(time.sleep, 0.5)  # s3fs itself waits for less
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        del store
        gc.collect()
        time.sleep(0.7)
        gc.collect()
    assert not seen


def test_a_bucket_without_a_path(s3: S3, client: str) -> None:
    bucket = s3.new_bucket()
    store = open_store(f"s3://{bucket}/", client=client, **s3.options)
    store.put("run/key", [b"x"])
    assert store.list() == [Entry("run/key", 1)]
    assert open_store(f"s3://{bucket}/run/", client=client, **s3.options).get("key") == b"x"
