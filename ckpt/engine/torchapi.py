"""The few private names of torch that the format cannot do without; tests/unit/test_torchapi.py fails when they drift.

``_StorageInfo`` is what plain DCP's readers expect in ``.metadata``. The CRC switch is public but global:
torch.save computes a CRC-32 that nothing reads, at 4 GB/s, so it is off while our frames are written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["StorageInfo", "without_crc"]

_lock = threading.Lock()


@contextmanager
def without_crc() -> Iterator[None]:
    """Switch torch.save's CRC-32 off for this block; one thread at a time, restored afterwards."""
    with _lock:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(before)
