"""How the numbers of two tensors differ: both are read in pieces, verified, in bounded memory. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ckpt.foreign.pieces import Advance, as_tensor
from ckpt.foreign.source import Source, pieces
from ckpt.format.fields import DTYPE_BYTES
from ckpt.tools.diff import Stats

PIECE_ELEMENTS = 1 << 20  # of each tensor at once, as float64


@torch.no_grad()
def stats(a: Source, b: Source, name: str, advance: Advance) -> Stats:
    """Compare a tensor that both have in one shape. Raises ``Damaged`` where its stored bytes are.

    Memory: about 50 MiB, and a block of each side.
    """
    elements = differing = 0
    largest = moved = was = 0.0
    nan, inf = [0, 0], [0, 0]
    for of_a, of_b in zip(_pieces(a, name, advance), _pieces(b, name, advance), strict=True):
        elements += of_a.numel()
        x, y = _numbers(of_a), _numbers(of_b)
        if of_a.dtype == of_b.dtype:  # bits: a NaN that stays is no difference, and a zero that changes its sign is one
            differing += int((_bits(of_a) != _bits(of_b)).any(-1).sum())
        else:
            differing += int(((x != y) & ~(x.isnan() & y.isnan())).any(-1).sum())
        for side, t in enumerate((x, y)):
            nan[side] += int(t.isnan().any(-1).sum())
            inf[side] += int(t.isinf().any(-1).sum())
        both = x.isfinite().all(-1) & y.isfinite().all(-1)
        x, y = x[both], y[both]
        change = torch.linalg.vector_norm(y - x, dim=-1)
        largest = max(largest, float(change.max()) if change.numel() else 0.0)
        moved += float(change.square().sum())
        was += float(x.square().sum())
    return Stats(
        elements=elements, differing=differing, max_abs=largest,
        relative=math.sqrt(moved / was) if was else None, nan=(nan[0], nan[1]), inf=(inf[0], inf[1]),
    )  # fmt: skip


def _pieces(source: Source, name: str, advance: Advance) -> Iterator[torch.Tensor]:
    dtype = source.tensors[name].dtype
    for (_, sizes), data in pieces(source, name, PIECE_ELEMENTS * DTYPE_BYTES[dtype]):
        yield as_tensor(data, dtype, sizes)
        advance(len(data))


def _numbers(t: torch.Tensor) -> torch.Tensor:
    """Each element as one or two float64."""
    if t.is_complex():
        return torch.view_as_real(t.to(torch.complex128)).reshape(-1, 2)
    return t.to(torch.float64).reshape(-1, 1)


def _bits(t: torch.Tensor) -> torch.Tensor:
    """Each element as its bytes."""
    return t.reshape(-1, 1).view(torch.uint8)
