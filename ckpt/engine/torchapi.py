"""The few private names of torch that the format cannot do without; tests/unit/test_torchapi.py fails when they drift.

``_StorageInfo`` is what plain DCP's readers expect in ``.metadata``. The CRC switch is public but global:
torch.save computes a CRC-32 that nothing reads, at 4 GB/s, so it is off while our frames are written.
``_rebuild_tensor_v2`` and ``_v3`` are what a file of torch.save names, which an export writes by itself.
``_int_mm`` is the one way to an int8 matrix product; the fingerprint has another where it is missing or not exact.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._utils import _rebuild_tensor_v2 as rebuild_tensor_v2
from torch._utils import _rebuild_tensor_v3 as rebuild_tensor_v3
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["StorageInfo", "int8_mm", "rebuild_tensor_v2", "rebuild_tensor_v3", "without_crc"]

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


def int8_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """int8 [m, k] by int8 [k, n] as int32; n is a multiple of 8. Raises what torch raises where there is no kernel.

    Whether it is exact is the caller's to try: kernels for processors without VNNI may saturate.
    """
    if a.device.type == "cpu":
        return torch._int_mm(a, b)
    return _int8_mm_aligned(a, b)


def _int8_mm_aligned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What CUDA asks for: more than 16 rows, a multiple of 8 columns, aligned rows; zeros are put where they lack."""
    m, k = a.shape
    rows, columns = max(32 - m, 0), -k % 16
    if rows or columns or a.stride(0) % 16 or a.stride(1) != 1 or a.data_ptr() % 16:
        a = torch.nn.functional.pad(a, (0, columns, 0, rows)).contiguous()
    if columns or b.data_ptr() % 16:
        b = torch.nn.functional.pad(b, (0, 0, 0, columns)).contiguous()
    return torch._int_mm(a, b)[:m]
