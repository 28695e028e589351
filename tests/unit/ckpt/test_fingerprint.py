"""The fingerprint: the same over any partition, frozen by golden values, and changed by every accident."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.engine import fingerprint as engine
from ckpt.engine import torchapi
from ckpt.engine.fingerprint import boxes, float32_mm, partial, product_for, report
from ckpt.engine.planner import dtype_name
from ckpt.errors import Refused
from ckpt.format.fingerprint import (
    LANES,
    MAX_ROW_BYTES,
    PREFIX,
    Partial,
    column_weight,
    covers,
    digest,
    merge,
    row_weight,
    rows_of,
    whole,
)
from tests import corruptions

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from a second thread, and wait long for it on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


def of_bytes(raw: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """uint8[*shape, itemsize] as a tensor."""
    flat = torch.from_numpy(np.ascontiguousarray(raw).reshape(-1))
    return flat.view(dtype).reshape(raw.shape[:-1])


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    limit = 2 if dtype is torch.bool else 256
    raw = np.random.default_rng(seed).integers(0, limit, (*shape, dtype.itemsize), np.uint8)
    return of_bytes(raw, dtype)


def whole_partial(x: torch.Tensor) -> Partial:
    return partial(x, x.shape, (0,) * x.dim())


def by_the_book(x: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]) -> Partial:
    """The definition in ckpt/FINGERPRINT.md, byte by byte, in Python's integers."""
    z = x.element_size()
    raw = x.contiguous().reshape(-1).view(torch.int8).tolist()
    shape, offsets, sizes = shape or (1,), offsets or (0,), tuple(x.shape) or (1,)
    s, fold = rows_of(shape, z)
    sums = [0] * LANES
    for n, local in enumerate(itertools.product(*map(range, sizes))):
        at = [i + o for i, o in zip(local, offsets, strict=True)]
        row, column = 0, at[s] % fold
        for i, size in zip(at[:s], shape[:s], strict=True):
            row = row * size + i
        row = row * -(-shape[s] // fold) + at[s] // fold
        for i, size in zip(at[s + 1 :], shape[s + 1 :], strict=True):
            column = column * size + i
        for b, k in itertools.product(range(z), range(LANES)):
            sums[k] += row_weight(row, k) * column_weight(column * z + b, k) * (raw[n * z + b] + 129)
    return Partial(x.numel(), tuple(v % 2**64 for v in sums))


# --- the definition -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "shape", "sizes", "offsets"),
    [
        (torch.float32, (), (), ()),
        (torch.float32, (7, 5), (7, 5), (0, 0)),
        (torch.bfloat16, (30000,), (40,), (8180,)),  # begins in one fold and ends in the next
        (torch.int8, (3, 5, 4000), (2, 2, 9), (1, 3, 3990)),
        (torch.complex128, (3, 1100), (2, 3), (1, 1020)),
        (torch.float64, (6000, 2), (10, 1), (1020, 1)),  # narrow: folded by rows, and cut by columns
        (torch.float8_e5m2, (2, 90000), (2, 20), (0, 16380)),  # wider than a row may be
        (torch.int32, (2, 3, 2, 5000), (1, 2, 2, 3), (1, 1, 0, 4094)),
        (torch.int64, (1 << 40, 3, 1 << 12), (2, 1, 4), ((1 << 40) - 2, 2, 4092)),
        (torch.uint8, (1 << 61,), (33,), ((1 << 61) - 33,)),
    ],
)
def test_it_is_what_the_book_says(dtype: torch.dtype, shape: Any, sizes: Any, offsets: Any) -> None:
    x = random(sizes, dtype, 5)
    assert partial(x, shape, offsets) == by_the_book(x, shape, offsets)


