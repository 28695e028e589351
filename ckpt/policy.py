"""What to keep, as values. Pure: a policy sees step numbers, newest first, and names those to keep.

All policies here have three properties, on which retention relies. The newest step is kept. What is kept of many
steps is also kept of a part of them, so that to prune again removes nothing more. A step that is not kept is not
kept either after newer ones have come, so that nothing is missed that an earlier prune has removed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ckpt.errors import Refused


class Keep(Protocol):
    """A rule of retention. The newest step is always kept, whatever a rule says."""

    def choose(self, steps: Sequence[int]) -> Sequence[int]:
        """Return the steps to keep, out of the committed ones (newest first)."""
        ...


class _Policy:
    """What the policies of this module share: ``a | b`` keeps what one of the two keeps."""

    __slots__ = ()

    def __or__(self, other: Keep) -> Union:
        return Union((*_parts(self), *_parts(other)))


@dataclass(frozen=True, slots=True)
class Latest(_Policy):
    """Keep the newest ``n`` committed steps. As text: ``latest:3``."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"Latest({self.n}): keep at least one step")

    def __str__(self) -> str:
        return f"latest:{self.n}"

    def choose(self, steps: Sequence[int]) -> Sequence[int]:
        """Return the first ``n``."""
        return steps[: self.n]


@dataclass(frozen=True, slots=True)
class EveryN(_Policy):
    """Keep the steps that are multiples of ``n``, for ever. As text: ``every:1000``."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"EveryN({self.n}): n is a number of steps, at least one")

    def __str__(self) -> str:
        return f"every:{self.n}"

    def choose(self, steps: Sequence[int]) -> Sequence[int]:
        """Return the newest, and the multiples."""
        return [s for i, s in enumerate(steps) if i == 0 or s % self.n == 0]


@dataclass(frozen=True, slots=True)
class Tail(_Policy):
    """Keep ever fewer steps the older they are: about ``base`` for each power of ``base`` of age. As text: ``tail:2``.

    At most ``base`` · (1 + log_base(newest)) + 1 steps. A step of age ``a`` (in steps, from the newest) shares a cell
    of the step axis as wide as the largest power of ``base`` up to ``a``; the oldest in each cell is kept.
    """

    base: int = 2

    def __post_init__(self) -> None:
        if self.base < 2:
            raise ValueError(f"Tail({self.base}): the base is a whole number from 2")

    def __str__(self) -> str:
        return f"tail:{self.base}"

    def choose(self, steps: Sequence[int]) -> Sequence[int]:
        """Return the newest, and the oldest of each cell."""
        kept = []
        for i, step in enumerate(steps):
            width = 1
            while width * self.base <= steps[0] - step:
                width *= self.base
            # cells of a power lie in cells of the next, so that a step does not lose its elder as it grows older
            if i == 0 or i + 1 == len(steps) or steps[i + 1] // width != step // width:
                kept.append(step)
        return kept


@dataclass(frozen=True, slots=True)
class Best(_Policy):
    """Keep the ``n`` steps of the lowest (``mode="max"``: highest) value, and the newest step.

    ``values()`` gives what is known now, by step, such as validation losses; a step without a number there is not
    kept by this policy. A step's value must not change once it is known. It has no text form: values come from code.

    Only a step that was saved can be kept for its value: call ``run.save()`` after ``run.metric()``, or give an
    ``every`` that divides the interval of the evaluations. "auto" saves at other steps than those.
    """

    values: Callable[[], Mapping[int, float]]
    n: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.n < 1 or self.mode not in ("min", "max"):
            raise ValueError(f'Best(n={self.n}, mode={self.mode!r}): n is at least one, mode "min" or "max"')

    def __str__(self) -> str:
        return f"best:{self.n}"

    def choose(self, steps: Sequence[int]) -> Sequence[int]:
        """Return the newest, and the best ``n``; of equal ones the older."""
        values, sign = self.values(), 1 if self.mode == "min" else -1
        known = [s for s in steps if s in values and not math.isnan(values[s])]
        best = set(sorted(known, key=lambda s: (sign * values[s], s))[: self.n])
        return [s for i, s in enumerate(steps) if i == 0 or s in best]


@dataclass(frozen=True, slots=True)
class Union(_Policy):
    """Keep what at least one of the policies keeps; ``a | b`` makes one. As text: ``latest:3,every:1000``."""

    policies: tuple[Keep, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.policies))

    def choose(self, steps: Sequence[int]) -> Sequence[int]:
        """Return what any of them keeps."""
        kept = {s for policy in self.policies for s in policy.choose(steps)}
        return [s for s in steps if s in kept]


def reasons(keep: Keep, steps: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """Why each kept step is kept: "newest", and the policies, as text, that keep it."""
    why: dict[int, tuple[str, ...]] = dict.fromkeys(steps[:1], ("newest",))
    for policy in _parts(keep):
        for step in policy.choose(steps):
            why[step] = (*why.get(step, ()), str(policy))
    return why


def parse(text: str) -> Keep:
    """The policy of a text such as ``latest:3,every:1000,tail:2``: the union of its parts. Raises ``Refused``."""
    kinds: dict[str, Callable[[int], Keep]] = {"latest": Latest, "every": EveryN, "tail": Tail}
    parts: list[Keep] = []
    for part in text.split(","):
        name, _, number = part.strip().partition(":")
        try:
            if not (number.isascii() and number.isdigit()):
                raise ValueError(f"{part.strip()!r} is not NAME:NUMBER")
            parts.append(kinds[name](int(number)))
        except (KeyError, ValueError) as e:
            what = f"no policy is called {name!r}" if isinstance(e, KeyError) else str(e)
            raise Refused(f"what to keep cannot be read: {what}",
                          hint="--keep latest:3,every:1000,tail:2 takes any of the three") from None  # fmt: skip
    return parts[0] if len(parts) == 1 else Union(tuple(parts))


def _parts(keep: Keep | _Policy) -> tuple[Keep, ...]:
    return keep.policies if isinstance(keep, Union) else (keep,)  # type: ignore[return-value]
