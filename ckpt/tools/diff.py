"""What differs between two checkpoints, by their records alone: no tensor data are read. Pure; no torch.

Fingerprints do not depend on how a tensor was sharded, so steps of any two worlds and runs can be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckpt.tools.describe import Entry

Change = Literal["unchanged", "changed", "re-typed", "re-shaped", "added", "removed", "not verified"]
ORDER: tuple[Change, ...] = ("changed", "re-typed", "re-shaped", "added", "removed", "not verified", "unchanged")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """How the numbers of a tensor differ, over the elements that are finite on both sides.

    ``max_abs`` is the largest absolute difference; ``relative`` the Euclidean norm of the difference over that of A,
    None where that is zero. NaN and Inf are counted on each side, (A, B). Integers are compared as float64, which is
    exact below 2^53; ``differing`` compares bits where the dtypes are the same.
    """

    elements: int
    differing: int
    max_abs: float
    relative: float | None
    nan: tuple[int, int]
    inf: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One name in one or both checkpoints; ``stats`` where the data were read."""

    name: str
    change: Change
    a: Entry | None
    b: Entry | None
    stats: Stats | None = None

    @property
    def comparable(self) -> bool:
        """Whether both sides are tensors of one shape, so that their numbers can be compared."""
        if self.a is None or self.b is None or self.change == "unchanged":
            return False
        return self.a.dtype is not None and self.b.dtype is not None and self.a.shape == self.b.shape


def compare(a: Sequence[Entry], b: Sequence[Entry]) -> list[Difference]:
    """Every name of the two, by kind of change and name."""
    left, right = {e.name: e for e in a}, {e.name: e for e in b}
    found = [
        Difference(name=name, change=_change(left.get(name), right.get(name)), a=left.get(name), b=right.get(name))
        for name in left.keys() | right.keys()
    ]
    return sorted(found, key=order)


def order(d: Difference) -> tuple[int, str]:
    """How differences are listed."""
    return ORDER.index(d.change), d.name


def _change(a: Entry | None, b: Entry | None) -> Change:
    if a is None or b is None:
        return "added" if a is None else "removed"
    kinds = {a.kind, b.kind}
    if a.dtype != b.dtype or (
        len(kinds) > 1 and "value" not in kinds
    ):  # plain DCP does not say of which kind a value is
        return "re-typed"
    if a.shape != b.shape:
        return "re-shaped"
    proofs = (a.fingerprint or a.digest, b.fingerprint or b.digest)
    same_kind = all(proofs) and (a.fingerprint or "").partition(":")[0] == (b.fingerprint or "").partition(":")[0]
    if not same_kind:  # one has none, or they were made in two ways
        return "not verified"
    return "unchanged" if proofs[0] == proofs[1] else "changed"


def settle(found: Sequence[Difference]) -> Iterator[Difference]:
    """What was not verified and whose numbers were read is settled by them."""
    for d in found:
        if d.change != "not verified" or d.stats is None:
            yield d
        else:
            yield replace(d, change="changed" if d.stats.differing else "unchanged")


def counts(found: Sequence[Difference]) -> dict[Change, int]:
    """How many of each kind, in the order of ``ORDER``."""
    sums = Counter(d.change for d in found)
    return {change: sums[change] for change in ORDER}
