"""The table of planted mistakes keeps up with the code: every one still applies."""

from __future__ import annotations

from pathlib import Path

import pytest

from drills.book import BOOK
from tests.soak.drills_mutations import DEFECTS, Defect, plant


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_it_applies_and_is_still_python(defect: Defect, tmp_path: Path) -> None:
    tree = plant(defect, tmp_path / "tree")
    assert defect.drill in BOOK
    for file, _, _ in defect.edits:
        compile((tree / file).read_text(), file, "exec")
