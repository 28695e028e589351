"""Boxes of a logical tensor: whether they make it up, and how it is cut in pieces that are small enough. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import product

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes, in elements
_MANY = 6  # dimensions in which one tensor is sharded


def tiles(shape: Sequence[int], boxes: Collection[Box]) -> bool:
    """Whether boxes cover ``shape`` exactly once.

    A sum of boxes' indicator functions is that of the whole if their corners, with alternating signs, are the same.
    """
    if any(len(o) != len(shape) or len(n) != len(shape) for o, n in boxes):
        return False
    if any(i < 0 or m < 0 or i + m > s for o, n in boxes for i, m, s in zip(o, n, shape, strict=True)):
        return False
    solid = [(o, n) for o, n in boxes if 0 not in n]
    if 0 in shape or sum(math.prod(n) for _, n in solid) != math.prod(shape):
        return 0 in shape and not solid
    cut = [d for d in range(len(shape)) if any(n[d] != shape[d] for _, n in solid)]
    if len(cut) > _MANY:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, (offsets, sizes) in [*((1, b) for b in solid), (-1, ((0,) * len(shape), tuple(shape)))]:
        for ends in product((0, 1), repeat=len(cut)):
            at = tuple(offsets[d] + e * sizes[d] for d, e in zip(cut, ends, strict=True))
            corners[at] += sign * (-1) ** sum(ends)
    return not any(corners.values())


def pieces(shape: Sequence[int], itemsize: int, limit: int) -> Iterator[Box]:
    """Cut a tensor, in row-major order, in boxes of at most ``limit`` bytes whose elements are consecutive.

    At least one box, also of an empty tensor or a scalar; one element may be larger than ``limit``.
    """
    dims = tuple(shape)
    total = itemsize * math.prod(dims)
    if total <= limit or not dims:
        yield (0,) * len(dims), dims
        return
    row = total // dims[0]
    if row <= limit:
        step = max(1, limit // row)
        for at in range(0, dims[0], step):
            yield (at, *(0,) * (len(dims) - 1)), (min(step, dims[0] - at), *dims[1:])
    else:
        for at in range(dims[0]):
            for offsets, sizes in pieces(dims[1:], itemsize, limit):
                yield (at, *offsets), (1, *sizes)


def common(a: Box, b: Box) -> Box | None:
    """The part that two boxes share, or None; a scalar shares itself."""
    low = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    high = tuple(min(x + n, y + m) for x, n, y, m in zip(a[0], a[1], b[0], b[1], strict=True))
    sizes = tuple(h - x for x, h in zip(low, high, strict=True))
    return None if any(n <= 0 for n in sizes) else (low, sizes)


def place_in(inner: Box, outer: Box) -> int:
    """Row-major number of the first element of ``inner`` within ``outer``, which holds it."""
    at = 0
    for o, start, n in zip(inner[0], outer[0], outer[1], strict=True):
        at = at * n + o - start
    return at
