"""Every backend against the same contract, the remote ones against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.errors import NoContainer, StorageError
from ckpt.store import Store, open_store
from ckpt.testing import StoreTests
from drills.faults.proxy import FaultProxy, Status, any_request
from tests.s3server import S3, S3Server


class TestLocal(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(tmp_path / "run")


class TestMemory(StoreTests):
    @pytest.fixture
    def store(self, request: pytest.FixtureRequest) -> Store:
        return open_store(f"memory://{request.node.nodeid.replace('/', '.')}/run", seed=1)


class TestFsspecFile(StoreTests):
    conditional = False
    many = 50

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"file://{tmp_path}/run", client="fsspec")

    def test_nothing_is_left_beside_an_object(self, store: Store, tmp_path: Path) -> None:
        store.put("a/key", [b"x"])
        store.put("a/key", [b"y"])
        with pytest.raises(StorageError):
            store.put("a/key/below", [b"z"])
        assert [path.name for path in (tmp_path / "run").rglob("*")] == ["a", "key"]

    def test_a_root_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        store = open_store(f"file://{tmp_path}/file", client="fsspec")
        for use in (store.list, lambda: store.put("a", [b"x"]), lambda: store.get("a")):
            with pytest.raises(NoContainer):
                use()


class OnS3(StoreTests):
    """One bucket and one client a class, emptied for every test: opening s3fs takes half a second."""

    many = 50
    races = 1  # the server lets each loser wait a second
    client = "obstore"

    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls, s3_server: S3Server) -> Iterator[Store]:
        with S3(s3_server) as s3:
            yield open_store(s3.url(s3.new_bucket()), client=cls.client, **s3.options)

    @pytest.fixture
    def store(self, shared: Store) -> Store:
        shared.delete([entry.key for entry in shared.list()])
        return shared


@pytest.mark.s3
class TestObstoreS3(OnS3):
    many = StoreTests.many


@pytest.mark.s3
class TestS3fs(OnS3):
    client = "fsspec"


@pytest.mark.s3
class TestObstoreInBadWeather(OnS3):
    """The same answers when one request in twenty is refused."""

    races = 0

    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls, s3_server: S3Server) -> Iterator[Store]:
        with S3(s3_server) as s3, FaultProxy(s3_server.port) as proxy:
            proxy.add(any_request, Status(503, "SlowDown"), times=None, probability=0.05)
            yield open_store(s3.url(s3.new_bucket()), **s3.options_for(proxy.endpoint))
            assert proxy.faults() > 10
