"""XXH3-128 over buffers: detects accidents, not attackers; runs at memory speed. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

Buffer = bytes | bytearray | memoryview


def digest(*buffers: Buffer) -> str:
    """XXH3-128 of the buffers in order, as 32 hex digits."""
    return digest_all(buffers)


def digest_all(buffers: Iterable[Buffer]) -> str:
    """XXH3-128 of all buffers in order, as 32 hex digits."""
    h = xxhash.xxh3_128()
    for b in buffers:
        h.update(b)
    return h.hexdigest()
