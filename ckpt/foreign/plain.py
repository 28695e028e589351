"""A plain DCP folder as a source, and what can be checked of it: CRC-32 included, which torch stores and never reads.

No torch: ``.metadata`` and the pickles of the items are read by allow-lists of our own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ckpt.errors import Damaged, Incomplete, ObjectMissing, Refused, Unsupported
from ckpt.foreign.source import Fault, Path, Tensor
from ckpt.format import boxes, dcpmeta, layout, torchpickle, zipframe
from ckpt.format.boxes import Box
from ckpt.format.dcpmeta import Contents
from ckpt.format.fields import DTYPE_BYTES
from ckpt.format.torchpickle import Stored
from ckpt.store.contract import Buffer, Store
from ckpt.store.keys import checked_key

METADATA_BYTES = 1 << 34  # nothing says how large it should be
WINDOW_BYTES = 8 << 20
MAX_PERMUTED_BYTES = 256 << 20  # of a chunk that was stored in another order than row-major
Place = tuple[str, int, int]
Key = tuple[str, tuple[int, ...] | None]


def read_contents(store: Store, prefix: str) -> Contents:
    """What a folder's ``.metadata`` says. Raises ``Unsafe`` or ``Damaged``."""
    name = prefix + layout.METADATA
    return dcpmeta.read_contents(store.get(name, max_bytes=METADATA_BYTES), f"{store.url.rstrip('/')}/{name}")


