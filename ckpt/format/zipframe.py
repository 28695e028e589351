"""The zip that ``torch.save`` writes around its records, taken apart without trust. Pure; torch is not needed.

torch stores a CRC-32 with every record and never compares it. Records are always stored, never compressed: a
compressed one is refused, since what it unpacks to is bounded by nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from ckpt.errors import Damaged

Read = Callable[[int, int], "bytes | bytearray | memoryview"]  # bytes [lo, hi) of the frame

MAGIC, _END_MAGIC = b"PK\x03\x04", b"PK\x05\x06"
_END, _END64, _LOCATOR = struct.Struct("<4s4H2IH"), struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
_ENTRY, _LOCAL = struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s5H3I2H")
_PLAIN_FLAGS = 0x0808  # names in UTF-8; sizes that were written after the data
_EDGE = 4096  # of a frame's head and tail, read at once: its headers are there


@dataclass(frozen=True, slots=True)
class Record:
    """One record: ``start`` and ``length`` are bytes in the frame; ``crc`` is what is stored, 0 where none was made."""

    name: str
    crc: int
    start: int
    length: int


def records(read: Read, length: int, where: str) -> list[Record]:
    """The records of a frame of ``length`` bytes, in the order in which they lie there.

    Reads headers only, at most as many bytes as the directory has. Raises ``Damaged`` for anything that torch does
    not write: compression, encryption, records that overlap or reach out of the frame, a name twice.
    """
    try:
        return _records(_edges(read, length), length)
    except (ValueError, struct.error, UnicodeDecodeError) as e:
        raise Damaged(f"{where} is not what torch.save writes: {e}") from None


def looks_like(read: Read, length: int) -> bool:
    """Whether bytes begin or end as a frame does."""
    head, tail = read(0, min(4, length)), read(max(length - _END.size, 0), length)
    return bytes(head) == MAGIC or bytes(tail[:4]) == _END_MAGIC


def single(found: list[Record], suffix: str, where: str) -> Record:
    """The one record of a name below the frame's own folder, such as ``data.pkl``. Raises ``Damaged``."""
    mine = [r for r in found if r.name.partition("/")[2] == suffix]
    if len(mine) != 1:
        raise Damaged(f"{where} has {len(mine)} records named {suffix!r}, expected one")
    return mine[0]


def _edges(read: Read, length: int) -> Read:
    """The same reader, with both ends of the frame read once and kept."""
    if length <= 2 * _EDGE:
        whole = bytes(read(0, length))
        return lambda lo, hi: whole[lo:hi]
    head, tail = bytes(read(0, _EDGE)), bytes(read(length - _EDGE, length))

    def cached(lo: int, hi: int) -> bytes:
        if hi <= _EDGE:
            return head[lo:hi]
        if lo >= length - _EDGE:
            return tail[lo - length + _EDGE : hi - length + _EDGE]
        return bytes(read(lo, hi))

    return cached


def _records(read: Read, length: int) -> list[Record]:
    at, size, count = _directory(read, length)
    _must(at >= 0 and at + size <= length and count <= size // _ENTRY.size, "its directory is not inside it")
    data = bytes(read(at, at + size))
    _must(len(data) == size, "it is shorter than expected")
    found, pos = [], 0
    for _ in range(count):
        record, pos = _entry(read, data, pos, at)
        found.append(record)
    _must(len({r.name for r in found}) == len(found), "a name appears twice")
    found.sort(key=lambda r: (r.start, r.length))
    for a, b in pairwise(found):
        _must(a.start + a.length <= b.start, f"records {a.name!r} and {b.name!r} overlap")
    return found


def _directory(read: Read, length: int) -> tuple[int, int, int]:
    """(start, bytes, entries) of the central directory."""
    _must(length >= _END.size, "it is too short")
    magic, disk, disk2, here, count, size, at, comment = _END.unpack(read(length - _END.size, length))
    _must(magic == _END_MAGIC and not (disk or disk2 or comment) and here == count, "it has no end record")
    end = length - _END.size
    if length >= _END.size + _LOCATOR.size:
        magic, disk, where, disks = _LOCATOR.unpack(read(end - _LOCATOR.size, end))
        if magic == b"PK\x06\x07":
            _must(
                disk == 0 and disks == 1 and where + _END64.size <= end - _LOCATOR.size,
                "its end record is not inside it",
            )
            magic, own, _, _, disk, disk2, here, count, size, at = _END64.unpack(read(where, where + _END64.size))
            _must(
                magic == b"PK\x06\x06" and own == _END64.size - 12 and not (disk or disk2) and here == count,
                "it has no end record",
            )
    return at, size, count


def _entry(read: Read, data: bytes, pos: int, limit: int) -> tuple[Record, int]:
    """One directory entry, held against its local header; and where the next one is."""
    fields = _ENTRY.unpack_from(data, pos)
    magic, _, _, flags, method, _, _, crc, packed, size, n, extra, comment, disk, _, attributes, at = fields
    name_at = pos + _ENTRY.size
    name = data[name_at : name_at + n].decode()
    end = name_at + n + extra + comment
    _must(magic == b"PK\x01\x02" and end <= len(data), "its directory is cut short")
    if 0xFFFFFFFF in (size, packed, at):
        size, packed, at = _large(data[name_at + n : name_at + n + extra], size, packed, at)
    _must(not flags & ~_PLAIN_FLAGS and not disk, f"record {name!r} is encrypted, patched or in another file")
    _must(not attributes & 0x10, f"record {name!r} is a folder")  # torch would read nothing of it
    _must(method == 0 and packed == size, f"record {name!r} is compressed, to {packed} bytes of {size}")
    _must(at + _LOCAL.size <= limit, f"record {name!r} is not inside it")
    local = _LOCAL.unpack(read(at, at + _LOCAL.size))
    start = at + _LOCAL.size + local[9] + local[10]
    _must(local[0] == MAGIC and start + size <= limit, f"record {name!r} is not inside it")
    _must(bytes(read(at + _LOCAL.size, at + _LOCAL.size + local[9])) == name.encode(), f"{name!r} has two names")
    return Record(name, crc, start, size), end


def _large(extra: bytes, size: int, packed: int, at: int) -> tuple[int, int, int]:
    """The sizes of a record of 4 GiB or more, which stand in an extra field."""
    pos = 0
    while pos + 4 <= len(extra):
        kind, n = struct.unpack_from("<2H", extra, pos)
        if kind == 1:
            values = iter(struct.unpack_from(f"<{n // 8}Q", extra, pos + 4))
            return tuple(next(values, -1) if v == 0xFFFFFFFF else v for v in (size, packed, at))  # type: ignore[return-value]
        pos += 4 + n
    raise ValueError("a large record without its size")


def _must(ok: bool, what: str) -> None:
    if not ok:
        raise ValueError(what)
