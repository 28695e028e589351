"""Accidents that happen to a tensor's bytes: what a fingerprint has to notice.

Each is a function of a tensor as ``uint8[*shape, itemsize]``, which it may overwrite, and a random generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Raw = NDArray[np.uint8]
Corruption = Callable[[Raw, Generator], "Raw | None"]
TOP = 0x80  # the sign of a little-endian float is in its last byte


def _element(x: Raw, g: Generator) -> tuple[int, ...]:
    return tuple(int(g.integers(n)) for n in x.shape[:-1])


def _box(x: Raw, g: Generator) -> tuple[slice, ...]:
    ends = [sorted(int(v) for v in g.choice(n + 1, 2, replace=False)) for n in x.shape[:-1]]
    return tuple(slice(a, b) for a, b in ends)


def _dim(x: Raw, g: Generator) -> int:
    return int(g.integers(x.ndim - 1))


def one_bit(x: Raw, g: Generator) -> None:
    x[_element(x, g)][int(g.integers(x.shape[-1]))] ^= 1 << int(g.integers(8))


def one_element(x: Raw, g: Generator) -> None:
    x[_element(x, g)] = g.integers(0, 256, x.shape[-1], np.uint8)


def sixteen_bytes(x: Raw, g: Generator) -> None:
    flat = x.reshape(-1)
    at = int(g.integers(flat.size))
    flat[at : at + 16] ^= g.integers(0, 256, flat[at : at + 16].size, np.uint8)


def two_top_bits(x: Raw, g: Generator) -> None:
    for _ in range(2):
        x[_element(x, g)][-1] ^= TOP


def many_top_bits(x: Raw, g: Generator) -> None:
    x[..., -1] ^= np.where(g.random(x.shape[:-1]) < g.choice([0.001, 0.1, 0.5]), TOP, 0).astype(np.uint8)


def many_bits(x: Raw, g: Generator) -> None:
    flat = x.reshape(-1)
    for at in g.integers(flat.size, size=int(g.integers(2, 40))):
        flat[at] ^= 1 << int(g.integers(8))


def swapped_elements(x: Raw, g: Generator) -> None:
    a, b = _element(x, g), _element(x, g)
    x[a], x[b] = x[b].copy(), x[a].copy()


def swapped_rows(x: Raw, g: Generator) -> None:
    v = np.moveaxis(x, _dim(x, g), 0)
    a, b = g.integers(len(v), size=2)
    v[[a, b]] = v[[b, a]]


def swapped_shards(x: Raw, g: Generator) -> None:
    v = np.moveaxis(x, _dim(x, g), 0)
    n = len(v) // int(g.integers(2, 5))
    if n:
        first, second = v[:n].copy(), v[n : 2 * n].copy()
        v[:n], v[n : 2 * n] = second, first


def all_signs(x: Raw, g: Generator) -> None:
    x[..., -1] ^= TOP


def signs_of_a_box(x: Raw, g: Generator) -> None:
    x[_box(x, g)][..., -1] ^= TOP


def zeroed_box(x: Raw, g: Generator) -> None:
    x[_box(x, g)] = 0


def a_box_from_elsewhere(x: Raw, g: Generator) -> None:
    box = _box(x, g)
    size = [s.stop - s.start for s in box]
    at = [int(g.integers(n - k + 1)) for n, k in zip(x.shape, size, strict=False)]
    x[box] = x[tuple(slice(a, a + k) for a, k in zip(at, size, strict=True))].copy()


def off_by_one(x: Raw, g: Generator) -> Raw:
    return np.roll(x, int(g.choice([-1, 1])), _dim(x, g))


def shifted_bytes(x: Raw, g: Generator) -> Raw:
    return np.roll(x.reshape(-1), int(g.integers(1, 9))).reshape(x.shape)


def other_endian(x: Raw, g: Generator) -> Raw:
    return x[..., ::-1]


def lossy_cast(x: Raw, g: Generator) -> None:
    x[..., : x.shape[-1] // 2] = 0


def transposed(x: Raw, g: Generator) -> Raw:
    return np.moveaxis(x, -2, 0).reshape(x.shape) if x.ndim > 2 else x[::-1]


def another_step(x: Raw, g: Generator) -> None:
    """Small steps everywhere, as an optimizer makes: the stale copy of a tensor."""
    x[..., 0] += g.integers(0, 3, x.shape[:-1], np.uint8)


ALL: dict[str, Corruption] = {
    f.__name__: f
    for f in (
        one_bit, one_element, sixteen_bytes, two_top_bits, many_top_bits, many_bits, swapped_elements, swapped_rows,
        swapped_shards, all_signs, signs_of_a_box, zeroed_box, a_box_from_elsewhere, off_by_one, shifted_bytes,
        other_endian, lossy_cast, transposed, another_step,
    )
}  # fmt: skip


def corrupt(kind: str, x: Raw, g: Generator) -> Raw | None:
    """A corrupted copy, or None where the accident changes nothing."""
    copy: Any = x.copy()
    result = ALL[kind](copy, g)
    after: Raw = copy if result is None else np.ascontiguousarray(result)
    return None if np.array_equal(after, x) else after
