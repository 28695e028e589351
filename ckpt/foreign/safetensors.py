"""The safetensors format: header and index of shards, checked before anything of them is believed. Pure.

A file is the header's length in 8 bytes, a JSON header, the tensors' bytes one after the other. It has no checksum.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.errors import Damaged
from ckpt.format.fields import DTYPE_BYTES, MAX_BYTES

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_INDEX_BYTES = 1 << 28
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SUFFIX = ".safetensors"
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16",
    "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32",
    "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip
NAMES = {v: k for k, v in DTYPES.items() if "FNUZ" not in k}  # what is written: other readers do not know the rest
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a file: bytes [start, end) of it."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header_length(data: bytes, size: int, where: str) -> int:
    """Bytes of the header of a file of ``size`` bytes that begins with ``data``. Raises ``Damaged``."""
    if len(data) < _LENGTH.size:
        raise Damaged(f"{where} has {size} bytes: too few for a header")
    (length,) = _LENGTH.unpack_from(data)
    if length > MAX_HEADER_BYTES or length + _LENGTH.size > size:
        limit = "the format allows 100 MB" if length > MAX_HEADER_BYTES else f"the file has {size} bytes"
        raise Damaged(f"{where} says that its header has {length} bytes; {limit}")
    return int(length)


def parse_header(data: bytes, size: int, where: str) -> dict[str, Part]:
    """The tensors of a file, from its header alone (without the 8 bytes before it). Raises ``Damaged``.

    They must lie one after the other from the header's end to the file's, each as long as dtype and shape say.
    """
    table = _json(data, where)
    begin = _LENGTH.size + len(data)
    meta = table.pop("__metadata__", {})
    if not isinstance(meta, dict) or not all(isinstance(v, str) for v in meta.values()):
        raise Damaged(f"{where}: __metadata__ is not a table of texts")
    parts = {name: _part(name, entry, begin, where) for name, entry in table.items()}
    at = begin
    for name, p in sorted(parts.items(), key=lambda kv: (kv[1].start, kv[1].end)):
        if p.start != at:
            what = "overlaps the tensor before it" if p.start < at else "leaves a hole before it"
            raise Damaged(f"{where}: {name!r} {what}: it begins at byte {p.start}, expected {at}")
        at = p.end
    if at != size:
        raise Damaged(f"{where} has {size} bytes, its header speaks of {at}")
    return parts


def parse_index(data: bytes, where: str) -> dict[str, str]:
    """Shard by tensor name. Raises ``Damaged`` for a shard outside the folder, or anything that is no such index."""
    table = _json(data, where)
    shards = table.get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(v, str) for v in shards.values()):
        raise Damaged(f"{where} has no weight_map from names to shards")
    for shard in set(shards.values()):
        if "/" in shard or "\\" in shard or not shard.isprintable() or not shard.endswith(SUFFIX) or shard[0] == ".":
            raise Damaged(f"{where} names the shard {shard[:80]!r}, which is not a {SUFFIX} file in the folder")
    return shards


def header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The beginning of a file that holds (name, dtype, shape) in this order: length and header, padded to 8 bytes."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        end = at + DTYPE_BYTES[dtype] * math.prod(shape)
        table[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def index(shards: Mapping[str, str], total_bytes: int) -> bytes:
    """The index file of several shards."""
    body = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(shards.items()))}
    return (json.dumps(body, indent=2, ensure_ascii=False) + "\n").encode()


def _part(name: str, entry: Any, begin: int, where: str) -> Part:
    def bad(what: str) -> Damaged:
        return Damaged(f"{where}: {name[:80]!r} {what}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise bad("is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise bad(f"has the dtype {str(dtype)[:40]!r}, which is not known here")
    if not _sizes(shape) or len(shape) > 64 or not _sizes(offsets) or len(offsets) != 2:
        raise bad("has a shape or offsets that are no whole numbers from 0")
    want = math.prod(shape) * DTYPE_BYTES[DTYPES[dtype]]
    if want > MAX_BYTES or offsets[1] - offsets[0] != want:
        raise bad(f"has {offsets[1] - offsets[0]} bytes, {dtype} {shape[:8]} takes {want}")
    return Part(DTYPES[dtype], tuple(shape), begin + offsets[0], begin + offsets[1])


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= MAX_BYTES for n in value)


def _json(data: bytes, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a name appears twice")
        return table

    def no_number(text: str) -> Any:
        raise ValueError(f"{text} is no number of JSON")

    try:
        table = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=no_number)
    except (ValueError, RecursionError) as e:
        raise Damaged(f"{where} has a header that is not JSON: {str(e)[:120]}") from None
    if not isinstance(table, dict):
        raise Damaged(f"{where} has a header that is not a table")
    return table
