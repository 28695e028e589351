"""A folder of a local disk: whole files only, durable when a call returns.

A file is written under a temporary name, flushed, and renamed; then its folder is flushed. What a crash leaves
is a temporary file. No listing shows it for an hour; then it is listed, so that who collects leftovers finds it.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt.errors import AccessDenied, CkptError, Incomplete, NoContainer, ObjectMissing, Refused, StorageError

from .contract import Buffer, Entry
from .keys import TEMP_PREFIX, checked_key, checked_prefix, join
from .transfer import byte_view, checked_ranges

STALE_S = 3600.0  # a temporary file that nobody has written to for so long has no writer any more

# What link() answers on FAT and on network file systems without hard links.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EMLINK}

_STREAM_BYTES = 1 << 20  # stays in the second-level cache between the read and the hash


class LocalStore:
    """See :class:`ckpt.store.contract.Store`. The first write makes the root; until then it lists as empty."""

    def __init__(self, url: str, *, retry_budget_s: float = 0.0, **options: object) -> None:
        if options:
            raise Refused(f"a local folder takes no storage options: {', '.join(sorted(options))}")
        self._root = Path(os.path.abspath(url.removeprefix("file://")))
        self.url = f"file://{self._root}"
        self._lasting: set[Path] = set()  # folders known to survive a crash

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    def put(self, key: str, data: Sequence[Buffer]) -> None:
        """Write one file and flush it and its folder."""
        path = self._path(key)
        views = [byte_view(part) for part in data]
        with self._explained("write", key), self._written_aside(path, views) as temporary:
            os.replace(temporary, path)
            _flush_folder(path.parent)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create a file; also True when the same bytes are there, as after a lost answer of a network disk."""
        path = self._path(key)
        with self._explained("create", key), self._written_aside(path, [memoryview(data)]) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return path.read_bytes() == data
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if not _create(path, data):
                    return path.read_bytes() == data
            _flush_folder(path.parent)
            return True

    def get(self, key: str, *, max_bytes: int = 1 << 28) -> bytes:
        """The file's bytes."""
        with self._explained("read", key), open(self._path(key), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise StorageError(f"{join(self.url, key)} has {size} bytes; at most {max_bytes} were expected")
            return file.read()

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Read one range after the other: a disk gains nothing from less order."""
        with self._explained("read", key), open(self._path(key), "rb") as file:
            self._check_end(key, file.fileno(), max((end for _, end in checked_ranges(ranges)), default=0))
            return [self._range(key, file.fileno(), start, end) for start, end in ranges]

    def stream(self, key: str, start: int, end: int) -> Iterator[memoryview]:
        """Bytes ``start`` to ``end`` in order; a piece holds until the next is asked for, as they share one buffer.

        Reading so into memory that stays in the cache is several times as fast as into memory that is new each time.
        """
        with self._explained("read", key), open(self._path(key), "rb", buffering=0) as file:
            self._check_end(key, file.fileno(), end)
            buffer = memoryview(bytearray(min(_STREAM_BYTES, end - start)))
            while start < end:
                got = os.preadv(file.fileno(), [buffer[: end - start]], start)
                if not got:
                    self._check_end(key, file.fileno(), end)
                    raise OSError(errno.EIO, "The file gave no bytes")
                yield buffer[:got]
                start += got

    def list(self, prefix: str = "") -> list[Entry]:
        """Walk the folders that the prefix reaches into; links are followed."""
        folder = checked_prefix(self.url, prefix)
        with self._explained("list", prefix):
            return [entry for entry in self._walk(folder) if entry.key.startswith(prefix)]

    def delete(self, keys: Iterable[str]) -> None:
        """Remove files, and folders that become empty, for good: what is gone stays gone after a crash."""
        touched: set[Path] = set()
        for key in keys:
            path = self._path(key, leftover=True)
            with self._explained("delete", key), suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()
                touched.add(path.parent)
        for folder in touched:
            with self._explained("delete", ""), suppress(FileNotFoundError):
                _flush_folder(folder)
            for empty in (folder, *folder.parents):
                if not empty.is_relative_to(self._root) or empty == self._root:
                    break
                try:
                    empty.rmdir()
                except OSError:
                    break

    # ---- within

    def _path(self, key: str, *, leftover: bool = False) -> Path:
        return self._root / checked_key(self.url, key, leftover=leftover)

    def _range(self, key: str, file: int, start: int, end: int) -> Buffer:
        data = os.pread(file, end - start, start)
        if len(data) == end - start:
            return data
        pieces = [data]  # one call reads at most 2 GiB
        while pieces[-1] and (got := sum(map(len, pieces))) < end - start:
            pieces.append(os.pread(file, end - start - got, start + got))
        if not pieces[-1]:
            self._check_end(key, file, end)
            raise OSError(errno.EIO, "The file gave no bytes")
        return b"".join(pieces)

    def _check_end(self, key: str, file: int, end: int) -> None:
        """Before memory is taken for the bytes up to ``end``: what asks for them may be wrong about the size."""
        if (size := os.fstat(file).st_size) < end:
            raise Incomplete(f"{join(self.url, key)} ends at byte {size}; bytes up to {end} were wanted")

    def _walk(self, folder: str) -> Iterator[Entry]:
        waiting = [folder]
        while waiting:
            here = waiting.pop()
            try:
                items = os.scandir(self._root / here)
            except (FileNotFoundError, NotADirectoryError):
                if self._root.exists() and not self._root.is_dir():
                    raise
                continue  # not made yet, or gone since it was seen
            with items:
                for item in items:
                    if item.is_dir():
                        waiting.append(join(here, item.name))
                    else:
                        with suppress(FileNotFoundError):
                            seen = item.stat()
                            if not item.name.startswith(TEMP_PREFIX) or time.time() - seen.st_mtime > STALE_S:
                                yield Entry(join(here, item.name), seen.st_size)

    def free_bytes(self) -> int:
        """What the disk has left for this user, in bytes; quotas are not seen."""
        here = next(p for p in (self._root, *self._root.parents) if p.exists())
        seen = os.statvfs(here)
        return seen.f_bavail * seen.f_frsize

    @contextmanager
    def _written_aside(self, path: Path, views: Sequence[memoryview]) -> Iterator[Path]:
        """A durable file with these bytes under a temporary name in the same folder; gone at the end."""
        need, free = sum(view.nbytes for view in views), self.free_bytes()
        if need > free:  # said before hours of writing, and before the disk is full for everybody else
            raise StorageError(
                f"no room for {path}", facts=[("needs", f"{need} bytes"), ("free", f"{free} bytes")],
                hint=f"df -h {self._root}",
            )  # fmt: skip
        temporary = path.with_name(TEMP_PREFIX + uuid.uuid4().hex)
        file = self._open_new(temporary)
        try:
            try:
                _write(file, views)
                os.fsync(file)
            finally:
                os.close(file)
            yield temporary
        finally:
            with suppress(OSError):
                temporary.unlink()

    def _open_new(self, path: Path) -> int:
        for _ in range(20):
            with suppress(FileNotFoundError):  # a deletion took the empty folder away again
                self._make(path.parent)
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._lasting.difference_update((path.parent, *path.parent.parents))
        raise FileNotFoundError(errno.ENOENT, "The folder keeps disappearing", str(path.parent))

    def _make(self, folder: Path) -> None:
        """Make a folder and those above it, each lasting in its parent; also those that another writer has just
        made, as it may not have come to flush them yet.
        """
        if folder in self._lasting:
            return
        if folder.is_relative_to(self._root) or not folder.is_dir():
            self._make(folder.parent)
            with suppress(FileExistsError):
                folder.mkdir()
            with suppress(PermissionError):  # above the root, where we may pass but not read
                _flush_folder(folder.parent)
        self._lasting.add(folder)

    @contextmanager
    def _explained(self, operation: str, key: str) -> Iterator[None]:
        try:
            yield
        except CkptError:
            raise
        except OSError as error:
            kind, hint = self._meaning(operation, error)
            raise kind(
                f"cannot {operation} {join(self.url, key)}",
                facts=[("reason", f"{error.strerror} ({errno.errorcode.get(error.errno or 0, '?')})")],
                hint=hint,
            ) from error

    def _meaning(self, operation: str, error: OSError) -> tuple[type[StorageError], str | None]:
        if self._root.exists() and not self._root.is_dir():
            return NoContainer, f"{self._root} is a file; name a folder"
        if isinstance(error, PermissionError):
            return AccessDenied, f"ls -ld {self._root}"
        absent = FileNotFoundError, NotADirectoryError, IsADirectoryError
        if operation == "read" and isinstance(error, absent):
            return ObjectMissing, None
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StorageError, f"df -h {self._root}"
        return StorageError, None


def _create(path: Path, data: bytes) -> bool:
    """Create the file in place: as atomic as ``O_EXCL``, but a crash may leave it short."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return False
    try:
        _write(file, [memoryview(data)])
        os.fsync(file)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(file)
    return True


def _write(file: int, views: Sequence[memoryview]) -> None:
    for view in views:
        done = 0
        while done < view.nbytes:
            done += os.write(file, view[done:])


def _flush_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
