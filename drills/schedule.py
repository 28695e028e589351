"""When a fault strikes and whom: drawn from a seed, the same on every machine. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """Where in the run a fault may strike.

    ``after`` "commit": once the control run had a committed step, so that work has to be restored; "start": from
    the first step on. ``at_step`` and ``rank`` pin what would be drawn.
    """

    after: str = "commit"
    at_step: int | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The moment of a fault: once ``step`` is done on some rank, ``fraction`` of a step later, on ``rank``.

    ``lowest`` and ``highest`` are the range from which the step was drawn; ``needs_commit``: wait for one first.
    """

    step: int
    rank: int
    fraction: float
    lowest: int
    highest: int
    needs_commit: bool


def draw(seed: int, when: When, *, last_step: int, world: int, first_commit: int | None) -> Moment:
    """Draw the moment inside the range that the control run really had.

    The last tenth of the run (at least two steps) is left out, so that training goes on after the fault. Raises
    ``ValueError`` with the reason when nothing can be drawn.
    """
    lowest = 1
    if when.after == "commit" and first_commit is not None:
        lowest = first_commit + 1
    highest = last_step - max(2, math.ceil(last_step / 10))
    if highest < lowest and when.at_step is None:
        raise ValueError(
            f"no room for a fault: the run has {last_step} steps and the first commit is at step {first_commit}"
        )
    if when.rank is not None and not 0 <= when.rank < world:
        raise ValueError(f"there is no rank {when.rank}: the control run had {world}")
    step = when.at_step if when.at_step is not None else _dice(seed, "step").randint(lowest, highest)
    if not 1 <= step < last_step:
        raise ValueError(f"step {step} is not inside the run, which has {last_step} steps")
    return Moment(
        step=step, rank=when.rank if when.rank is not None else _dice(seed, "rank").randrange(world),
        fraction=round(_dice(seed, "fraction").random(), 3), lowest=lowest, highest=highest,
        needs_commit=when.after == "commit" and first_commit is not None,
    )  # fmt: skip


def _dice(seed: int, purpose: str) -> random.Random:
    """A stream of its own for each question, so that pinning one answer does not move another."""
    return random.Random(f"{seed}/{purpose}")
