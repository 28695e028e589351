"""The parts of the stores that are pure: choice of a backend, keys, ranges, options, messages."""

from __future__ import annotations

import itertools
import pickle
import random
import subprocess
import sys
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import AccessDenied, Incomplete, NoContainer, ObjectMissing, Refused, StorageError, Unreachable
from ckpt.store import Entry, conditional_put_works, open_store
from ckpt.store.memory import MemoryStore
from ckpt.store.options import translator
from ckpt.store.remote import failure_of_answer, scrubbed, secrets_in
from ckpt.store.transfer import GAP_BYTES, PIECE_BYTES, cut, part_bytes, plan_fetches, read_ranges

KIB = 1 << 10


# ---- the choice of a backend


def test_importing_the_stores_imports_no_client() -> None:
    code = (
        "import sys, ckpt.store, ckpt.testing\n"
        "heavy = {'torch', 'obstore', 'fsspec', 's3fs', 'botocore', 'numpy', 'pytest'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("url", "client", "name"),
    [
        ("/a/b", None, "LocalStore"),
        ("file:///a/b", None, "LocalStore"),
        ("memory://x", None, "MemoryStore"),
        ("s3://b/run", None, "ObjectStore"),
        ("s3://b/run", "obstore", "ObjectStore"),
        ("s3://b/run", "fsspec", "S3fsStore"),
        ("gs://b/run", None, "ObjectStore"),
        ("az://c/run", None, "ObjectStore"),
        ("abfs://c@account.dfs.core.windows.net/run", None, "ObjectStore"),
        ("file:///a/b", "fsspec", "FilesystemStore"),
        ("dir::file:///a", None, "FilesystemStore"),
    ],
)
def test_backend_of_a_url(url: str, client: str | None, name: str) -> None:
    options: dict[str, dict[str, object]] = {"az": {"account_name": "account", "account_key": "c2VjcmV0"}}
    store = open_store(url, client=client, **options.get(url.partition(":")[0], {}))
    assert type(store).__name__ == name


@pytest.mark.parametrize(
    ("url", "client", "message"),
    [
        ("/a/b", "obstore", "obstore does not serve file"),
        ("memory://x", "obstore", "obstore does not serve memory"),
        ("ftp://host/x", "obstore", "obstore does not serve ftp"),
        ("s3://b", "boto3", "no such storage client"),
        ("nosuch://b/x", None, "Protocol not known"),
    ],
)
def test_what_cannot_be_opened_is_refused(url: str, client: str | None, message: str) -> None:
    with pytest.raises(Refused, match=message):
        open_store(url, client=client)


# ---- conditional puts


class Forgetful(MemoryStore):
    """A service that ignores the condition of a create-only write, and says nothing."""

    tries = 0

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.tries += 1
        self.put(key, [data])
        return True


def test_a_service_that_ignores_the_condition_is_found_out() -> None:
    store = Forgetful("memory://forgetful")
    assert not conditional_put_works(store)
    assert not conditional_put_works(store)
    assert store.tries == 2  # it is remembered
    assert store.list() == []
    assert conditional_put_works(MemoryStore("memory://forgetful"))


# ---- memory


def test_memory_is_shared_by_name() -> None:
    open_store("memory://shared/run").put("steps/1/a", [b"x"])
    assert open_store("memory://shared/run/steps/1/").list() == [Entry("a", 1)]
    assert open_store("memory://shared").list("run/") == [Entry("run/steps/1/a", 1)]
    assert open_store("memory://other/run").list() == []


def test_memory_lists_in_a_seeded_order() -> None:
    keys = [f"{n:03d}" for n in range(50)]
    for key in keys:
        open_store("memory://order").put(key, [b""])
    first, same, other = ([entry.key for entry in open_store("memory://order", seed=seed).list()] for seed in (1, 1, 2))
    assert first == same
    assert first != other
    assert sorted(first) == sorted(other) == keys


# ---- ranges

SOURCE = memoryview(random.Random(5).randbytes(20 << 20))

starts = st.integers(0, 400).map(lambda n: n * 97 * KIB)
sizes = st.integers(0, 300).map(lambda n: n * 61 * KIB)
several_ranges = st.lists(st.tuples(starts, sizes).map(lambda pair: (pair[0], sum(pair))), max_size=8)


