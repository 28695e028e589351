"""HTTP/1.1 messages as the fault proxy passes them on: heads, bodies, and connections that end badly."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct


class Kept:
    """Takes a body in place of a connection."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> None:
        """Keep it."""
        self.data += data

    async def drain(self) -> None:
        """Nothing waits."""


async def read_head(reader: asyncio.StreamReader) -> tuple[bytes, str, dict[str, str]]:
    """Raw head, its first line, and the headers."""
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *lines = raw.decode("latin1").rstrip("\r\n").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return raw, first, {name.strip().lower(): value.strip() for name, _, value in pairs}


async def copy_body(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter | Kept | None,
    headers: dict[str, str],
    *,
    limit: int | None = None,
    flip: int | None = None,
) -> None:
    """Copy one message body, or its first ``limit`` bytes; without a writer it is thrown away."""
    seen = 0

    async def pass_on(data: bytes) -> None:
        nonlocal seen
        if flip is not None and seen <= flip < seen + len(data):
            changed = bytearray(data)
            changed[flip - seen] ^= 1
            data = bytes(changed)
        seen += len(data)
        if writer is not None:
            writer.write(data)
            await writer.drain()

    if headers.get("transfer-encoding", "").lower() == "chunked":
        while limit is None or seen < limit:
            size = await reader.readuntil(b"\r\n")
            n = int(size.split(b";")[0], 16)
            await pass_on(size + await reader.readexactly(n + 2))
            if n == 0:
                return
        return
    left = int(headers.get("content-length", "0"))
    left = left if limit is None else min(left, limit)
    while left:
        data = await reader.read(min(left, 1 << 16))
        if not data:
            raise asyncio.IncompleteReadError(b"", left)
        left -= len(data)
        await pass_on(data)


def reset(*writers: asyncio.StreamWriter) -> None:
    """Close with RST: the other side sees "connection reset", not an orderly end."""
    for writer in writers:
        sock = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


async def close(writer: asyncio.StreamWriter) -> None:
    """Close, whatever the other side has done."""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
