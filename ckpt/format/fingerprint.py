"""The fingerprint's arithmetic: where a byte stands, what it weighs, how sums become digests. Pure.

``ckpt/FINGERPRINT.md`` is the definition. A tensor is a matrix of bytes; 16 weighted sums of it, modulo 2^64, add up
over any partition in boxes; a digest is taken of the sums. :mod:`ckpt.engine.fingerprint` sums tensors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt.format.digest import digest as xxh3

PREFIX = "fp1:"  # of every digest: a reader that does not know it says "not verified", not "damaged"
LANES = 16
GROUP = 8  # lanes that share a row's weight
ROW_BYTES = 16384  # a row is at least so long where the tensor is
MAX_ROW_BYTES = 65536  # and never longer: |byte| and |weight| are at most 2^7, so that a row's sums fit into 31 bits
LIFT = 129  # added to every byte, as a signed number: no byte counts for nothing
COLUMN_SEED, ROW_SEED = 0x243F6A8885A308D3, 0x13198A2E03707344  # the first fraction bits of pi
GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64
_U64 = (1 << 64) - 1
_WIRE = struct.Struct(f"<{1 + LANES}Q")

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes, in elements


@dataclass(frozen=True, slots=True)
class Partial:
    """What some boxes of one tensor add to its fingerprint. ``Partial()`` is that of no box.

    ``a + b`` is associative and commutative; ``sum(parts, Partial())`` of a partition is the whole tensor's.
    """

    elements: int = 0
    sums: tuple[int, ...] = (0,) * LANES

    def __add__(self, other: Partial) -> Partial:
        return Partial(
            self.elements + other.elements, tuple((a + b) & _U64 for a, b in zip(self.sums, other.sums, strict=True))
        )

    def encode(self) -> bytes:
        """136 bytes that can travel between ranks."""
        return _WIRE.pack(self.elements, *self.sums)

    @classmethod
    def decode(cls, data: bytes) -> Partial:
        """Read back what ``encode`` gave. Raises ``ValueError`` for anything that is not 136 bytes."""
        if len(data) != _WIRE.size:
            raise ValueError(f"a partial fingerprint has {_WIRE.size} bytes, not {len(data)}")
        elements, *sums = _WIRE.unpack(data)
        return cls(elements, tuple(sums))


def digest(dtype: str, shape: Sequence[int], partial: Partial) -> str:
    """The fingerprint of a whole tensor; ``dtype`` is named as in manifests: ``float32``.

    Partials that do not cover the tensor exactly once give another one than it has.
    """
    head = f"torchrelay fingerprint 1\n{dtype}\n{','.join(map(str, shape))}\n"
    return PREFIX + xxh3(head.encode(), partial.encode())


def whole(digests: Mapping[str, str]) -> str:
    """The fingerprint of a state: of all names and their tensors' fingerprints, in whatever order."""
    lines = (f"{len(name.encode())}:{name}={digests[name]}\n".encode() for name in sorted(digests))
    return PREFIX + xxh3(b"torchrelay state 1\n", *lines)


# --- the definition -------------------------------------------------------------------------------------------


def rows_of(shape: Sequence[int], itemsize: int) -> tuple[int, int]:
    """(s, f): a row holds the dimensions after ``s`` and ``f`` consecutive indices of dimension ``s``.

    Row number: dimensions before ``s`` and ``i_s // f``, flattened; column: ``i_s % f`` and the dimensions after.
    ``shape`` has a dimension and no zero.
    """
    width = ROW_BYTES // itemsize
    inner = 1
    for s in range(len(shape) - 1, -1, -1):
        if inner * shape[s] >= width:
            return s, shape[s] if inner * shape[s] * itemsize <= MAX_ROW_BYTES else -(-width // inner)
        inner *= shape[s]
    return 0, shape[0]


def splitmix64(seed: int, n: int) -> int:
    """The n-th number of a stream."""
    z = (seed + (n + 1) * GAMMA) & _U64
    z = ((z ^ (z >> 30)) * MIX_1) & _U64
    z = ((z ^ (z >> 27)) * MIX_2) & _U64
    return z ^ (z >> 31)


def column_weight(position: int, lane: int) -> int:
    """The weight, -128…127, of the byte at a position of a row; odd where lane = position mod 16, even elsewhere."""
    n = LANES * position + lane
    byte = splitmix64(COLUMN_SEED, n // 8) >> 8 * (n % 8) & 0xFE | (lane == position % LANES)
    return byte - 256 if byte > 127 else byte


def row_weight(row: int, lane: int) -> int:
    """The weight of a row in one lane, odd; lanes 0–7 share one, 8–15 another."""
    return splitmix64(ROW_SEED, 2 * row + lane // GROUP) | 1


# --- many ranks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Differing:
    """A box of which replicas differ; ``ranks`` are those that do not hold what most do (all, where none has most)."""

    name: str
    box: Box
    ranks: tuple[int, ...]


def merge(
    reports: Iterable[Mapping[str, Mapping[Box, Partial]]],
) -> tuple[dict[str, Partial], list[Differing]]:
    """Add up what the ranks report, a box that several hold once; and name the boxes of which replicas differ.

    ``reports[r][name][box]`` is rank r's. The sum takes what most hold. Boxes that overlap without being equal are
    all added: the number of elements then shows it.
    """
    held: dict[str, dict[Box, dict[Partial, list[int]]]] = {}
    for rank, report in enumerate(reports):
        for name, boxes in report.items():
            for box, part in boxes.items():
                held.setdefault(name, {}).setdefault(box, {}).setdefault(part, []).append(rank)
    total: dict[str, Partial] = {}
    differing = []
    for name, of_name in held.items():
        for box, versions in of_name.items():
            first, *others = sorted(versions.items(), key=lambda v: -len(v[1]))
            total[name] = total.get(name, Partial()) + first[0]
            if others:
                agreed = len(first[1]) > len(others[0][1])
                minority = [r for _, ranks in (others if agreed else [first, *others]) for r in ranks]
                differing.append(Differing(name, box, tuple(sorted(minority))))
    return total, differing


def covers(shape: Sequence[int], partial: Partial) -> bool:
    """Whether as many elements were summed as the tensor has."""
    return partial.elements == math.prod(shape)