@settings(max_examples=200, deadline=None)
@given(several_ranges)
def test_fetches_cover_what_is_wanted_and_little_more(ranges: list[tuple[int, int]]) -> None:
    fetches = plan_fetches(ranges)
    assert all(0 < fetch.end - fetch.start <= PIECE_BYTES for fetch in fetches)
    for n, (start, end) in enumerate(ranges):
        got = sorted((f.start, f.end) for f in fetches if n in f.serves)
        assert not got if start == end else got[0][0] <= start
        at = start
        for low, high in got:
            assert low <= at
            at = max(at, high)
        assert at >= end
    edges = {edge for fetch in fetches for edge in (fetch.start, fetch.end)} | {
        edge for pair in ranges for edge in pair
    }
    for low, high in itertools.pairwise(sorted(edges)):  # what nobody wants is at most a gap long
        fetched = any(f.start <= low and high <= f.end for f in fetches)
        wanted = any(start < high and low < end for start, end in ranges)
        assert wanted or not fetched or high - low <= GAP_BYTES


@settings(max_examples=20, deadline=None)
@given(several_ranges)
def test_ranges_are_put_together_again(ranges: list[tuple[int, int]]) -> None:
    size = len(SOURCE)
    ranges = [(start % size, min(start % size + end - start, size)) for start, end in ranges]
    got = read_ranges(lambda start, end: SOURCE[start:end], ranges)
    assert [bytes(data) for data in got] == [bytes(SOURCE[start:end]) for start, end in ranges]


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 50))
def test_parts_of_an_upload(buffers: list[bytes], size: int) -> None:
    parts = [b"".join(part) for part in cut([memoryview(data) for data in buffers], size)]
    assert b"".join(parts) == b"".join(buffers)
    assert all(len(part) == size for part in parts[:-1])
    assert all(0 < len(part) <= size for part in parts[-1:])


def test_an_upload_has_never_too_many_parts() -> None:
    for size in (1, 16 << 20, 5 << 40):
        assert size / part_bytes(size, 16 << 20) <= 10_000
    assert part_bytes(100 << 30, 16 << 20) == 16 << 20


def test_many_small_ranges_are_planned_quickly() -> None:
    ranges = [(n * 200 * KIB, n * 200 * KIB + 10) for n in range(50_000)]
    begin = time.monotonic()
    assert len(plan_fetches(ranges)) == 50_000
    assert time.monotonic() - begin < 2


def test_ranges_are_fetched_at_the_same_time() -> None:
    def slow(start: int, end: int) -> bytes:
        time.sleep(0.1)
        return bytes(end - start)

    begin = time.monotonic()
    read_ranges(slow, [(n << 20, (n << 20) + 1) for n in range(8)])
    assert time.monotonic() - begin < 0.5


def test_impossible_ranges_are_refused() -> None:
    def never(start: int, end: int) -> bytes:
        raise AssertionError("asked for it")

    for bad in ((-1, 5), (5, 4)):
        with pytest.raises(Refused):
            read_ranges(never, [(0, 0), bad])


# ---- options


def test_fsspec_options_in_the_words_of_obstore() -> None:
    native = translator("s3")(
        "bucket",
        {
            "key": "K", "secret": "S", "token": "T", "anon": None, "use_listings_cache": False,
            "client_kwargs": {"endpoint_url": "http://host:9000", "region_name": "eu", "verify": False},
            "config_kwargs": {"connect_timeout": 3, "s3": {"addressing_style": "path"}, "retries": {}},
            "server_side_encryption": "AES256",
        },
    )  # fmt: skip
    assert native.config == {
        "bucket": "bucket", "access_key_id": "K", "secret_access_key": "S", "session_token": "T",
        "endpoint": "http://host:9000", "region": "eu", "server_side_encryption": "AES256",
    }  # fmt: skip
    assert native.client == {"allow_invalid_certificates": True, "connect_timeout": "3s", "allow_http": True}
    assert native.endpoint == "http://host:9000"


def test_outer_options_win_over_client_kwargs() -> None:
    options = {
        "key": "K",
        "secret": "S",
        "endpoint_url": "https://outer",
        "client_kwargs": {"endpoint_url": "http://in"},
    }
    native = translator("s3")("bucket", options)
    assert native.config["endpoint"] == "https://outer"
    assert "allow_http" not in native.client


def test_what_obstore_cannot_honour_is_refused() -> None:
    for options, name in (
        ({"client_kwargs": {"api_version": "2006"}}, "api_version"),
        ({"config_kwargs": {"proxies": {}}}, "proxies"),
        ({"s3_additional_kwargs": {"ACL": "private"}}, "s3_additional_kwargs"),
        ({"no_such_option": 1}, "no_such_option"),
    ):
        with pytest.raises(Refused, match=name) as caught:
            open_store("s3://b", key="k", secret="s", **options)
        assert 'client="fsspec"' in str(caught.value)


