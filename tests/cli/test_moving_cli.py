"""The commands ``adopt`` and ``export``: what they print, and their exit statuses."""

from __future__ import annotations

import pytest

from tests.cli.ckpt_cases import GOLDEN, Case, transcript
from tests.cli.moving_cases import CASES


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_golden_text(case: Case) -> None:
    assert transcript(case) == (GOLDEN / f"{case.name}.txt").read_text()
