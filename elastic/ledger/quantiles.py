"""Quantiles of step times that add up over rows, ranks and restarts: counts in buckets of equal ratio. Pure.

Bucket ``i`` holds the values in (γ^(i-1), γ^i]; any quantile comes back within ``ERROR`` of the true one. Where times
spread over more than ``BUCKETS`` buckets, γ is squared and pairs of buckets become one, which two summaries of
different γ can do, too, before they are added (DDSketch, Masson et al. 2019, with the uniform collapse of Epicoco et
al. 2020). So a row of the ledger stays below a kilobyte, whatever it covers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

ERROR = 0.004
BUCKETS = 72
_GAMMA = math.log1p(2 * ERROR / (1 - ERROR))
_LEAST_S = 1e-9


class Quantiles:
    """A distribution of positive numbers; ``str`` and ``parse`` are its form in the ledger."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._counts: dict[int, int] = {}
        self._level = 0
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        """Count one value; what is not above zero counts as a nanosecond."""
        bucket = math.ceil(math.log(max(value, _LEAST_S)) / _GAMMA / (1 << self._level) - 1e-9)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        if len(self._counts) > BUCKETS:
            self._collapse()

    def merge(self, other: Quantiles) -> None:
        """Add all values of ``other``."""
        while self._level < other._level:
            self._collapse()
        shift = self._level - other._level
        for bucket, count in other._counts.items():
            mine = -(-bucket >> shift)
            self._counts[mine] = self._counts.get(mine, 0) + count
        while len(self._counts) > BUCKETS:
            self._collapse()

    @property
    def n(self) -> int:
        """How many values were counted."""
        return sum(self._counts.values())

    @property
    def error(self) -> float:
        """How far a quantile may be off, relative to it."""
        gamma = math.exp(_GAMMA * (1 << self._level))
        return (gamma - 1) / (gamma + 1)

    def at(self, share: float) -> float | None:
        """The value below which ``share`` of all lie, ``0.5`` for the median; None for no values."""
        rank, seen = max(1, math.ceil(share * self.n)), 0
        gamma = math.exp(_GAMMA * (1 << self._level))
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                return 2 * math.exp(bucket * _GAMMA * (1 << self._level)) / (1 + gamma)
        return None

    def counts(self) -> Mapping[float, int]:
        """How many values lie around each value, from the least up."""
        gamma = math.exp(_GAMMA * (1 << self._level))
        width = _GAMMA * (1 << self._level)
        return {2 * math.exp(b * width) / (1 + gamma): n for b, n in sorted(self._counts.items())}

    def __str__(self) -> str:
        """``level;bucket:count,+gap:count…``: the first bucket, then distances."""
        parts, before = [], 0
        for bucket in sorted(self._counts):
            count = self._counts[bucket]
            parts.append(f"{bucket - before}" + (f":{count}" if count > 1 else ""))
            before = bucket
        return f"{self._level};{','.join(parts)}"

    @classmethod
    def parse(cls, text: str) -> Quantiles:
        """The distribution of a row; ``ValueError`` for text that is none."""
        out = cls()
        level, _, rest = text.partition(";")
        out._level = int(level)
        if not 0 <= out._level <= 40:
            raise ValueError(f"no distribution: {text[:40]}")
        bucket = 0
        for part in rest.split(",") if rest else ():
            gap, _, count = part.partition(":")
            bucket += int(gap)
            if (many := int(count or "1")) < 1 or abs(bucket) > 1 << 20:
                raise ValueError(f"no distribution: {text[:40]}")
            out._counts[bucket] = out._counts.get(bucket, 0) + many
        return out

    def _collapse(self) -> None:
        self._level += 1
        old, self._counts = self._counts, {}
        for bucket, count in old.items():
            half = -(-bucket >> 1)
            self._counts[half] = self._counts.get(half, 0) + count
