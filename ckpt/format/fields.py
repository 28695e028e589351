"""Reads the JSON of records: typed access to untrusted fields, each checked before it is believed. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, TypeVar

from ckpt.errors import Damaged, Unsupported
from ckpt.format.digest import digest
from ckpt.format.layout import split_name

FORMAT = 1
DIGEST = "xxh3-128"
MAX_BYTES = 1 << 62
DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
SEALED = frozenset({"commit", "claim", "base", "mark"})  # nothing else holds their digest, so they hold it themselves

T = TypeVar("T")
_DIGEST = re.compile("[0-9a-f]{32}")
_SEAL = re.compile(rb'(.+),\n "digest": "([0-9a-f]{32})"\n\}\n', re.DOTALL)


def seal(record: bytes) -> bytes:
    """A small record with the digest of all that precedes it as its last field."""
    body = record.removesuffix(b"\n}\n")
    return body + f',\n "digest": "{digest(body)}"\n}}\n'.encode()


class Fields:
    """Typed access to one JSON object of a record of ``kind``; ``where`` names the file in errors.

    Every method reads one field and raises ``Damaged``, naming it, where it is not what the format says.
    """

    def __init__(self, data: bytes | dict[str, Any], kind: str, where: str) -> None:
        self._where, self._kind = where, kind
        if isinstance(data, dict):
            self._d = data
            return
        if kind in SEALED:  # before anything in it is believed, its version included
            sealed = _SEAL.fullmatch(data)
            if sealed is None:
                raise Damaged(f"{where} does not end with its digest")
            if (found := digest(sealed[1])) != sealed[2].decode():
                raise Damaged(f"{where} is not as it was written",
                              facts=[("expected", sealed[2].decode()), ("found", found)])  # fmt: skip
        try:
            d = json.loads(data, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as e:
            raise Damaged(f"{where} is not JSON: {str(e)[:120]}") from None
        if not isinstance(d, dict):
            raise Damaged(f"{where} is not a JSON object")
        self._d = d
        tool, _, version = self.text("schema").partition("/")
        if tool != f"ckpt.{kind}":
            self.bad("schema", f"is {tool!r}, expected 'ckpt.{kind}'")
        if version != str(FORMAT):
            raise Unsupported(f"{where} has format version {version!r}; this version reads {FORMAT}",
                              hint="install a torchrelay that knows this version; the step is not damaged")  # fmt: skip

    def bad(self, key: str, what: str) -> None:
        """Refuse a field: ``what`` is wrong with it."""
        raise Damaged(f"{self._where}: {self._kind} field {key!r} {what}")

    def _get(self, key: str, check: Callable[[Any], bool], want: str) -> Any:
        value = self._d.get(key)
        if not check(value):
            shown = repr(value)[:60] if isinstance(value, (str, int, float, type(None))) else type(value).__name__
            self.bad(key, f"is {shown}, expected {want}")
        return value

    def text(self, key: str) -> str:
        """At most 4,096 characters."""
        return str(self._get(key, lambda v: isinstance(v, str) and len(v) <= 4096, "text"))

    def name(self, key: str) -> str:
        """The name of an object: of this attempt, or the path to one of another."""
        return str(self._get(key, _is_name, "a name inside the folder"))

    def time(self, key: str) -> str:
        """ISO 8601 with a zone."""
        return str(self._get(key, _is_time, "a time with its zone, as ISO 8601 writes it"))

    def size(self, key: str) -> int:
        """A whole number from 0 to 2^62."""
        return int(self._get(key, _is_size, "a whole number from 0 to 2^62"))

    def sizes(self, key: str) -> tuple[int, ...]:
        """At most 64 sizes."""
        ok = lambda v: isinstance(v, list) and len(v) <= 64 and all(map(_is_size, v))  # noqa: E731
        return tuple(self._get(key, ok, "a list of sizes"))

    def digest(self, key: str) -> str:
        """An XXH3-128 in hex."""
        return str(self._get(key, _is_digest, f"{DIGEST} in 32 hex digits"))

    def digests(self, key: str) -> tuple[str, ...]:
        """A list of such."""
        return tuple(self._get(key, lambda v: isinstance(v, list) and all(map(_is_digest, v)), "digests"))

    def dtype(self, key: str) -> str:
        """The name of a dtype."""
        return str(self._get(key, lambda v: isinstance(v, str) and v in DTYPE_BYTES, "a dtype"))

    def flag(self, key: str) -> bool:
        """True or false."""
        return bool(self._get(key, lambda v: isinstance(v, bool), "true or false"))

    def one_of(self, key: str, *allowed: str) -> str:
        """One of a few words."""
        return str(self._get(key, lambda v: isinstance(v, str) and v in allowed, " or ".join(allowed)))

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of texts."""
        return tuple(self._get(key, lambda v: isinstance(v, list) and all(isinstance(s, str) for s in v), "texts"))

    def table(self, key: str) -> dict[str, Any]:
        """An object as it is."""
        return dict(self._get(key, lambda v: isinstance(v, dict), "an object"))

    def optional(self, key: str, read: Callable[[str], T]) -> T | None:
        """What ``read`` makes of the field; None where it is null or not there."""
        return None if self._d.get(key) is None else read(key)

    def records(self, key: str) -> Iterable[Fields]:
        """A list of objects, each to be read in turn."""
        ok = lambda v: isinstance(v, list) and all(isinstance(r, dict) for r in v)  # noqa: E731
        for n, r in enumerate(self._get(key, ok, "a list of objects")):
            yield Fields(r, f"{self._kind} {key}[{n}]", self._where)

    def mapping(self, key: str) -> Iterable[tuple[str, Fields]]:
        """An object of objects."""
        ok = lambda v: isinstance(v, dict) and all(isinstance(r, dict) for r in v.values())  # noqa: E731
        for k, r in self._get(key, ok, "an object of objects").items():
            yield k, Fields(r, f"{self._kind} {key}[{k}]", self._where)

    def length(self, key: str) -> int:
        """How long a list is."""
        return len(self._get(key, lambda v: isinstance(v, list), "a list"))

    def row(self, n: int, fields: tuple[str, ...]) -> Fields:
        """Row ``n`` of an index, whose columns are ``fields``."""
        row = self._d["items"][n]
        if not isinstance(row, list) or len(row) != len(fields):
            self.bad("items", f"row {n} does not match the fields")
        return Fields(dict(zip(fields, row, strict=True)), f"{self._kind} item {n}", self._where)


def _is_size(v: Any) -> bool:
    return type(v) is int and 0 <= v <= MAX_BYTES


def _is_name(v: Any) -> bool:
    ok = isinstance(v, str) and 0 < len(v) <= 1024 and v.isprintable() and "\\" not in v
    # the one way out of the folder is into that of another attempt
    return ok and all(part not in ("", ".", "..") for part in split_name(v)[1].split("/"))


def _is_time(v: Any) -> bool:
    try:
        time = datetime.fromisoformat(v) if isinstance(v, str) else None
    except ValueError:
        return False
    return time is not None and time.tzinfo is not None and 1970 <= time.year < 9999


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return table


def _is_digest(v: Any) -> bool:
    return isinstance(v, str) and _DIGEST.fullmatch(v) is not None
