"""Fingerprints of tensors, box by box, on the device where they are. ``ckpt/FINGERPRINT.md`` says what is computed.

The heavy part is one product of the tensor's bytes with a table of 16 int8 weights a byte; it takes torch's int8
matrix product where that is exact, else float32 products short enough to be exact. Both give the same integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from ckpt.engine.torchapi import int8_mm
from ckpt.errors import Refused
from ckpt.format.fingerprint import (
    COLUMN_SEED,
    GAMMA,
    GROUP,
    LANES,
    LIFT,
    MAX_ROW_BYTES,
    MIX_1,
    MIX_2,
    ROW_SEED,
    Box,
    Partial,
    rows_of,
)

CPU_CHUNK_BYTES = 8 << 20  # of a tensor in one product: long enough to hide Python, short enough to stay in cache
DEVICE_CHUNK_BYTES = 64 << 20
MAX_ROWS = 1 << 14  # in one product: a row's sums take memory too
COPY_BYTES = 8 << 20  # of a tensor that is not contiguous, copied at a time
_EXACT_TERMS = 1024  # products of two int8 whose sum float32 holds exactly: 2^10 · 2^14 = 2^24

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # int8 [m, k] by int8 [k, 16], exactly, as int32


def partial(
    tensor: torch.Tensor, shape: Sequence[int], offsets: Sequence[int], *, product: Product | None = None
) -> Partial:
    """What one box adds to the fingerprint of a logical tensor of ``shape``; ``tensor`` is dense and local.

    Any dtype, device and strides; nothing is kept. Extra memory: at most 64 MiB on a CPU, 192 MiB on an accelerator.
    Any thread; uses as many threads as torch does. Waits for the device once. Raises ``Refused`` for a tensor that
    has no plain bytes, ``ValueError`` for a box outside ``shape``.
    """
    elements, sums = _start(tensor, tuple(shape), tuple(offsets), product)
    return Partial(elements, _unsigned(sums.tolist()))


def report(state: Mapping[str, torch.Tensor]) -> dict[str, dict[Box, Partial]]:
    """The partial fingerprints of all boxes that this rank holds, by name and box; no collectives.

    ``ckpt.format.fingerprint.merge`` adds up the reports of all ranks. Waits for each device once.
    """
    started = {
        (name, (offsets, tuple(local.shape))): _start(local, tuple(tensor.shape), offsets, None)
        for name, tensor in state.items()
        for local, offsets in boxes(tensor)
    }
    sums: dict[tuple[str, Box], Partial] = {}
    for device in {s.device for _, s in started.values()}:
        here = {k: v for k, v in started.items() if v[1].device == device}
        values = torch.stack([s for _, s in here.values()]).tolist()
        sums |= {k: Partial(n, _unsigned(v)) for (k, (n, _)), v in zip(here.items(), values, strict=True)}
    out: dict[str, dict[Box, Partial]] = {name: {} for name in state}
    for name, box in started:
        out[name][box] = sums[name, box]
    return out


def boxes(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """The local pieces of a plain, distributed or ShardedTensor with their offsets; replicas on every rank."""
    if isinstance(tensor, DTensor):
        dtensor: Any = tensor  # what follows is the protocol by which DCP asks for chunks
        if tensor.device_mesh.get_coordinate() is not None:  # a rank outside the mesh holds nothing
            for chunk in dtensor.__create_chunk_list__():
                yield dtensor.__get_tensor_shard__(MetadataIndex("", chunk.offsets)), tuple(chunk.offsets)
    elif callable(shards := getattr(tensor, "local_shards", None)):
        for shard in shards():
            yield shard.tensor, tuple(shard.metadata.shard_offsets)
    else:
        yield tensor, (0,) * tensor.dim()


# --- boxes ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def _start(
    tensor: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...], product: Product | None
) -> tuple[int, torch.Tensor]:
    """Number of elements, and the 16 sums as int64 on the tensor's device (not waited for)."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise Refused(f"a tensor of {tensor.layout} on {tensor.device} has no plain bytes to take a fingerprint of")
    sizes = tuple(tensor.shape)
    if (
        len(sizes) != len(shape)
        or len(offsets) != len(shape)
        or any(o < 0 or o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=False))
    ):
        raise ValueError(f"a box of {sizes} at {offsets} is not inside {shape}")
    x = tensor.detach().resolve_conj().resolve_neg()
    total = torch.zeros(LANES // GROUP, GROUP, dtype=torch.int64, device=x.device)
    if not shape:
        x, shape, offsets = x.reshape(1), (1,), (0,)
    if x.numel():
        product = product or product_for(x.device)
        for slab, at in _contiguous(x, offsets):
            _add(total, slab, shape, at, product)
    return x.numel(), total.flatten()


def _contiguous(x: torch.Tensor, offsets: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """The box as it is, or cut in boxes of which a copy is small."""
    if x.is_contiguous():
        yield x, offsets
    elif x.numel() * x.element_size() <= COPY_BYTES:
        yield x.contiguous(), offsets
    else:
        dim = max(range(x.dim()), key=x.size)
        half = x.size(dim) // 2
        yield from _contiguous(x.narrow(dim, 0, half), offsets)
        moved = (*offsets[:dim], offsets[dim] + half, *offsets[dim + 1 :])
        yield from _contiguous(x.narrow(dim, half, x.size(dim) - half), moved)


def _add(
    total: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...], product: Product
) -> None:
    """Add a contiguous box to the sums: cut where rows are folded, then in chunks of rows."""
    s, fold = rows_of(shape, x.element_size())
    folds = -(-shape[s] // fold)
    lead = tuple(zip(x.shape[:s], offsets[:s], shape[:s], strict=True))
    span, inner = x.shape[s], math.prod(x.shape[s + 1 :])
    # as_strided: a dimension of one may have any stride, which a view of other elements does not take
    data = x.as_strided((math.prod(x.shape[:s]), span, inner), (span * inner, inner, 1)).view(torch.int8)
    for start, first, at, count, width in _cut(offsets[s], span, fold):
        weights, lift = _columns(
            x.device, x.element_size(), at, width, shape[s + 1 :], offsets[s + 1 :], tuple(x.shape[s + 1 :])
        )
        piece = data[:, start : start + count * width].view(len(data), count, len(weights))
        for lo, hi, a, b in _chunks(piece):
            per_row, their_sum = _row_weights(x.device, lead, lo, hi, folds, first + a, first + b)
            sums = product(piece[lo:hi, a:b].view(-1, piece.shape[2]), weights).view(-1, *their_sum.shape, GROUP)
            total += (sums * per_row.unsqueeze(2)).sum(0)
            total += their_sum.unsqueeze(1) * lift


def _cut(offset: int, size: int, fold: int) -> Iterator[tuple[int, int, int, int, int]]:
    """A span of the folded dimension as (start in the span, first fold, place in the fold, folds, width of each)."""
    start = 0
    while start < size:
        first, at = divmod(offset + start, fold)
        whole = (size - start) // fold if at == 0 else 0
        count, width = (whole, fold) if whole else (1, min(fold - at, size - start))
        yield start, first, at, count, width
        start += count * width


def _chunks(piece: torch.Tensor) -> Iterator[tuple[int, int, int, int]]:
    """Cut [lead, folds, bytes of a row] in ranges of lead and folds that are small enough for one product."""
    lead, folds, row = piece.shape
    limit = CPU_CHUNK_BYTES if piece.device.type == "cpu" else DEVICE_CHUNK_BYTES
    rows = min(MAX_ROWS, max(1, limit // row))
    if piece.stride(0) == folds * row and folds <= rows:
        step, inside = rows // folds, folds
    else:  # along one of the two only, so that the rows are a view
        step, inside = (rows, 1) if folds < lead else (1, rows)
    for lo in range(0, lead, step):
        for a in range(0, folds, inside):
            yield lo, min(lo + step, lead), a, min(a + inside, folds)


# --- weights --------------------------------------------------------------------------------------------------


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _unsigned(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(v & ((1 << 64) - 1) for v in values)


def _splitmix64(seed: int, n: torch.Tensor) -> torch.Tensor:
    """Numbers of a stream as int64, which wraps like uint64; n is overwritten."""
    z = n.add_(1).mul_(_signed(GAMMA)).add_(_signed(seed))
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))).mul_(_signed(factor))
    return z ^ ((z >> 31) & ((1 << 33) - 1))


@lru_cache(maxsize=64)
def _row_weights(
    device: torch.device, lead: tuple[tuple[int, int, int], ...], lo: int, hi: int, folds: int, a: int, b: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, 2] odd weights and their sum: of folds a…b at each of the local leading indices lo…hi.

    ``lead`` are the leading dimensions as (local size, offset, logical size), ``folds`` how many a leading index has.
    """
    local = torch.arange(lo, hi, device=device)
    row = torch.zeros_like(local)
    stride = folds
    for size, offset, logical in reversed(lead):
        row += (local % size + offset) * stride
        local //= size
        stride *= logical
    row = (row.unsqueeze(1) + torch.arange(a, b, device=device)).flatten()
    groups = torch.arange(LANES // GROUP, device=device)
    weights = _splitmix64(ROW_SEED, (row * 2).unsqueeze(1) + groups) | 1
    return weights, weights.sum(0)


@lru_cache(maxsize=8)
def _table(device: torch.device) -> torch.Tensor:
    """The weights of all byte positions, [65536, 16] int8."""
    words = _splitmix64(COLUMN_SEED, torch.arange(MAX_ROW_BYTES * LANES // 8, device="cpu"))
    table = words.view(torch.int8).view(MAX_ROW_BYTES // LANES, LANES, LANES) & -2
    return (table | torch.eye(LANES, dtype=torch.int8, device="cpu")).view(MAX_ROW_BYTES, LANES).to(device)


@lru_cache(maxsize=16)
def _columns(
    device: torch.device,
    itemsize: int,
    at: int,
    width: int,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the bytes of a row's part, [bytes, 16] int8, and 129 times their sums as [2, 8] int64."""
    if sizes == shape:  # whole inner dimensions: a slice of the table
        row = math.prod(shape) * itemsize
        weights = _table(device)[at * row : (at + width) * row]
    else:
        column = torch.arange(at, at + width, device=device)
        for logical, offset, size in zip(shape, offsets, sizes, strict=True):
            column = (column.unsqueeze(1) * logical + torch.arange(offset, offset + size, device=device)).flatten()
        position = (column.unsqueeze(1) * itemsize + torch.arange(itemsize, device=device)).flatten()
        weights = _table(device).index_select(0, position)
    return weights, weights.sum(0, dtype=torch.int64).mul_(LIFT).view(LANES // GROUP, GROUP)


# --- products -------------------------------------------------------------------------------------------------


def float32_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product by public means: float32, exact because no sum exceeds 2^24."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.int32, device=a.device)
    with torch.autocast(a.device.type, enabled=False):
        for k in range(0, a.shape[1], _EXACT_TERMS):
            total += (a[:, k : k + _EXACT_TERMS].float() @ b[k : k + _EXACT_TERMS].float()).int()
    return total


@lru_cache(maxsize=8)
def product_for(device: torch.device) -> Product:
    """The faster product that is exact on this device, found by trying: some int8 kernels saturate."""
    for product in (int8_mm, float32_mm):
        if _is_exact(product, device):
            return product
    raise Refused(f"no matrix product on {device} is exact; take the fingerprint of a copy on the CPU")


def _is_exact(product: Product, device: torch.device) -> bool:
    """Try the extremes, at which kernels saturate, and a part of the table, at a length that needs padding."""
    length, extremes = 4100, torch.tensor([-128, -1, 127], dtype=torch.int8, device="cpu")
    table = _table(torch.device("cpu"))[:length]
    a = torch.cat([extremes.unsqueeze(1).expand(-1, length), table.t()])
    b = torch.cat([extremes.expand(length, -1), table[:, 3:]], dim=1)
    try:
        got = product(a.to(device), b.to(device)).cpu()
    except (RuntimeError, AttributeError):  # no such kernel for this device
        return False
    return torch.equal(got.long(), a.long() @ b.long())
