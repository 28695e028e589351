"""What to keep, as values. Pure: a policy sees step numbers, newest first, and names those to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Keep(Protocol):
    """A rule of retention. The newest step is always kept, whatever a rule says."""

    def choose(self, steps: Sequence[int]) -> Sequence[int]:
        """Return the steps to keep, out of the committed ones (newest first)."""
        ...


@dataclass(frozen=True, slots=True)
class Latest:
    """Keep the newest ``n`` committed steps."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"Latest({self.n}): keep at least one step")

    def choose(self, steps: Sequence[int]) -> Sequence[int]:
        """Return the first ``n``."""
        return steps[: self.n]