class PlainDcp:
    """A plain DCP folder to copy from. Every CRC-32 is compared when its item is opened or read to the end.

    Raises ``Damaged`` where metadata, files and items do not fit together, ``Unsupported`` for items that went
    through an extension (compression, encryption).
    """

    kind = "plain DCP"

    def __init__(self, store: Store, prefix: str = "") -> None:
        self._store, self._prefix = store, prefix
        self.where = f"{store.url.rstrip('/')}/{prefix}".rstrip("/")
        contents = read_contents(store, prefix)
        if contents.transformed:
            raise Unsupported(f"{self.where}: {contents.transformed[0]!r} was stored through an extension of DCP",
                              hint="load it with DCP and save it again without the extension")  # fmt: skip
        for fault in structure(contents, {e.key.removeprefix(prefix): e.size for e in store.list(prefix)}):
            facts = [("object", fault.object), ("entry", fault.item), ("expected", fault.expected),
                     ("found", fault.found)]  # fmt: skip
            raise Damaged(f"{self.where}: {fault.what}", facts=[(k, v) for k, v in facts if v],
                          hint=f"ckpt validate {self.where} --level full lists all that is wrong")  # fmt: skip
        self._contents = contents
        self._frames: dict[Key, tuple[Stored, int]] = {}
        self._permuted: tuple[Key, memoryview] | None = None
        self._crc: dict[Key, bool] = {}
        self.tensors: Mapping[str, Tensor] = {k: Tensor(d, s) for k, (d, s) in contents.tensors.items()}
        self.values: Sequence[str] = contents.values
        self.paths: Mapping[str, Path] = contents.paths

    @property
    def proof(self) -> str:
        """How many of the items that were read had a CRC-32 that fits."""
        return f"the CRC-32 of {sum(self._crc.values())} of {len(self._crc)} items"

    def chunks(self, name: str) -> Sequence[Box]:
        """The boxes in which a tensor is stored."""
        return self._contents.chunks[name]

    def fetch(self, name: str, chunk: Box, lo: int, hi: int) -> Buffer:
        """Bytes [lo, hi) of a chunk's elements. The frame is checked when its chunk is first asked for."""
        key = (name, chunk[0])
        if key not in self._frames:
            self._frames[key] = self._open(key, chunk)
        stored, start = self._frames[key]
        if stored.contiguous:
            start += stored.offset * DTYPE_BYTES[stored.dtype]
            return self._get(self._contents.places[key], start + lo, start + hi)
        return self._permute(key, stored, start)[lo:hi]

    def value(self, name: str) -> bytes:
        """A value's bytes, proven harmless."""
        place = self._contents.places[name, None]
        data = bytes(self._get(place, 0, place[2]))
        torchpickle.check_value(data, f"value {name!r} of {self.where}")
        faults, self._crc[name, None] = check_item(lambda lo, hi: data[lo:hi], place, name, None)
        if faults:
            raise _damaged(self.where, faults[0])
        return data

    def _open(self, key: Key, chunk: Box) -> tuple[Stored, int]:
        """Check one chunk's frame, whole; what it stores, and where the storage begins in the item."""
        place, where = self._contents.places[key], f"{key[0]!r} in {self.where}"

        def get(lo: int, hi: int) -> Buffer:
            return self._get(place, lo, hi)

        want = Tensor(self.tensors[key[0]].dtype, chunk[1])
        faults, self._crc[key] = check_item(get, place, key[0], want)
        if faults:
            raise _damaged(self.where, faults[0])
        return _tensor_of(get, zipframe.records(get, place[2], where), want, where)

    def _permute(self, key: Key, stored: Stored, start: int) -> memoryview:
        """A chunk in row-major order that was stored in another one; the last one is kept."""
        if self._permuted is None or self._permuted[0] != key:
            import numpy as np

            size = DTYPE_BYTES[stored.dtype]
            if stored.numel * size > MAX_PERMUTED_BYTES:
                raise Refused(f"{key[0]!r} is stored in another order than row-major, in {stored.numel * size} bytes",
                              hint="save it as .contiguous(): only smaller ones are turned round")  # fmt: skip
            raw = self._get(self._contents.places[key], start, start + stored.numel * size)
            flat = np.frombuffer(raw, np.dtype(f"V{size}"))[stored.offset :]
            view = np.lib.stride_tricks.as_strided(flat, stored.shape, [s * size for s in stored.stride])
            self._permuted = key, memoryview(np.ascontiguousarray(view).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        return self._permuted[1]

    def _get(self, place: Place, lo: int, hi: int) -> Buffer:
        return _get(self._store, self._prefix, place, lo, hi)


# --- checking -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Checked:
    """What a check of all items found; ``verified`` and ``without`` count items with and without a stored CRC."""

    faults: list[Fault]
    verified: int = 0
    without: int = 0
    bytes_read: int = 0


def structure(contents: Contents, sizes: Mapping[str, int]) -> Iterator[Fault]:
    """What is wrong by the metadata and the files' sizes alone: names, presence, overlaps, chunks."""
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for (fqn, _), (name, start, length) in contents.places.items():
        spans.setdefault(name, []).append((start, start + length, fqn))
    for name, items in sorted(spans.items()):
        items.sort()
        if not _inside(name):
            yield Fault("the metadata names a file outside the folder", name[:200], items[0][2])
            continue
        end = max(hi for _, hi, _ in items)
        if (size := sizes.get(name)) is None or size < end:
            found = "missing" if size is None else f"{size} bytes"
            yield Fault("the file is not whole", name, expected=f"at least {end} bytes", found=found)
        for (_, hi, fqn), (lo, end, other) in pairwise(items):
            if lo < hi:
                yield Fault(f"two items overlap: {fqn} and {other}", name, other, (lo, min(hi, end)))
    yield from _entries(contents)


def _entries(contents: Contents) -> Iterator[Fault]:
    expected: set[Key] = {(k, None) for k in contents.values}
    for name, (_, shape) in contents.tensors.items():
        expected |= {(name, offsets) for offsets, _ in contents.chunks[name]}
        if not boxes.tiles(shape, contents.chunks[name]):
            yield Fault("the chunks do not make up the tensor", layout.METADATA, name,
                        expected=f"{shape} exactly once", found=f"{len(contents.chunks[name])} chunks")  # fmt: skip
    for name, offsets in sorted(expected - contents.places.keys(), key=str):
        yield Fault("the metadata does not say where it lies", layout.METADATA, _item(name, offsets))
    for name, offsets in sorted(contents.places.keys() - expected, key=str):
        yield Fault("the metadata places what it does not have", layout.METADATA, _item(name, offsets))


def check_items(
    store: Store, prefix: str, contents: Contents, bad: set[str], advance: Callable[[int], None]
) -> Checked:
    """Compare every CRC-32 of every item; files in ``bad`` are left out. Reads each item once, in windows."""
    out = Checked([])
    sizes = {(name, o): n for name, found in contents.chunks.items() for o, n in found}
    for (fqn, offsets), place in sorted(contents.places.items(), key=lambda kv: kv[1]):
        if place[0] in bad or (offsets is not None and (fqn, offsets) not in sizes):
            continue  # reported already

        def get(lo: int, hi: int, place: Place = place) -> Buffer:
            return _get(store, prefix, place, lo, hi)

        item = _item(fqn, offsets)
        want = None if offsets is None else Tensor(contents.tensors[fqn][0], sizes[fqn, offsets])
        faults, has_crc = check_item(get, place, item, want)
        if faults:  # only what is wrong in two fresh reads is damage: a fault on the way is wrong in another way
            faults, has_crc = check_item(get, place, item, want)
        out.faults += faults
        out.verified += has_crc and not faults
        out.without += not has_crc and not faults
        out.bytes_read += place[2]
        advance(place[2])
    return out


def check_item(get: zipframe.Read, place: Place, item: str, want: Tensor | None) -> tuple[list[Fault], bool]:
    """What is wrong with one item, and whether it has checksums at all; ``want`` is the chunk, None for a value."""
    name, start, length = place
    if want is None and not zipframe.looks_like(get, length):
        return [], False  # a planner of somebody's own: nothing tells what it should be
    try:
        found = zipframe.records(get, length, item)
        if want is not None:
            _tensor_of(get, found, want, item)
        else:
            pickled = zipframe.single(found, "data.pkl", item)
            torchpickle.load(bytes(get(pickled.start, pickled.start + pickled.length)), f"value {item!r}")
    except Damaged as e:
        return [Fault(e.message, name, item, (start, start + length))], True
    faults = []
    if not any(r.crc for r in found):
        return [], False
    for r in found:
        crc = 0
        for lo in range(r.start, r.start + r.length, WINDOW_BYTES):
            crc = zlib.crc32(get(lo, min(lo + WINDOW_BYTES, r.start + r.length)), crc)
        if crc != r.crc:
            faults.append(Fault("stored bytes differ from their CRC-32", name, item,
                                (start + r.start, start + r.start + r.length),
                                f"crc32 {r.crc:08x} ({r.name.partition('/')[2]})", f"{crc:08x}"))  # fmt: skip
    return faults, True


def _tensor_of(get: zipframe.Read, found: list[zipframe.Record], want: Tensor, where: str) -> tuple[Stored, int]:
    """The tensor of a frame, and where its storage begins. Raises ``Damaged`` where it is not what it should be."""
    pickled = zipframe.single(found, "data.pkl", where)
    stored: Any = torchpickle.load(bytes(get(pickled.start, pickled.start + pickled.length)), where)
    if not isinstance(stored, Stored):
        raise Damaged(f"{where} holds no tensor")
    if Tensor(stored.dtype, stored.shape) != want:
        raise Damaged(f"{where} holds {stored.dtype} {stored.shape}, the metadata says {want.dtype} {want.shape}")
    record = zipframe.single(found, f"data/{stored.key}", where)
    if record.length != stored.numel * DTYPE_BYTES[stored.dtype]:
        raise Damaged(f"{where}: the storage has {record.length} bytes of {stored.numel} {stored.dtype}")
    for r in found:
        if r.name.endswith("/byteorder") and bytes(get(r.start, r.start + r.length)) != b"little":
            raise Damaged(f"{where} is not in little-endian order")
    return stored, record.start


def _get(store: Store, prefix: str, place: Place, lo: int, hi: int) -> Buffer:
    name, start, length = place
    if not 0 <= lo <= hi <= length:
        raise Damaged(f"bytes {lo}–{hi} are not inside an item of {length}")
    if lo == hi:
        return b""
    try:
        (data,) = store.get_ranges(prefix + name, [(start + lo, start + hi)])
    except ObjectMissing:
        raise Incomplete(f"{store.url}/{prefix}{name} is missing") from None
    return data


def _damaged(where: str, fault: Fault) -> Damaged:
    facts = [("object", fault.object), ("entry", fault.item), ("expected", fault.expected), ("found", fault.found)]
    return Damaged(f"{where}: {fault.what}", facts=[(k, v) for k, v in facts if v],
                   hint="take an older checkpoint: this one is not what was saved")  # fmt: skip


def _item(name: str, offsets: tuple[int, ...] | None) -> str:
    return name if not offsets or not any(offsets) else f"{name} at {offsets}"


def _inside(name: str) -> bool:
    try:
        return bool(checked_key("", name))
    except Refused:
        return False
