"""The storage contract: six calls on keys below one root URL.

Keys are relative, "/"-separated and never start with "/". Any thread may call; a store is never used across
a fork. Every call raises only :mod:`ckpt.errors` types: ``ObjectMissing`` for an absent key, ``AccessDenied``,
``NoContainer`` (missing bucket: never an empty listing), ``Unreachable`` (no answer, time-outs, 5xx until the
retry budget ran out), ``StorageError`` for the rest. Messages name the URL and never contain secrets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a listing: its key relative to the store's root, and its size in bytes."""

    key: str
    size: int


@runtime_checkable
class Store(Protocol):
    """Where bytes live. ``url`` is the root, for messages; it carries no credentials."""

    url: str

    def put(self, key: str, data: Sequence[Buffer]) -> None:
        """Write one object from the buffers in order.

        On return the object is whole and durable (local disk: file and folder are fsynced). On an exception
        nothing, or the older object, is visible under the key: never a truncated one.
        """
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create a small object; True if this call created it, False if the key existed already.

        A lost answer is resolved by reading back: callers make ``data`` unique, so equal bytes mean "mine".
        Atomic only where the backend has a conditional put; :func:`ckpt.store.conditional_put_works` finds out.
        """
        ...

    def get(self, key: str, *, max_bytes: int = 1 << 28) -> bytes:
        """Read a whole small object; more than ``max_bytes`` is refused before it is read."""
        ...

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Read byte ranges ``(start, end)``, end exclusive, in the given order, concurrently where it pays.

        A range that reaches past the object's end raises ``Incomplete``.
        """
        ...

    def list(self, prefix: str = "") -> list[Entry]:
        """All objects whose key starts with ``prefix``, in any order, never from a cache."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; a key that is not there is no error."""
        ...
