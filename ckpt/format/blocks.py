"""How an item's bytes are cut in blocks, and which blocks cover a slice. Pure.

An item is one tensor chunk or one value inside a data object: ``head | payload | tail``, where head and tail are
the frame that plain DCP expects around the payload. Blocks cut the payload every ``block_bytes``; the head
belongs to the first block and the tail to the last, so that every stored byte is under exactly one checksum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TARGET_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a data object, as the index records it.

    ``offsets`` and ``shape`` are the chunk's place and size in the logical tensor, in elements (None and () for a
    value); ``start`` and ``length`` are bytes in the object; ``payload_start`` is relative to ``start``.
    """

    fqn: str
    offsets: tuple[int, ...] | None
    shape: tuple[int, ...]
    dtype: str | None
    object: str
    start: int
    length: int
    payload_start: int
    payload_length: int
    block_bytes: int
    digests: tuple[str, ...]

    @property
    def block_count(self) -> int:
        """Number of blocks: at least one, so that the frame of an empty tensor is covered too."""
        return block_count(self.payload_length, self.block_bytes)

    def block_range(self, n: int) -> tuple[int, int]:
        """Bytes of block ``n`` in the object: (start, end), end exclusive."""
        lo = 0 if n == 0 else self.payload_start + n * self.block_bytes
        last = n == self.block_count - 1
        hi = self.length if last else self.payload_start + (n + 1) * self.block_bytes
        return self.start + lo, self.start + hi

    def blocks_covering(self, lo: int, hi: int) -> range:
        """The blocks that hold payload bytes [lo, hi); at least one block."""
        first = min(lo // self.block_bytes, self.block_count - 1)
        last = max(first, min(-(-hi // self.block_bytes), self.block_count) - 1)
        return range(first, last + 1)


def block_count(payload_length: int, block_bytes: int) -> int:
    """Blocks of a payload; one for an empty payload."""
    return max(1, -(-payload_length // block_bytes))


def block_bytes_for(shape: tuple[int, ...], itemsize: int, target: int = TARGET_BLOCK_BYTES) -> int:
    """Bytes a block: whole rows of the first dimension where a row fits into ``target``."""
    row = itemsize * math.prod(shape[1:]) if shape else itemsize
    return max(1, target // row) * row if 0 < row <= target else target


def row_span(shape: tuple[int, ...], itemsize: int, first_row: int, rows: int) -> tuple[int, int]:
    """Payload bytes [lo, hi) of ``rows`` rows of the first dimension of a contiguous chunk."""
    if not shape:
        return 0, itemsize
    row = itemsize * math.prod(shape[1:])
    return first_row * row, (first_row + rows) * row
