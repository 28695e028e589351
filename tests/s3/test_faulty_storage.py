"""A sample of the faulty storage: no save is lost, no step is torn, and what comes back is what was trained."""

from __future__ import annotations

import pytest

from tests.s3.faulty import play
from tests.s3server import S3

pytestmark = pytest.mark.s3


@pytest.mark.parametrize(("client", "outage_s"), [("obstore", 4.0), ("fsspec", 0.0)])
def test_requests_that_fail_lose_nothing(s3: S3, client: str, outage_s: float) -> None:
    result = play(s3, 1, client=client, outage_s=outage_s)
    assert result.wrong is None
    assert result.faults > 5
    assert result.longest_save_s > outage_s
