from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.s3server import S3, S3Server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server for the whole session, on ports and a folder of its own."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def s3(s3_server: S3Server) -> Iterator[S3]:
    """``.new_bucket()``, ``.url(bucket)``, ``.options``: buckets go when the test ends."""
    with S3(s3_server) as access:
        yield access