GOLDEN = {
    ("float32", ()): "fp1:2d7983f307eaf9b8f832dc4e1a999f9f",
    ("float32", (0, 3)): "fp1:89b27271bc6d26545fcb97c6914244bd",
    ("bool", (3,)): "fp1:a1d36756d1bf9f15f804f2b942891683",
    ("bfloat16", (20000,)): "fp1:12e00efd22e976445295e2b1ecc02321",
    ("float32", (5, 7)): "fp1:20a45bc66a8c2e419f83843d8a4e48ce",
    ("int8", (3, 70000)): "fp1:7660aa010f051f4a80118ff5abecb28c",
    ("float64", (2, 3, 1500)): "fp1:d686c2f03a0723676525a23335cb20e4",
    ("complex128", (2100, 2)): "fp1:ed5590c1bb2dbe5c2349e9eb3cc3d10c",
    ("float8_e4m3fn", (4, 3, 5, 700)): "fp1:9848c8f2b9bd2ad0b7225f617ea7440f",
    ("int64", (3, 9000)): "fp1:46fbde1d02e50bd1388922d1b225c133",
}


def test_digests_never_change() -> None:
    for (name, shape), want in GOLDEN.items():
        dtype = getattr(torch, name)
        n = math.prod(shape) * dtype.itemsize
        i = np.arange(n, dtype=np.uint64)
        raw = ((i * i * 7 + i * 3 + 1) >> np.uint64(3)).astype(np.uint8).reshape(*shape, dtype.itemsize)
        raw &= 1 if name == "bool" else 255
        assert digest(name, shape, whole_partial(of_bytes(raw, dtype))) == want, (name, shape)


def test_the_tables_never_change() -> None:
    table = engine._table(CPU)
    assert table.shape == (MAX_ROW_BYTES, LANES)
    for p in (0, 1, 17, 4095, 65535):
        assert table[p].tolist() == [column_weight(p, k) for k in range(LANES)]
    assert [column_weight(0, k) for k in range(8)] == [33, -94, -66, 74, -98, -10, -80, 44]
    want = [4302424893936767675, 4641467591620251777, 15704920272022891911]
    assert [row_weight(0, 0), row_weight(0, 8), row_weight(1 << 50, 15)] == want
    weights, total = engine._row_weights(CPU, ((3, 5, 11),), 1, 3, 4, 2, 4)
    rows = [(5 + lead) * 4 + fold for lead in (1, 2) for fold in (2, 3)]
    assert [[v % 2**64 for v in w] for w in weights.tolist()] == [[row_weight(r, 0), row_weight(r, 8)] for r in rows]
    assert total.tolist() == weights.sum(0).tolist()


def test_partials_travel() -> None:
    p = whole_partial(random((40, 3), torch.float32, 1))
    assert Partial.decode(p.encode()) == p
    assert len(p.encode()) == 136
    with pytest.raises(ValueError, match="136 bytes"):
        Partial.decode(b"short")
    assert Partial() + p == p + Partial() == p


def test_a_digest_is_of_dtype_shape_count_and_sums() -> None:
    p = Partial(6, tuple(range(LANES)))
    others = [
        digest("float32", (2, 3), p), digest("int32", (2, 3), p), digest("float32", (3, 2), p),
        digest("float32", (6,), p), digest("float32", (2, 3), Partial(5, p.sums)),
        *(digest("float32", (2, 3), Partial(6, (*p.sums[:k], 99, *p.sums[k + 1 :]))) for k in range(LANES)),
    ]  # fmt: skip
    assert len(set(others)) == len(others)
    assert all(d.startswith(PREFIX) and len(d) == len(PREFIX) + 32 for d in others)


def test_a_state_is_its_names_and_digests_in_any_order() -> None:
    state = {"a": "fp1:0", "b": "fp1:1", "c=fp1:2\n": "fp1:2"}
    assert whole(state) == whole(dict(reversed(state.items())))
    ab = {"a": "fp1:0", "b": "fp1:1"}
    others = [ab, {"a": "fp1:1", "b": "fp1:0"}, {"a": "fp1:0"}, {}, {"a=fp1:0\nb": "fp1:1"}]
    assert len({whole(s) for s in [state, *others]}) == 6


