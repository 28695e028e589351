"""Each known way in which an S3 client loses, doubles or truncates data, on the wire to a real server."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt.errors import AccessDenied, Incomplete, NoContainer, ObjectMissing, StorageError, Unreachable
from ckpt.store import Entry, Store, conditional_put_works, open_store
from ckpt.testing import parallel
from drills.faults.proxy import (
    Action,
    CutResponse,
    FaultProxy,
    LostReply,
    Match,
    Reset,
    Stall,
    Status,
    any_request,
    is_complete,
    is_create,
    is_delete,
    is_get,
    is_list,
    is_part,
    is_put,
)
from tests.s3server import S3

pytestmark = pytest.mark.s3

MIB = 1 << 20


class Rig:
    """A run in a fresh bucket: ``store`` goes through the proxy, ``calm`` straight to the server."""

    def __init__(self, s3: S3, client: str, proxy: FaultProxy) -> None:
        self.s3, self.client, self.proxy = s3, client, proxy
        self.bucket = s3.new_bucket()
        self.store = self.open()
        self.calm = open_store(s3.url(self.bucket), **s3.options)
        self.store.list()  # the first call asks whether anybody is there
        proxy.heal()

    def open(self, **options: object) -> Store:
        options = self.s3.options_for(self.proxy.endpoint) | options
        return open_store(self.s3.url(self.bucket), client=self.client, **options)

    def uploads(self) -> list[str]:
        with self.s3.server.client() as boto:
            listing = boto.list_multipart_uploads(Bucket=self.bucket)
        return [upload["Key"] for upload in listing.get("Uploads", [])]


@pytest.fixture(params=["obstore", "fsspec"])
def rig(request: pytest.FixtureRequest, s3: S3) -> Iterator[Rig]:
    with FaultProxy(s3.server.port) as proxy:
        yield Rig(s3, request.param, proxy)


# ---- nothing truncated, nothing left over


@pytest.mark.parametrize(
    ("match", "action"),
    [
        (lambda r: "partNumber=2" in r.query, Status(403, "AccessDenied")),
        (is_complete, Status(400, "InvalidPart")),
        (lambda r: "partNumber=3" in r.query, Reset(request_bytes=MIB)),
    ],
    ids=["part refused", "completion refused", "part cut off, again and again"],
)
def test_a_failed_upload_is_aborted(rig: Rig, match: Match, action: Action) -> None:
    rig.calm.put("object", [b"older"])
    store = rig.open(retry_budget_s=1.0)
    rig.proxy.add(match, action, times=None)
    with pytest.raises(StorageError):
        store.put("object", [bytes(30 * MIB), bytes(3 * MIB)])
    assert rig.proxy.count(is_part) >= 2
    assert rig.calm.list() == [Entry("object", 5)]
    assert rig.calm.get("object") == b"older"
    assert rig.uploads() == []


def test_a_put_cut_off_shows_nothing(rig: Rig) -> None:
    store = rig.open(retry_budget_s=0.5)
    rig.proxy.add(is_put, Reset(request_bytes=100_000), times=None)
    with pytest.raises(Unreachable):
        store.put("object", [bytes(MIB)])
    assert rig.calm.list() == []


def test_a_lost_answer_to_the_end_of_an_upload(rig: Rig) -> None:
    rig.proxy.add(is_complete, LostReply())
    source = random.Random(0).randbytes(33 * MIB)
    rig.store.put("object", [source])
    assert bytes(rig.calm.get_ranges("object", [(0, len(source))])[0]) == source
    assert rig.uploads() == []


# ---- create-only writes


def test_own_create_with_a_lost_answer_is_no_conflict(rig: Rig) -> None:
    rig.proxy.add(is_create, LostReply())
    assert rig.store.put_if_absent("epochs/1.json", b"mine") is True
    assert rig.calm.get("epochs/1.json") == b"mine"


def test_a_lost_answer_does_not_make_the_rival_lose(rig: Rig) -> None:
    rig.calm.put("epochs/1.json", [b"theirs"])
    rig.proxy.add(is_create, LostReply())
    assert rig.store.put_if_absent("epochs/1.json", b"mine") is False
    assert rig.calm.get("epochs/1.json") == b"theirs"


def test_a_create_that_did_not_happen_is_tried_again(rig: Rig) -> None:
    faults: list[Action] = [
        Reset(),
        Reset(request_bytes=3),
        Status(503, "SlowDown"),
        Status(409, "ConditionalRequestConflict"),
    ]
    for n, fault in enumerate(faults):
        rig.proxy.heal()
        rig.proxy.add(is_create, fault, times=2)
        assert rig.store.put_if_absent(f"epochs/{n}.json", b"mine") is True
        assert rig.calm.get(f"epochs/{n}.json") == b"mine"
        assert rig.proxy.count(is_create) == 3


def test_a_late_create_changes_nothing(rig: Rig) -> None:
    """The client gives up on a request that is still under way, and it arrives after the next one."""
    limits = (
        {"client_options": {"read_timeout": "500ms", "timeout": "500ms"}}
        if rig.client == "obstore"
        else {"config_kwargs": {"read_timeout": 0.5, "retries": {"total_max_attempts": 1}}}
    )
    store = rig.open(**limits)
    rig.proxy.add(is_create, Stall(1.0))
    assert store.put_if_absent("epochs/1.json", b"mine") is True
    time.sleep(0.7)
    assert rig.calm.get("epochs/1.json") == b"mine"
    assert store.put_if_absent("epochs/1.json", b"theirs") is False


def test_a_service_without_conditions_is_found_out(rig: Rig) -> None:
    assert conditional_put_works(rig.store) is True
    other = rig.open()
    rig.proxy.add(is_create, Status(501, "NotImplemented"), times=None)
    begin = time.monotonic()
    assert conditional_put_works(other) is False
    assert time.monotonic() - begin < 10  # not taken for one more 5xx that may pass
    assert other.put_if_absent("epochs/1.json", b"mine") is True
    assert other.put_if_absent("epochs/1.json", b"theirs") is False
    assert [entry.key for entry in rig.calm.list()] == ["epochs/1.json"]
    asked = rig.proxy.count()
    assert conditional_put_works(rig.store) is True
    assert conditional_put_works(other) is False
    assert rig.proxy.count() == asked  # both remembered


# ---- listings


def test_listings_are_never_stale(rig: Rig) -> None:
    assert rig.store.list("commits/") == []
    rig.calm.put("commits/1", [b"1"])
    assert rig.store.list("commits/") == [Entry("commits/1", 1)]
    rig.calm.put("commits/1", [b"longer"])
    assert rig.store.list("commits/") == [Entry("commits/1", 6)]
    assert rig.store.get("commits/1") == b"longer"
    rig.calm.delete(["commits/1"])
    assert rig.store.list() == []
    with pytest.raises(ObjectMissing):
        rig.store.get("commits/1")


def test_listings_of_several_pages_survive_faults(s3: S3) -> None:
    with FaultProxy(s3.server.port) as proxy:
        rig = Rig(s3, "obstore", proxy)
        keys = [f"commits/{n:04d}" for n in range(1001)]
        parallel(8, lambda key: rig.calm.put(str(key), [b"x"]), keys)
        for rig.client in ("obstore", "fsspec"):
            store = rig.open()
            store.list("nothing/")
            proxy.heal()
            proxy.add(is_list, CutResponse(2000))
            proxy.add(lambda r: is_list(r) and "continuation-token" in r.query, Status(503, "SlowDown"))
            proxy.add(lambda r: is_list(r) and "continuation-token" in r.query, CutResponse(100, fin=True))
            assert sorted(entry.key for entry in store.list("commits/")) == keys
            assert proxy.faults() == 3
            proxy.heal()
            assert sorted(entry.key for entry in store.list("com")) == keys
            proxy.heal()
            assert store.list("x") == []  # as other runs in the same bucket: they are not walked through
            assert proxy.count(is_list) == 1


def test_what_is_no_listing_is_never_an_empty_one(rig: Rig) -> None:
    """A server of another kind, or a wall before the service, must not look like a run that is new."""
    rig.calm.put("commits/1", [b"x"])
    page = Status(200, body="<html><body>please log in</body></html>")
    for answer in (Status(404, body=" "), page, Status(200, body="{}"), Status(301, "PermanentRedirect")):
        rig.proxy.heal()
        rig.proxy.add(any_request, answer, times=None)
        with pytest.raises(StorageError, match=rig.proxy.endpoint) as caught:
            rig.open(retry_budget_s=0.5).list()
        assert isinstance(caught.value, NoContainer) is (answer.code == 404)


def test_folder_markers_are_no_objects(rig: Rig) -> None:
    with rig.s3.server.client() as boto:
        for key in ("run/", "run/commits/"):
            boto.put_object(Bucket=rig.bucket, Key=key, Body=b"")
    rig.calm.put("commits/1", [b"x"])
    assert rig.store.list("commits/") == [Entry("commits/1", 1)]
    assert Entry("", 0) not in rig.store.list()


# ---- bad weather


def on(match: Match, key: str) -> Match:
    return lambda request: match(request) and request.path.endswith(f"/{key}")


# call -> the requests it makes, the call, its result when "read" holds "old data"
WORK: dict[str, tuple[Match, Callable[[Store], object], object]] = {
    "put": (on(is_put, "put"), lambda store: store.put("put", [b"data"]), None),
    "create": (on(is_create, "create"), lambda store: store.put_if_absent("create", b"data"), True),
    "get": (on(is_get, "read"), lambda store: store.get("read"), b"old data"),
    "ranges": (on(is_get, "range"), lambda store: bytes(store.get_ranges("range", [(1, 5)])[0]), b"ld d"),
    "list": (is_list, lambda store: store.list("read"), [Entry("read", 8)]),
    "delete": (is_delete, lambda store: store.delete(["delete"]), None),
}


def test_a_storm_passes(rig: Rig) -> None:
    for key in ("read", "range", "delete"):
        rig.calm.put(key, [b"old data"])
    for match, _, _ in WORK.values():
        for fault in (Status(503, "SlowDown"), Reset(), Status(500, "InternalError")):
            rig.proxy.add(match, fault)
    results = parallel(len(WORK), lambda call: WORK[str(call)][1](rig.store), list(WORK))
    assert dict(zip(WORK, results, strict=True)) == {call: expected for call, (_, _, expected) in WORK.items()}
    assert rig.proxy.faults() == 3 * len(WORK)
    assert {entry.key for entry in rig.calm.list()} == {"read", "range", "put", "create"}


def test_a_storm_that_does_not_pass_ends_in_time(rig: Rig) -> None:
    store = rig.open(retry_budget_s=1.5)
    rig.proxy.add(any_request, Status(503, "SlowDown"), times=None)

    def work(call: object) -> float:
        begin = time.monotonic()
        with pytest.raises(Unreachable, match="503 SlowDown"):
            WORK[str(call)][1](store)
        return time.monotonic() - begin

    seconds = dict(zip(WORK, parallel(len(WORK), work, list(WORK)), strict=True))
    assert all(0.5 < taken < 10 for taken in seconds.values()), seconds


def test_a_body_cut_short_is_read_again(rig: Rig) -> None:
    for key in ("read", "range"):
        rig.calm.put(key, [b"old data"])
    for cut in (CutResponse(3), CutResponse(3, fin=True), CutResponse(0)):
        for call in ("get", "ranges", "list"):
            match, work, expected = WORK[call]
            rig.proxy.heal()
            rig.proxy.add(match, cut)
            assert work(rig.store) == expected, (call, cut)
            assert rig.proxy.faults() == 1


def test_a_long_read_resumes(rig: Rig) -> None:
    source = random.Random(1).randbytes(20 * MIB)
    rig.calm.put("object", [source])
    rig.proxy.add(is_get, CutResponse(5 * MIB), times=3)
    assert bytes(rig.store.get_ranges("object", [(0, len(source))])[0]) == source
    assert rig.proxy.faults() == 3


def test_a_range_refused_by_mistake_is_no_proof_of_damage(rig: Rig) -> None:
    """Only the object's own size proves that it is too short: damage makes a run fall back to an older step."""
    rig.calm.put("object", [bytes(1000)])
    rig.proxy.add(is_get, Status(416, "InvalidRange"))
    with pytest.raises(StorageError):
        rig.store.get_ranges("object", [(10, 20)])
    with pytest.raises(Incomplete):
        rig.store.get_ranges("object", [(10, 2000)])


