"""Blocks: every stored byte is in exactly one, and a slice needs exactly those that hold its bytes."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from ckpt.format.blocks import Item, block_bytes_for, block_count, row_span

sizes = st.integers(0, 2000)


@st.composite
def items(draw: st.DrawFn) -> Item:
    head, payload, tail = draw(sizes), draw(sizes), draw(st.integers(0, 300))
    block = draw(st.integers(1, 2500))
    return Item(
        fqn="w",
        offsets=(0,),
        shape=(payload,),
        dtype="uint8",
        object="__0_0.distcp",
        start=draw(sizes),
        length=head + payload + tail,
        payload_start=head,
        payload_length=payload,
        block_bytes=block,
        digests=("0" * 32,) * block_count(payload, block),
    )


@given(items())
def test_every_byte_is_in_exactly_one_block(item: Item) -> None:
    at = item.start
    for lo, hi in map(item.block_range, range(item.block_count)):
        assert lo == at
        assert lo <= hi
        at = hi
    assert at == item.start + item.length


@given(items(), st.data())
def test_covering_blocks_are_sufficient_and_minimal(item: Item, data: st.DataObject) -> None:
    lo = data.draw(st.integers(0, item.payload_length))
    hi = data.draw(st.integers(lo, item.payload_length))
    blocks = item.blocks_covering(lo, hi)
    assert len(blocks) >= 1
    assert 0 <= blocks[0] <= blocks[-1] < item.block_count
    first, last = item.start + item.payload_start + lo, item.start + item.payload_start + hi
    if lo < hi:
        needed = [
            n for n in range(item.block_count) if max(item.block_range(n)[0], first) < min(item.block_range(n)[1], last)
        ]
        assert list(blocks) == needed


@given(st.lists(st.integers(0, 40), max_size=4), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 5000))
def test_blocks_are_whole_rows_where_a_row_fits(shape: list[int], itemsize: int, target: int) -> None:
    block = block_bytes_for(tuple(shape), itemsize, target)
    row = itemsize * math.prod(shape[1:]) if shape else itemsize
    assert block >= 1
    assert block <= target or (row > target and block == target) or row == 0
    if 0 < row <= target:
        assert block % row == 0
        assert block + row > target


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.sampled_from([1, 2, 4, 8]), st.data())
def test_row_span_is_the_bytes_of_the_rows(shape: list[int], itemsize: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, shape[0] - 1))
    rows = data.draw(st.integers(1, shape[0] - first))
    lo, hi = row_span(tuple(shape), itemsize, first, rows)
    elements = [i for i in range(math.prod(shape)) if first <= i // math.prod(shape[1:]) < first + rows]
    assert (lo, hi) == (elements[0] * itemsize, (elements[-1] + 1) * itemsize)


def test_a_scalar_is_one_row() -> None:
    assert row_span((), 8, 0, 1) == (0, 8)


@given(st.integers(0, 1 << 62), st.integers(1, 1 << 62))
@example((1 << 60) + 1, 1)
def test_block_count_is_exact_for_any_size(payload: int, block: int) -> None:
    n = block_count(payload, block)
    assert (n - 1) * block < max(payload, 1) <= n * block