def test_what_has_no_bytes_is_refused() -> None:
    for x in (torch.empty(3, device="meta"), torch.eye(3).to_sparse(), torch.zeros(3).to_mkldnn()):
        with pytest.raises(Refused, match="no plain bytes"):
            partial(x, x.shape, (0,) * x.dim())
    for shape, offsets in (((3,), (1,)), ((3,), (-1,)), ((3, 3), (0,)), ((9, 9), (0, 0))):
        with pytest.raises(ValueError, match="not inside"):
            partial(torch.zeros(3), shape, offsets)


# --- any partition --------------------------------------------------------------------------------------------


@st.composite
def shapes(draw: st.DrawFn, itemsize: int) -> tuple[int, ...]:
    """Up to four dimensions, one of them long enough for several rows."""
    shape = draw(st.lists(st.integers(1, 7), max_size=3))
    room = 300_000 // (math.prod(shape) * itemsize)
    shape.insert(draw(st.integers(0, len(shape))), draw(st.integers(0, max(1, room))))
    return tuple(shape)


def partition(draw: st.DrawFn, offsets: list[int], sizes: list[int], depth: int) -> Iterator[tuple[list[int], Any]]:
    dim = draw(st.integers(0, len(sizes) - 1))
    if not depth or sizes[dim] < 2:
        yield offsets, sizes
        return
    at = draw(st.integers(1, sizes[dim] - 1))
    for start, size in ((0, at), (at, sizes[dim] - at)):
        o, s = offsets.copy(), sizes.copy()
        o[dim] += start
        s[dim] = size
        yield from partition(draw, o, s, depth - 1)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_the_sum_over_any_partition_is_the_whole(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(shapes(dtype.itemsize))
    x = random(shape, dtype, data.draw(st.integers(0, 9)))
    order = data.draw(st.permutations(range(len(shape))))
    if x.is_floating_point() or dtype in (torch.int32, torch.int64):  # some dtypes cannot be copied in strides
        x = x.permute(order).contiguous().permute([order.index(d) for d in range(len(shape))])
    want = whole_partial(x)
    parts = list(partition(data.draw, [0] * len(shape), list(shape), data.draw(st.integers(0, 4))))
    product = data.draw(st.sampled_from([None, float32_mm]))
    small = data.draw(st.sampled_from([None, 100, 70_000]))
    with pytest.MonkeyPatch.context() as patch:
        if small:
            for limit in ("CPU_CHUNK_BYTES", "COPY_BYTES"):
                patch.setattr(engine, limit, small)
            patch.setattr(engine, "MAX_ROWS", 3)
        got = [
            partial(x[tuple(slice(a, a + n) for a, n in zip(o, s, strict=True))], shape, o, product=product)
            for o, s in data.draw(st.permutations(parts))
        ]
    assert sum(got, Partial()) == want
    assert covers(shape, want)


def test_every_dtype_by_its_bits() -> None:
    for dtype in DTYPES:
        x = random((5, 7), dtype, 3)
        assert whole_partial(x) == by_the_book(x, (5, 7), (0, 0)), dtype
        assert digest(dtype_name(dtype), x.shape, whole_partial(x)) != digest("other", x.shape, whole_partial(x))
    z = random((6,), torch.complex64, 1)
    assert whole_partial(z.conj()) == whole_partial(z.conj().resolve_conj()) != whole_partial(z)
    zero = torch.zeros(3)
    assert whole_partial(zero) != whole_partial(-zero)


def test_the_caller_s_modes_do_not_matter() -> None:
    x = random((70, 5000), torch.float32, 3)
    want = whole_partial(x)
    caches = (engine._table, engine._columns, engine._row_weights, product_for)
    modes = [torch.inference_mode(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.enable_grad()]
    for mode in modes:
        for cache in caches:
            cache.cache_clear()
        with mode:
            assert partial(x, x.shape, (0, 0)) == partial(x, x.shape, (0, 0), product=float32_mm) == want
    assert whole_partial(torch.nn.Parameter(x)) == want


def test_a_report_holds_every_box_and_replicas_are_counted_once() -> None:
    x, step = random((10, 4), torch.float32, 1), torch.tensor(3.0)
    state = {"w": x, "step": step, "none": torch.empty(0, 4)}
    one = report(state)
    assert one["w"] == {((0, 0), (10, 4)): whole_partial(x)}
    split = [
        {"w": {((0, 0), (6, 4)): partial(x[:6], x.shape, (0, 0))}, "step": one["step"]},
        {"w": {((6, 0), (4, 4)): partial(x[6:], x.shape, (6, 0))}, "step": one["step"], "none": one["none"]},
    ]
    assert merge([one]) == merge([one, one, one]) == merge([split[0], split[1]])
    assert merge([one])[1] == []
    assert [list(boxes(t)) for t in state.values()] == [[(t, (0,) * t.dim())] for t in state.values()]


def test_the_replica_that_differs_is_named() -> None:
    good, bad = report({"w": torch.ones(4)}), report({"w": torch.tensor([1, 1, 1, 2.0])})
    total, (found,) = merge([good, good, bad, good])
    assert (found.name, found.box, found.ranks) == ("w", ((0,), (4,)), (2,))
    assert total == merge([good])[0]
    assert merge([good, bad])[1][0].ranks == (0, 1)  # one against one: nobody is right


# --- the two products -----------------------------------------------------------------------------------------


def test_both_products_give_the_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    for m, k in ((1, 1), (3, 7), (33, 1025), (5, 4096), (2, MAX_ROW_BYTES)):
        for low, high in ((-128, 128), (100, 128), (-128, -120), (127, 128), (-128, -127)):
            a = torch.randint(low, high, (m, k), dtype=torch.int8, generator=g)
            b = torch.randint(low, high, (k, LANES), dtype=torch.int8, generator=g)
            want = a.long() @ b.long()
            for product in (float32_mm, torchapi.int8_mm, torchapi._int8_mm_aligned):
                assert torch.equal(product(a, b).long(), want), (product, m, k, low)
    x = torch.randint(-128, 128, (50, 112), dtype=torch.int8, generator=g)
    real = torch._int_mm

    def strict(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # what CUDA refuses
        assert a.shape[0] > 16
        assert a.shape[1] % 8 == b.shape[1] % 8 == a.stride(0) % 16 == a.data_ptr() % 16 == b.data_ptr() % 16 == 0
        return real(a, b)

    monkeypatch.setattr(torch, "_int_mm", strict)
    for rows, columns in ((slice(50), slice(100)), (slice(1, 30), slice(3, 77)), (slice(2, 3), slice(16, 32)),
                          (slice(50), slice(8, 104))):  # fmt: skip
        left, right = x[rows, columns], b[: x[0, columns].numel()]
        assert torch.equal(torchapi._int8_mm_aligned(left, right).long(), left.long() @ right.long())


def test_a_product_that_saturates_or_is_not_there_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def saturating(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # what VPMADDUBSW does: pairs as int16
        pairs = (a.int()[:, 0::2, None] + 128) * b.int()[0::2] + (a.int()[:, 1::2, None] + 128) * b.int()[1::2]
        return pairs.clamp(-(1 << 15), (1 << 15) - 1).sum(1) - 128 * b.int().sum(0)

    def missing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    assert engine._is_exact(torchapi.int8_mm, CPU)
    for bad in (saturating, missing):
        monkeypatch.setattr(engine, "int8_mm", bad)
        product_for.cache_clear()
        assert product_for(CPU) is float32_mm
    monkeypatch.setattr(engine, "float32_mm", bad)
    product_for.cache_clear()
    with pytest.raises(Refused, match="copy on the CPU"):
        product_for(CPU)
    product_for.cache_clear()


def test_torch_still_has_an_int8_product() -> None:
    """Without it everything works, at a third of the speed."""
    a, b = torch.full((17, 8), -128, dtype=torch.int8), torch.full((8, 16), 127, dtype=torch.int8)
    assert torch._int_mm(a, b).dtype == torch.int32
    assert torch._int_mm(a, b).unique().tolist() == [-128 * 127 * 8]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("product", [None, float32_mm])
def test_a_device_gives_the_same(product: Any) -> None:
    for dtype, shape in itertools.product(DTYPES, [(), (3,), (50_001,), (40, 3000), (5, 6, 7, 9)]):
        x = random(shape, dtype, 2)
        assert partial(x.cuda(), shape, (0,) * len(shape), product=product) == whole_partial(x), (dtype, shape)


def test_extra_memory_is_bounded() -> None:
    """A transposed view of 128 MiB, and a narrow box, cost no more than the docstring says."""
    code = """
import sys, torch
from ckpt.engine.fingerprint import partial
def kib(name): return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(name))
torch.set_num_threads(1)
x = torch.ones(8192, 4096)
partial(x[:9, :9].t(), (9, 9), (0, 0))
before = kib("VmRSS")
for y in (x.t(), x[:, 5:6], x[:, :4090], x.view(-1)[3:]):
    partial(y, y.shape, (0,) * y.dim())
partial(x[0].view(-1, 1).expand(-1, 2)[:, 1:].repeat(20, 1), (1 << 40, 1 << 40), (7, 7))
print((kib("VmHWM") - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64


# --- what it notices ------------------------------------------------------------------------------------------


def test_sixteen_neighbouring_bytes_are_seen_for_certain() -> None:
    """The weights of any 16 consecutive bytes are odd in one lane each, even in all others: an odd determinant.

    So the map from their change to the change of the sums is one to one, modulo 2^64, for every odd row weight.
    """
    table = engine._table(CPU)
    assert torch.equal((table & 1).view(-1, 16, 16), torch.eye(16, dtype=torch.int8).expand(4096, 16, 16))
    assert all(row_weight(r, k) & 1 for r in range(100) for k in range(LANES))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.complex64], ids=dtype_name)
def test_every_bit_of_every_element(dtype: torch.dtype) -> None:
    x = random((3, 4), dtype, 9)
    raw = np.ascontiguousarray(x.reshape(-1).view(torch.uint8).numpy()).reshape(3, 4, -1)
    seen = {whole_partial(x)}
    for at, bit in itertools.product(range(raw.size), range(8)):
        changed = raw.copy()
        changed.reshape(-1)[at] ^= 1 << bit
        seen.add(whole_partial(of_bytes(changed, dtype)))
    assert len(seen) == 1 + raw.size * 8  # and no two of them alike


def test_every_value_of_an_element() -> None:
    x = torch.zeros(2, 3, dtype=torch.int16)
    seen = set()
    for v in range(-(1 << 15), 1 << 15, 37):
        x[1, 2] = v
        seen.add(whole_partial(x))
    assert len(seen) == len(range(-(1 << 15), 1 << 15, 37))


def test_every_pair_of_top_bits() -> None:
    """Where sums of whole elements modulo 2^n lose all but one bit."""
    x = random((8, 8), torch.float32, 4)
    raw = x.view(torch.uint8).numpy().reshape(64, 4)
    want = whole_partial(x)
    for a, b in itertools.combinations(range(64), 2):
        changed = raw.copy()
        changed[[a, b], 3] ^= 0x80
        assert whole_partial(of_bytes(changed.reshape(8, 8, 4), torch.float32)) != want, (a, b)


SHAPES = [(40,), (9000,), (6, 5), (12, 5000), (7, 3, 11), (3, 4, 2, 5), (6, 2, 1500, 3), (2, 20_000)]


@pytest.mark.parametrize("kind", corruptions.ALL)
def test_each_kind_of_accident_is_seen(kind: str) -> None:
    g = np.random.default_rng(list(kind.encode()))
    tried = 0
    for shape, dtype in itertools.product(SHAPES, [torch.float32, torch.bfloat16, torch.int8, torch.float64]):
        x = random(shape, dtype, tried)
        raw = x.reshape(-1).view(torch.uint8).numpy().reshape(*shape, dtype.itemsize)
        want = whole_partial(x)
        for _ in range(6):
            if (changed := corruptions.corrupt(kind, raw, g)) is not None:
                tried += 1
                assert whole_partial(of_bytes(changed, dtype)) != want, (shape, dtype)
    assert tried > 100


@pytest.mark.parametrize("value", [0.0, -1.0, 3.5])
def test_lost_doubled_and_misplaced_boxes_are_seen_even_where_all_elements_are_equal(value: float) -> None:
    for shape, cut in (((40,), 10), ((8, 6), 2), ((20_000,), 5000), ((8, 3, 2000), 2)):
        x = torch.full(shape, value)
        starts = [(at,) + (0,) * (x.dim() - 1) for at in range(0, shape[0], cut)]
        parts = [partial(x[at[0] : at[0] + cut], shape, at) for at in starts]
        good = digest("float32", shape, sum(parts, Partial()))
        assert good == digest("float32", shape, whole_partial(x))
        for a in range(len(parts)):
            lost = parts[:a] + parts[a + 1 :]
            assert digest("float32", shape, sum(lost, Partial())) != good
            assert not covers(shape, sum(lost, Partial()))
            assert digest("float32", shape, sum([*parts, parts[a]], Partial())) != good
            for b in range(len(parts) - 1):  # one lost, another counted twice: the number of elements is right
                assert digest("float32", shape, sum([*lost, lost[b]], Partial())) != good


def test_swapped_tensors_are_seen() -> None:
    a, b = (digest("float32", (4,), whole_partial(random((4,), torch.float32, s))) for s in (1, 2))
    assert whole({"x": a, "y": b}) != whole({"x": b, "y": a})


# --- the rate, where it can be seen ---------------------------------------------------------------------------


def narrowed(a: Partial, b: Partial, bits: int) -> list[bool]:
    """For each lane whether the sums agree modulo 2^bits."""
    return [(x - y) % (1 << bits) == 0 for x, y in zip(a.sums, b.sums, strict=True)]


def within(hits: int, trials: int, rate: float) -> bool:
    """Four standard deviations of a binomial."""
    return abs(hits - trials * rate) <= 4 * math.sqrt(trials * rate * (1 - rate))


def changes(trials: int, change: Any) -> Iterator[tuple[Partial, Partial]]:
    """Partials before and after a change of ``uint8[4, 4096, 4]``: four rows of float32."""
    for seed in range(trials):
        g = np.random.default_rng(seed)
        raw = g.integers(0, 256, (4, 4096, 4), np.uint8)
        before = whole_partial(of_bytes(raw, torch.float32))
        change(raw, g)
        yield before, whole_partial(of_bytes(raw, torch.float32))


@pytest.mark.parametrize("bits", [3, 5, 7])
def test_a_lane_of_n_bits_misses_arbitrary_changes_at_two_to_the_minus_n(bits: int) -> None:
    def overwrite(raw: corruptions.Raw, g: np.random.Generator) -> None:
        raw[1:3, 100:200] = g.integers(0, 256, (2, 100, 4), np.uint8)

    lanes = np.array([narrowed(before, after, bits) for before, after in changes(400, overwrite)])
    assert within(int(lanes.sum()), lanes.size, 2.0**-bits)
    if bits == 3:  # lanes are independent of one another: two of them miss at the square of the rate
        for a, b in ((lanes[:, :8], lanes[:, 8:]), (lanes[:, 0::2], lanes[:, 1::2])):
            assert within(int((a & b).sum()), a.size, 4.0**-bits)


@pytest.mark.parametrize("bits", [10, 12])
def test_flipping_all_signs_costs_the_bits_that_the_book_says(bits: int) -> None:
    """A top bit weighs ±2^7. Lanes that are even at the signs' places lose two bits more, the others one.

    One because every row has an even number of odd weights; another because the next bit of a row's sum does not
    depend on the signs, so that it is the same in all four rows, whose weights are odd.
    """

    def flip(raw: corruptions.Raw, g: np.random.Generator) -> None:
        raw[..., 3] ^= 0x80

    lanes = np.array([narrowed(before, after, bits) for before, after in changes(400, flip)])
    odd = np.arange(LANES) % 4 == 3
    assert within(int(lanes[:, odd].sum()), 400 * 4, 2.0 ** -(bits - 8))
    assert within(int(lanes[:, ~odd].sum()), 400 * 12, 2.0 ** -(bits - 9))
