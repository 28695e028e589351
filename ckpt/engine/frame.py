"""A tensor as plain DCP wants it on disk: the bytes of ``torch.save``, with the payload left where it is.

``torch.save`` hands its sink the payload as a view of the tensor's storage; the sink tells it from the zip's
small records by its address, so that a frame costs no copy and the payload's place is read back, not assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ckpt.engine.torchapi import without_crc
from ckpt.errors import Refused

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Frame:
    """``head``, ``payload`` and ``tail`` in the order in which they are written; the payload is a view."""

    head: bytes
    payload: memoryview
    tail: bytes

    @property
    def length(self) -> int:
        """Bytes of the whole frame."""
        return len(self.head) + len(self.payload) + len(self.tail)


def owned(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor with the same values that is dense, contiguous and owns exactly its storage.

    A view would make torch.save write its whole storage, and a transposed tensor storage order. Copies only
    where it must; the caller makes sure that nothing changes the source meanwhile.
    """
    t = tensor.detach()
    if t.layout is not torch.strided or t.is_quantized:
        raise Refused(f"a tensor of layout {t.layout} cannot be stored; convert it to a dense one")
    t = t.resolve_conj().resolve_neg().to("cpu").contiguous()
    if t.untyped_storage().nbytes() != t.numel() * t.element_size():
        t = t.clone(memory_format=torch.contiguous_format)
    return t


def raw_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of an owned CPU tensor, without a copy. Any dtype."""
    if tensor.numel() == 0:
        return memoryview(b"")
    array = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    return memoryview(array)  # type: ignore[arg-type]


def frame(tensor: torch.Tensor) -> Frame:
    """The frame of an ``owned`` tensor. Raises ``Refused`` for what torch.save cannot write."""
    payload = raw_view(tensor)
    sink = _Sink(tensor.data_ptr() if len(payload) else 0, len(payload))
    try:
        with without_crc():
            torch.save(tensor, sink)  # type: ignore[arg-type]
    except Exception as e:
        raise Refused(f"torch.save cannot write a tensor of dtype {tensor.dtype}: {e}") from e
    if len(payload) and not sink.found:
        raise AssertionError("torch.save did not hand over the payload in one piece")
    return Frame(b"".join(sink.head), payload, b"".join(sink.tail))


class _Sink:
    """What torch.save writes into: keeps the small records, skips the payload."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.head: list[bytes] = []
        self.tail: list[bytes] = []
        self.found = False
        self._address, self._nbytes = address, nbytes

    def write(self, piece: memoryview) -> int:
        if (
            not self.found
            and len(piece) == self._nbytes > 0
            and np.frombuffer(piece, np.uint8).ctypes.data == self._address
        ):
            self.found = True
        else:
            (self.tail if self.found else self.head).append(bytes(piece))
        return len(piece)

    def flush(self) -> None:
        """Nothing is buffered."""
