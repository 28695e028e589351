"""Pieces of a source as torch tensors, their fingerprints, and values as objects."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ckpt.engine.fingerprint import partial
from ckpt.engine.planner import decode_value
from ckpt.errors import Damaged
from ckpt.foreign.source import PIECE_BYTES, Source, pieces
from ckpt.format.boxes import Box
from ckpt.format.fingerprint import Partial, digest
from ckpt.format.torchpickle import check_value
from ckpt.store.contract import Buffer

Advance = Callable[[int], None]


def as_tensor(data: Buffer, dtype: str, sizes: tuple[int, ...]) -> torch.Tensor:
    """A copy of row-major bytes as a tensor that owns exactly its storage."""
    kind = getattr(torch, dtype)
    if not len(data):
        return torch.empty(sizes, dtype=kind)
    raw = torch.empty(len(data), dtype=torch.uint8)
    np.copyto(raw.numpy(), np.frombuffer(data, np.uint8))
    return raw.view(kind).view(sizes)


def tensors(source: Source, name: str, advance: Advance) -> Iterator[tuple[Box, torch.Tensor]]:
    """A tensor's pieces as tensors, one at a time."""
    dtype = source.tensors[name].dtype
    for box, data in pieces(source, name, PIECE_BYTES):
        yield box, as_tensor(data, dtype, box[1])
        advance(len(data))


def fingerprint(source: Source, name: str, advance: Advance) -> str:
    """The fingerprint of a tensor, read from its source now."""
    total = Partial()
    shape = source.tensors[name].shape
    for (offsets, _), piece in tensors(source, name, advance):
        total += partial(piece, shape, offsets)
    return digest(source.tensors[name].dtype, shape, total)


def same(name: str, saved: str | None, found: str, where: str) -> None:
    """Raise ``Damaged`` where a tensor is not what it should be; None: nothing to compare with."""
    if saved is not None and found != saved:
        raise Damaged(f"{name!r} in {where} is not what was read before",
                      facts=[("expected", saved), ("found", found)],
                      hint="something writes to it meanwhile, or the memory or the disk is bad")  # fmt: skip


def decode(data: bytes, name: str) -> Any:
    """A value as an object. Raises ``Unsafe`` for anything outside the allow-lists."""
    check_value(data, f"value {name!r}")
    return decode_value(io.BytesIO(data), name)


def encode(value: Any) -> bytes:
    """A value as ``torch.save`` writes it."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def put(root: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """Set a value in nested dicts and lists, made where they lack; returns the root. A number is a list's index."""
    if not path:
        return value
    head, rest = path[0], path[1:]
    if isinstance(head, int):
        root = [] if root is None else root
        root += [None] * (head + 1 - len(root)) if head < 1 << 20 else []
    else:
        root = {} if root is None else root
    below = root[head] if isinstance(head, int) else root.get(head)
    root[head] = put(below, rest, value)
    return root
