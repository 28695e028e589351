"""A store in the memory of this process, for tests and trials: ``memory://name/path``.

Two stores of the same name see the same objects. Listings come in an order that a seed decides, so that nothing
learns to rely on one. ``conditional_put=False`` is a service that takes the condition of a put and ignores it.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field

from ckpt.errors import Incomplete, ObjectMissing, StorageError

from .contract import Buffer, Entry
from .keys import checked_key, checked_prefix, join
from .transfer import checked_ranges


@dataclass
class Shelf:
    """The objects of one name, by full key."""

    objects: dict[str, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_shelves: dict[str, Shelf] = {}
_shelves_lock = threading.Lock()


class MemoryStore:
    """See :class:`ckpt.store.contract.Store`; durable as long as the process lives."""

    def __init__(self, url: str, *, seed: int = 0, conditional_put: bool = True) -> None:
        name, _, path = url.partition("://")[2].partition("/")
        self._root = path.strip("/")
        self.url = f"memory://{join(name, self._root)}"
        with _shelves_lock:
            self._shelf = _shelves.setdefault(name, Shelf())
        self._seed = seed
        self._conditional = conditional_put

    def fork(self, seed: int = 0) -> MemoryStore:
        """An independent store with the same objects: what a crash at this moment leaves, to try things on."""
        other = copy(self)
        with self._shelf.lock:
            other._shelf = Shelf(dict(self._shelf.objects))
        other._seed = seed
        return other

    @property
    def objects(self) -> dict[str, bytes]:
        """The objects themselves, by name and path, to look at or to damage."""
        return self._shelf.objects

    def put(self, key: str, data: Sequence[Buffer]) -> None:
        """Store the buffers as one object."""
        path, whole = self._path(key), b"".join(data)
        with self._shelf.lock:
            self._shelf.objects[path] = whole

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create an object; also True when the same bytes are there, as after a lost answer."""
        path = self._path(key)
        with self._shelf.lock:
            if not self._conditional:
                self._shelf.objects[path] = bytes(data)
            return self._shelf.objects.setdefault(path, bytes(data)) == data

    def get(self, key: str, *, max_bytes: int = 1 << 28) -> bytes:
        """The object's bytes."""
        data = self._object(key)
        if len(data) > max_bytes:
            raise StorageError(f"{join(self.url, key)} has {len(data)} bytes; at most {max_bytes} were expected")
        return data

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Views of the object's bytes."""
        data = memoryview(self._object(key))
        for start, end in checked_ranges(ranges):
            if start < end > len(data):
                raise Incomplete(f"{join(self.url, key)} ends at byte {len(data)}; bytes {start} to {end} were wanted")
        return [data[start:end] for start, end in ranges]

    def list(self, prefix: str = "") -> list[Entry]:
        """Entries in an order that means nothing."""
        checked_prefix(self.url, prefix)
        start = f"{self._root}/" if self._root else ""
        with self._shelf.lock:
            entries = [
                Entry(path[len(start) :], len(data))
                for path, data in self._shelf.objects.items()
                if path.startswith(start + prefix)
            ]
        return sorted(entries, key=lambda e: zlib.crc32(e.key.encode(), self._seed))

    def delete(self, keys: Iterable[str]) -> None:
        """Drop objects."""
        paths = [self._path(key) for key in keys]
        with self._shelf.lock:
            for path in paths:
                self._shelf.objects.pop(path, None)

    def _path(self, key: str) -> str:
        return join(self._root, checked_key(self.url, key))

    def _object(self, key: str) -> bytes:
        path = self._path(key)
        with self._shelf.lock:
            if path not in self._shelf.objects:
                raise ObjectMissing(f"no such object: {join(self.url, key)}")
            return self._shelf.objects[path]