def test_azure_and_google_options() -> None:
    azure = translator("abfs")("c@acc.dfs.core.windows.net", {"account_key": "KEY"})
    assert azure.config == {"container_name": "c", "account_name": "acc", "account_key": "KEY"}
    azure = translator("az")(
        "c", {"connection_string": "AccountName=acc;AccountKey=a2V5PT0=;BlobEndpoint=http://h/acc"}
    )
    assert azure.config["account_key"] == "a2V5PT0="
    assert azure.endpoint == "http://h/acc"
    assert azure.client == {"allow_http": True}
    assert translator("gs")("b", {"token": "anon", "project": "p"}).config == {"bucket": "b", "skip_signature": True}
    assert translator("gs")("b", {"token": "/key.json"}).config == {"bucket": "b", "service_account": "/key.json"}


# ---- messages


@pytest.mark.parametrize(
    ("status", "code", "kind", "passing"),
    [
        (403, "SignatureDoesNotMatch", AccessDenied, False),
        (401, "", AccessDenied, False),
        (400, "ExpiredToken", AccessDenied, False),
        (404, "NoSuchBucket", NoContainer, False),
        (404, "ContainerNotFound", NoContainer, False),
        (400, "InvalidBucketName", NoContainer, False),
        (404, "NoSuchKey", ObjectMissing, False),
        (404, "", ObjectMissing, False),
        (404, "NoSuchUpload", StorageError, True),
        (400, "RequestTimeout", StorageError, True),
        (429, "", Unreachable, True),
        (500, "InternalError", Unreachable, True),
        (503, "SlowDown", Unreachable, True),
        (400, "InvalidRequest", StorageError, False),
        (412, "PreconditionFailed", StorageError, False),
    ],
)
def test_meaning_of_answers(status: int, code: str, kind: type[StorageError], passing: bool) -> None:
    failure = failure_of_answer(status, code)
    assert failure.kind is kind
    assert failure.passing is passing


def test_secrets_are_taken_out_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "from/environment")
    options = {
        "key": "AKIA12345", "secret": "s3cr3t/+", "endpoint_url": "http://host", "anon": False,
        "client_kwargs": {"aws_session_token": "tok-en-tok-en", "region_name": "eu-west-1"},
    }  # fmt: skip
    secrets = secrets_in(options)
    text = scrubbed(
        "GET https://user:pass@host/key?X-Amz-Signature=abcdef failed for AKIA12345 with s3cr3t/+ or s3cr3t%2F%2B,\n"
        "tok-en-tok-en, from/environment in eu-west-1",
        secrets,
    )
    for hidden in ("AKIA12345", "s3cr3t", "abcdef", "pass@", "user", "tok-en", "environment"):
        assert hidden not in text
    assert "https://host/key" in text
    assert "eu-west-1" in text


@pytest.mark.parametrize("url", ["ftp://user:topsecret@127.0.0.1:1/run", "sftp://user:topsecret@127.0.0.1:1/run"])
def test_a_password_in_a_url_is_not_shown(url: str) -> None:
    with pytest.raises((StorageError, Refused)) as caught:
        open_store(url).list()
    assert "topsecret" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)


@pytest.mark.parametrize("client", [None, "fsspec"])
def test_credentials_in_the_url_of_a_bucket_are_refused(client: str | None) -> None:
    with pytest.raises(Refused, match="storage options") as caught:
        open_store("s3://AKIA:topsecret@bucket/run", client=client)
    assert "topsecret" not in str(caught.value)


def test_a_url_keeps_what_is_no_secret() -> None:
    options = {"account_name": "a", "account_key": "c2VjcmV0"}
    assert (
        open_store("abfs://box@acc.dfs.core.windows.net/run/", **options).url
        == "abfs://box@acc.dfs.core.windows.net/run"
    )
    assert scrubbed("abfs://box@acc.dfs.core.windows.net/run", ()) == "abfs://box@acc.dfs.core.windows.net/run"


def test_errors_travel_between_processes() -> None:
    with pytest.raises(ObjectMissing) as caught:
        open_store("memory://pickled").get("absent")
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is ObjectMissing
    assert str(again) == str(caught.value)


def test_ranges_beyond_the_end_take_no_memory() -> None:
    """An index may lie about sizes: a long range is taken at its word only once its last byte was fetched."""
    asked = []

    def fetch(start: int, end: int) -> bytes:
        asked.append((start, end))
        if end > len(SOURCE):
            raise Incomplete("past the end")
        return SOURCE[start:end]

    for ranges in ([(0, 1 << 50)], [(0, 10), (500, 1 << 40)], [(0, 60 << 20), (0, 60 << 20)]):
        asked.clear()
        tracemalloc.start()
        with pytest.raises(Incomplete):
            read_ranges(fetch, ranges)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20
        assert asked == [(ranges[-1][1] - 1, ranges[-1][1])]