def test_ranges_cost_few_requests(rig: Rig) -> None:
    source = bytes(20 * MIB)
    rig.calm.put("object", [source])
    rig.store.get_ranges("object", [(n * 1000, n * 1000 + 100) for n in range(50)])
    assert rig.proxy.count(is_get) == 1
    rig.store.get_ranges("object", [(0, 20 * MIB), (MIB, MIB + 1)])
    assert rig.proxy.count(is_get) == 1 + 3 + 1


def test_a_deletion_refused_in_part_is_an_error(rig: Rig) -> None:
    """The service answers 200 and names the keys that it kept."""
    rig.calm.put("kept", [b"x"])
    body = (
        "<DeleteResult><Error><Key>run/kept</Key><Code>AccessDenied</Code>"
        "<Message>Access Denied</Message></Error></DeleteResult>"
    )
    rig.proxy.add(is_delete, Status(200, body=body))
    with pytest.raises(StorageError, match="AccessDenied"):
        rig.store.delete(["kept"])


def test_a_refusal_is_not_tried_again(rig: Rig) -> None:
    rig.proxy.add(any_request, Status(403, "AccessDenied"), times=None)
    for _, work, _ in WORK.values():
        rig.proxy.log.clear()
        with pytest.raises(AccessDenied):
            work(rig.store)
        assert rig.proxy.count() == 1


