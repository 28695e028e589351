"""Replicas of a tensor that should be equal, compared by fingerprint at a save, before the step is committed.

A rank that diverges is what silent corruption of memory or of a computation looks like, and a missed collective.
DCP writes a replicated tensor from whichever rank has least to write: of replicas that differ, a mixture that no rank
ever had. So one rank's copy of a tensor that differs is written, or none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from ckpt.engine.planner import Replica
from ckpt.errors import Refused

Action = Literal["raise", "warn", "quarantine", "off"]


@dataclass(frozen=True, slots=True)
class Policy:
    """What a save does where replicas differ, and at which saves it looks: every ``every``-th."""

    action: Action
    every: int = 1

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read ``raise``, ``warn``, ``quarantine`` or ``off``; ``warn:10`` is every tenth save. Raises ``Refused``."""
        m = re.fullmatch(rf"({'|'.join(get_args(Action))})(?::([1-9]\d{{0,5}}))?", text, re.ASCII)
        if m is None:
            raise Refused(f"replicas={text!r} is none of {', '.join(get_args(Action))}",
                          hint='replicas="raise"   |   replicas="warn:10" compares at every tenth save')  # fmt: skip
        return cls(cast(Action, m[1]), int(m[2] or 1))

    def due(self, nth: int) -> bool:
        """Whether replicas are compared at the n-th save of a start, counted from 1."""
        return self.action != "off" and nth % self.every == 0


@dataclass(frozen=True, slots=True)
class Divergence:
    """A tensor of which replicas differ. ``groups`` are the ranks that agree with one another, the largest first."""

    key: str
    groups: tuple[tuple[int, ...], ...]
    alike: bool  # at least shape and dtype are the same

    @property
    def minority(self) -> tuple[int, ...]:
        """The ranks that differ from what most hold; none where no group is the largest."""
        if len(self.groups[0]) == len(self.groups[1]):
            return ()
        return tuple(sorted(r for group in self.groups[1:] for r in group))

    @property
    def keeper(self) -> int:
        """The rank whose copy is the likeliest to be right: the first of the largest group."""
        return self.groups[0][0]

    def __str__(self) -> str:
        if self.minority:
            return f"{ranks(self.minority)} {'differs' if len(self.minority) == 1 else 'differ'} from " + ranks(
                self.groups[0]
            )
        if len(self.groups) > 8:
            return f"{len(self.groups)} different contents, none held by most"
        return " | ".join(map(ranks, self.groups)) + " differ, none held by most"


def compare(held: Sequence[Mapping[str, Replica]]) -> list[Divergence]:
    """The tensors of which the ranks hold different contents; ``held`` is by rank. Pure."""
    by_key: dict[str, dict[Replica, list[int]]] = {}
    for rank, mine in enumerate(held):
        for key, content in mine.items():
            by_key.setdefault(key, {}).setdefault(content, []).append(rank)
    return [
        Divergence(key, tuple(sorted(map(tuple, contents.values()), key=lambda g: (-len(g), g))),
                   alike=len({content[:2] for content in contents}) == 1)
        for key, contents in sorted(by_key.items())
        if len(contents) > 1
    ]  # fmt: skip


def one_copy(plans: Sequence[SavePlan], keepers: Mapping[str, int]) -> list[SavePlan]:
    """The ranks' plans, where a tensor of ``keepers`` is left with that rank alone."""
    return [
        replace(plan, items=[i for i in plan.items if keepers.get(i.index.fqn, rank) == rank])
        for rank, plan in enumerate(plans)
    ]


def first_holders(plans: Sequence[SavePlan], keys: Collection[str]) -> dict[str, int]:
    """The lowest rank that holds each of these tensors whole."""
    holders: dict[str, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.index.fqn in keys and item.type == WriteItemType.TENSOR:
                holders.setdefault(item.index.fqn, rank)
    return holders


def refusal(step: int, wrong: Sequence[Divergence], equal: int | None) -> Refused:
    """The error that names tensors, ranks, and the step at which all replicas were last seen equal."""
    return Refused(
        f"step {step}: {len(wrong)} tensors differ between replicas, though nothing says that they are sharded",
        facts=[*((d.key, str(d)) for d in wrong[:10]), ("last equal", last_equal(equal))],
        hint="a replica has diverged, or a tensor of one rank should be a DTensor or have a name of its own",
    )


def last_equal(step: int | None) -> str:
    """When replicas were last seen equal, in words."""
    return "never seen by this start" if step is None else f"step {step}"


def ranks(numbers: Iterable[int]) -> str:
    """Name some ranks: ``rank 2``, ``ranks 0, 1, 3``."""
    listed = list(numbers)
    shown = ", ".join(map(str, listed[:8])) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
    return f"rank{'s' if len(listed) > 1 else ''} {shown}"
