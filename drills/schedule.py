"""When a fault strikes and whom: drawn from a seed, the same on every machine. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

AFTER = ("commit", "start", "back")
PHASES = ("save", "commit", "load")


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """Where in the run a fault may strike.

    ``after`` "commit": once ``commits`` steps are committed, so that work has to be restored; "start": from the first
    step on; "back" (not for the first strike): once the job has done a step after the strike before. ``phase`` then
    waits for a moment inside a save, a commit or a load, and holds it there: "save" is the first write of a step's
    data, "commit" that of a commit record, "load" the first read of a step's data. ``at_step`` and ``rank`` pin what
    would be drawn; ``wait_s`` lets seconds pass first.
    """

    after: str = "commit"
    at_step: int | None = None
    rank: int | None = None
    phase: str | None = None
    commits: int = 1
    wait_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse words that mean nothing, with ``ValueError``."""
        if self.after not in AFTER:
            raise ValueError(f"after = {self.after!r}: one of {', '.join(AFTER)}")
        if self.phase is not None and self.phase not in PHASES:
            raise ValueError(f"phase = {self.phase!r}: one of {', '.join(PHASES)}")
        if self.commits < 1 or self.wait_s < 0 or (self.at_step is not None and self.at_step < 1):
            raise ValueError("commits and at_step begin at 1, wait_s at 0")

    def said(self) -> str:
        """The moment in words."""
        where = {
            "commit": f"after {'the first' if self.commits == 1 else self.commits} committed "
            f"step{'s' if self.commits > 1 else ''}",
            "start": "from the first step on",
            "back": "once the job is back",
        }[self.after]
        phase = {
            "save": ", inside a save", "commit": ", as it commits", "load": ", as it loads", None: "",
        }[self.phase]  # fmt: skip
        return where + phase + (f", {self.wait_s:g} s later" if self.wait_s else "")


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


def draw(
    seed: int, when: When, *, last_step: int, world: int, first_commit: int | None, committed: Sequence[int] = ()
) -> Moment:
    """Draw the moment inside the range that the control run really had; ``committed`` are its commits, ascending.

    The last tenth of the run (at least two steps) is left out, so that training goes on after the fault. With
    ``when.commits`` above 1, the range ends at the next commit, so that there are exactly so many. Raises
    ``ValueError`` with the reason when nothing can be drawn.
    """
    lowest = 1
    highest = last_step - max(2, math.ceil(last_step / 10))
    if when.after == "commit" and first_commit is not None:
        lowest = first_commit + 1
        if when.commits > 1:
            if len(committed) < when.commits + 1:
                raise ValueError(f"the drill needs more than {when.commits} committed steps, the run has "
                                 f"{len(committed)}")  # fmt: skip
            lowest = committed[when.commits - 1] + 1
            highest = min(highest, committed[when.commits] - 1)
    if when.phase in ("save", "commit") and committed:  # one more save has to come
        highest = min(highest, committed[-1] - 1)
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
        fraction=_fraction(_dice(seed, "fraction")), lowest=lowest, highest=highest,
        needs_commit=when.after == "commit" and first_commit is not None,
    )  # fmt: skip


def draw_again(seed: int, number: int, when: When, *, world: int) -> tuple[int, float]:
    """Rank, and fraction of a step to wait, of strike ``number`` (from 1), whose step nobody can know before."""
    rank = when.rank if when.rank is not None else _dice(seed, f"{number}/rank").randrange(world)
    return rank, _fraction(_dice(seed, f"{number}/fraction"))


def _dice(seed: int, purpose: str) -> random.Random:
    """A stream of its own for each question, so that pinning one answer does not move another."""
    return random.Random(f"{seed}/{purpose}")


def _fraction(dice: random.Random) -> float:
    """From 0 to 0.999: as it is printed, so that a replay gets the same."""
    return min(round(dice.random(), 3), 0.999)
