from __future__ import annotations

import subprocess
import sys

import pytest

import elastic


def test_importing_elastic_imports_no_torch() -> None:
    code = "import sys, elastic, elastic.ledger.events, elastic.ledger.reader; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_public_names_are_there() -> None:
    for name in elastic.__all__:
        assert getattr(elastic, name).__module__.startswith("elastic.")
    assert elastic.membership.generation() is None
    with pytest.raises(AttributeError, match="no attribute 'latest'"):
        elastic.latest  # noqa: B018
