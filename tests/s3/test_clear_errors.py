"""What a user gets wrong is told within seconds, by the right error, without secrets, for both clients."""

from __future__ import annotations

import re
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckpt.errors import AccessDenied, NoContainer, ObjectMissing, StorageError, Unreachable
from ckpt.store import Store, conditional_put_works, open_store
from ckpt.store.remote import Remote
from ckpt.testing import parallel
from tests.s3server import S3, free_ports

pytestmark = pytest.mark.s3

SECRET = "Wr0ng/Secret+with=signs"

CALLS: dict[str, Callable[[Store], object]] = {
    "list": lambda store: store.list("steps/"),
    "get": lambda store: store.get("epochs/1.json"),
    "put": lambda store: store.put("epochs/1.json", [b"x"]),
    "get_ranges": lambda store: store.get_ranges("a", [(0, 1), (1 << 20, (1 << 20) + 1)]),
    "put_if_absent": lambda store: store.put_if_absent("a", b"x"),
    "delete": lambda store: store.delete(["a"]),
    "conditional_put_works": conditional_put_works,
}


@pytest.fixture(params=["obstore", "fsspec"])
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def mute() -> Iterator[str]:
    """An endpoint that accepts connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def told(name: str, store: Store, expected: type[StorageError], endpoint: str, *, within_s: float) -> str:
    """The message that a call ends with: in time, naming the place and what to check, without secrets."""
    begin = time.monotonic()
    with pytest.raises(StorageError) as caught:
        CALLS[name](store)
    assert type(caught.value) is expected, str(caught.value)
    assert time.monotonic() - begin < within_s, name
    message = str(caught.value)
    assert store.url in message
    assert endpoint in message
    assert "next " in message
    shown = "".join(traceback.format_exception(caught.value))  # with whatever it was raised from
    for secret in (SECRET, "Wr0ng", "testsecret12345", "unknownkey"):
        assert secret not in shown
    return message


@pytest.mark.parametrize(
    ("wrong", "code"), [({"secret": SECRET}, "SignatureDoesNotMatch"), ({"key": "unknownkey"}, "InvalidAccessKeyId")]
)
def test_wrong_credentials(s3: S3, client: str, wrong: dict[str, str], code: str) -> None:
    store = open_store(s3.url(s3.new_bucket()), client=client, **s3.options | wrong)
    for name in CALLS:
        message = told(name, store, AccessDenied, s3.endpoint, within_s=5)
        assert code in message
        assert "check key, secret" in message


def test_missing_bucket(s3: S3, client: str) -> None:
    store = open_store("s3://no-such-bucket/run", client=client, **s3.options)
    for name in CALLS:
        message = told(name, store, NoContainer, s3.endpoint, within_s=5)
        assert "no such bucket" in message
        assert "NoSuchBucket" in message
    with s3.server.client() as boto:
        names = [bucket["Name"] for bucket in boto.list_buckets()["Buckets"]]
    assert "no-such-bucket" not in names  # it was not made on the way


def test_nobody_listens(s3: S3) -> None:
    endpoint = f"http://127.0.0.1:{free_ports(1)[0]}"
    for message in told_by_both(s3, endpoint, Unreachable, within_s=8):
        assert re.search(r"refused|[Cc]onnect", message)
        assert "check endpoint_url" in message


def test_never_answers(s3: S3, mute: str) -> None:
    for message in told_by_both(s3, mute, Unreachable, within_s=12):
        assert re.search(r"[Tt]ime", message)


def told_by_both(s3: S3, endpoint: str, expected: type[StorageError], *, within_s: float) -> list[str]:
    """`told` as the first call of a fresh store, all at the same time as each waits for seconds."""
    jobs = [(client, name) for client in ("obstore", "fsspec") for name in ("list", "get", "put")]
    stores = {job: open_store("s3://bucket/run", client=job[0], **s3.options_for(endpoint)) for job in jobs}

    def work(job: Any) -> str:
        return told(job[1], stores[job], expected, endpoint, within_s=within_s)

    return parallel(len(jobs), work, jobs)


def test_one_probe_serves_all_threads(s3: S3, mute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that find the endpoint silent wait for it together, not one after the other."""
    monkeypatch.setattr("ckpt.store.objects.CHECK_S", 0.5)
    store = open_store("s3://bucket/run", **s3.options_for(mute))
    begin = time.monotonic()

    def call(_: object) -> bool:
        with pytest.raises(Unreachable):
            store.get("a")
        return True

    assert all(parallel(16, call, range(16)))
    assert time.monotonic() - begin < 2


def test_check(s3: S3, client: str) -> None:
    """``check`` tells at once what the first call would."""
    bucket = s3.new_bucket()
    for url, options, expected in [
        (s3.url(bucket), s3.options, None),
        (s3.url(bucket), s3.options | {"secret": SECRET}, AccessDenied),
        ("s3://no-such-bucket", s3.options, NoContainer),
    ]:
        store = open_store(url, client=client, **options)
        assert isinstance(store, Remote)
        if expected is None:
            store.check()
        else:
            with pytest.raises(expected):
                store.check()


def test_missing_object(s3: S3, client: str) -> None:
    store = open_store(s3.url(s3.new_bucket()), client=client, **s3.options)
    with pytest.raises(ObjectMissing, match="no such object"):
        store.get("absent")


def test_no_credentials(s3: S3, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # botocore
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_ports(1)[0]}")  # obstore
    store = open_store(s3.url(s3.new_bucket()), client=client, endpoint_url=s3.endpoint, region="us-east-1")
    with pytest.raises(AccessDenied, match="redentials"):
        store.list()
