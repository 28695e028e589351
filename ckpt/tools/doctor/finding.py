"""What one look of the doctor found. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckpt.tools.report import Verdict


@dataclass(frozen=True, slots=True)
class Checked:
    """One thing that was looked at. ``fix`` is what to do where it is bad."""

    name: str
    verdict: Verdict
    what: str
    fix: str | None = None


def worst(checks: Iterable[Checked]) -> Verdict:
    """Bad where anything is; what could not be asked is no illness."""
    return "bad" if any(c.verdict == "bad" for c in checks) else "good"