# ---- processes


def test_a_forked_child_is_told_instead_of_hanging(s3: S3, tmp_path: Path) -> None:
    script = tmp_path / "fork.py"
    script.write_text(
        textwrap.dedent("""
            import json, os, sys
            from ckpt.errors import Refused
            from ckpt.store import open_store
            url, options = json.loads(sys.argv[1])
            store = open_store(url, **options)
            store.put("parent", [b"x"])
            child = os.fork()
            if not child:
                for use in (store.list, open_store(url, **options).list, store.check):
                    try:
                        use()
                    except Refused as error:
                        assert "spawn" in str(error)
                    else:
                        os._exit(1)
                os._exit(42)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
            assert store.get("parent") == b"x"
        """)
    )
    arguments = json.dumps([s3.url(s3.new_bucket()), s3.options])
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script), arguments], timeout=30, check=False, env=os.environ | {"PYTHONPATH": str(root)}
    )
    assert done.returncode == 0


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_uploads_that_a_killed_writer_left_are_aborted_by_key_and_age(s3: S3, client: str) -> None:
    bucket = s3.new_bucket()
    store = open_store(s3.url(bucket, "run"), client=client, **s3.options)
    with s3.server.client() as boto:
        for key in ("run/steps/1/a", "run/steps/1/b", "other/steps/1/c"):
            upload = boto.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
            boto.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=1, Body=bytes(5 << 20))

        def left() -> list[str]:
            return sorted(u["Key"] for u in boto.list_multipart_uploads(Bucket=bucket).get("Uploads", []))

        assert store.abort_uploads("steps/", older_s=3600.0) == 0
        assert len(left()) == 3
        assert store.abort_uploads("steps/", older_s=0.0) == 2
        assert left() == ["other/steps/1/c"]
