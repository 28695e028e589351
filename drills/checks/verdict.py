"""The four words, what a check says, and which exit status follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

NOT_REACHED = "not reached"


class Verdict(StrEnum):
    """The four words, the same in code, JSON and tables."""

    PASS = "pass"
    FAIL = "fail"
    BROKE = "harness broke"
    UNKNOWN = "not verified"


EXIT_STATUS = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.UNKNOWN: 3, Verdict.BROKE: 70}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One judgement: ``target`` is what had to be, ``value`` what was, ``detail`` the reason or the finding."""

    name: str
    verdict: Verdict
    target: str
    value: str
    detail: str = ""


Teller = Callable[..., Check]


def teller(name: str, target: str) -> Teller:
    """A function that makes the check ``name`` from a verdict, a value and a detail."""

    def say(verdict: Verdict, value: str, detail: str = "") -> Check:
        return Check(name=name, verdict=verdict, target=target, value=value, detail=detail)

    return say


def counted(n: int, what: str) -> str:
    """``1 step``, ``2 steps``, ``3 entries``."""
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{n} {what if n == 1 else plural}"


def size(n: float) -> str:
    """Bytes in binary units, as tables show them; JSON has the exact number."""
    if n < 1024:
        return counted(int(n), "byte")
    units = iter(("KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    n /= 1024
    while n >= 1024 and unit != "TiB":
        n, unit = n / 1024, next(units)
    return f"{n:.1f} {unit}"


def not_reached(say: Teller) -> Check:
    """Not verified, because the drill ended before; why is said once, elsewhere."""
    return say(Verdict.UNKNOWN, NOT_REACHED)
