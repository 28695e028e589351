"""A storage, tried out: each operation of the contract once, in a throw-away place below the URL. No torch."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt.errors import AccessDenied, CkptError, NoContainer, Unreachable
from ckpt.store.contract import Store
from ckpt.store.local import LocalStore
from ckpt.tools.doctor.finding import Checked

LARGE_BYTES = 17 << 20  # more than one part of an upload
FSYNCS = 20
# fmt: off
NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "ceph", "9p", "beegfs", "glusterfs", "virtiofs", "afs",
    "ocfs2", "gfs2", "orangefs", "wekafs",
}
# fmt: on


def try_operations(store: Store) -> Iterator[Checked]:
    """Put, get, ranges, list, overwrite, create-only, delete; cleaned up at the end, whatever happens.

    Raises ``NoContainer`` or ``Unreachable`` where nothing can be tried at all.
    """
    folder = f"doctor-{uuid.uuid4().hex}/"
    tried = _Tried(store, folder)
    try:
        yield from tried.all()
    finally:
        yield _cleaned(store, folder)


@contextmanager
def as_it_was(store: Store) -> Iterator[None]:
    """Take the root of a local store away again where the first write made it."""
    root = Path(store.url.removeprefix("file://"))
    made = [p for p in (root, *root.parents) if not p.exists()] if isinstance(store, LocalStore) else []
    try:
        yield
    finally:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()


class _Tried:
    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, folder

    def all(self) -> Iterator[Checked]:
        yield self._try("list", lambda: self._list())
        yield self._try("put", lambda: self._put())
        yield self._try("get", lambda: self._get())
        yield self._try("put large", lambda: self._large())
        yield self._try("get ranges", lambda: self._ranges())
        yield self._try("overwrite", lambda: self._overwrite())
        yield self._conditional()
        yield self._try("delete", lambda: self._delete())

    def _try(self, name: str, act: Callable[[], str]) -> Checked:
        began = time.monotonic()
        try:
            said = act()
        except (NoContainer, Unreachable):
            raise
        except CkptError as e:
            fix = e.hint or ("allow it: see the permissions below" if isinstance(e, AccessDenied) else None)
            return Checked(name, "bad", "; ".join([e.message, *(v for _, v in e.facts)]), fix)
        except _Wrong as e:
            return Checked(name, "bad", str(e), "this storage breaks the contract: runs are not safe on it")
        return Checked(name, "good", f"{said} in {(time.monotonic() - began) * 1e3:.0f} ms")

    def _key(self, name: str) -> str:
        return self._folder + name

    def _list(self) -> str:
        return _must(self._store.list(self._folder) == [], "a new place", "is not empty")

    def _put(self) -> str:
        self._store.put(self._key("small"), [b"first"])
        return "a small object"

    def _get(self) -> str:
        return _must(self._store.get(self._key("small")) == b"first", "what was put", "does not come back")

    def _large(self) -> str:
        self._store.put(self._key("large"), [memoryview(_pattern())])
        return f"{LARGE_BYTES >> 20} MiB, in parts where it has them,"

    def _ranges(self) -> str:
        whole, cuts = _pattern(), [(5, 70_000), (LARGE_BYTES - 9, LARGE_BYTES)]
        got = self._store.get_ranges(self._key("large"), cuts)
        return _must([bytes(g) for g in got] == [whole[a:b] for a, b in cuts], "two ranges", "do not come back")

    def _overwrite(self) -> str:
        self._store.put(self._key("small"), [b"second"])
        seen = self._store.get(self._key("small")) == b"second"
        listed = {e.key: e.size for e in self._store.list(self._folder)}.get(self._key("small")) == 6
        return _must(seen and listed, "the new bytes at once, in get and list,", "are not seen at once")

    def _conditional(self) -> Checked:
        name, key = "conditional put", self._key("once")
        try:
            first = self._store.put_if_absent(key, b"mine")
            second = self._store.put_if_absent(key, b"theirs")
        except (NoContainer, Unreachable):
            raise
        except CkptError as e:
            return Checked(name, "bad", "; ".join([e.message, *(v for _, v in e.facts)]), e.hint)
        if getattr(self._store, "conditional_put", None) is False:
            return Checked(name, "good", "refused by the storage: epochs carry a random id instead, so runs are safe")
        if first and not second:
            return Checked(name, "good", "kept: of two writers of one key, one wins")
        return Checked(name, "good", "ignored silently: epochs carry a random id instead, so runs are safe")

    def _delete(self) -> str:
        self._store.delete([self._key("small"), self._key("large"), self._key("absent")])
        left = {e.key for e in self._store.list(self._folder)} - {self._key("once")}
        return _must(not left, "gone from the listing at once", "is still listed")


class _Wrong(Exception):
    pass


def _must(right: bool, what: str, else_: str) -> str:
    if not right:
        raise _Wrong(f"{what} {else_}")
    return what


def _pattern() -> bytes:
    return (bytes(range(251)) * (LARGE_BYTES // 251 + 1))[:LARGE_BYTES]


def _cleaned(store: Store, folder: str) -> Checked:
    try:
        store.delete([e.key for e in store.list(folder)])
        left = store.list(folder)
    except CkptError as e:
        return Checked("cleaned up", "bad", f"objects of this test may be left below {store.url}/{folder}: {e.message}",
                       "delete what is left there")  # fmt: skip
    said = "nothing of this test is left" if not left else f"{len(left)} objects are left below {store.url}/{folder}"
    return Checked("cleaned up", "bad" if left else "good", said)


# --- local disks ----------------------------------------------------------------------------------------------


def look_at_disk(store: LocalStore, mounts: str = "/proc/self/mountinfo") -> Iterator[Checked]:
    """Kind of file system, free space, and how often a second it makes a small file durable."""
    root = Path(store.url.removeprefix("file://"))
    here = next(p for p in (root, *root.parents) if p.exists())
    kind = filesystem_of(here, mounts)
    if kind is None:
        yield Checked("file system", "not verified", "the system does not tell its kind")
    elif kind in NETWORK or kind.startswith("fuse."):
        yield Checked("file system", "good",
                      f"{kind}, a network file system: whether a write is durable, and seen by the other hosts, is "
                      "its server's promise, and not verified")  # fmt: skip
    elif kind in ("tmpfs", "ramfs"):
        yield Checked("file system", "bad", f"{kind}: its files are in memory and end with the host",
                      "name a folder on a disk, unless that is what you want")  # fmt: skip
    else:
        yield Checked("file system", "good", f"{kind}, on this host")
    usage, inodes = shutil.disk_usage(here), os.statvfs(here)
    free = f"{usage.free / (1 << 30):,.1f} GiB of {usage.total / (1 << 30):,.1f} GiB free"
    nearly = usage.free < usage.total // 50
    yield Checked("free space", "bad" if nearly else "good",
                  free + (f", {inodes.f_favail:,} files" if inodes.f_files else ""),
                  "make room: a save that finds no space fails" if nearly else None)  # fmt: skip


def fsync_rate(store: LocalStore) -> Checked:
    """Small durable writes a second: a save does a few dozen of them."""
    folder = f"doctor-{uuid.uuid4().hex}/"
    began = time.monotonic()
    try:
        for n in range(FSYNCS):
            store.put(f"{folder}{n}", [b"x"])
        seconds = time.monotonic() - began
    except CkptError as e:
        return Checked("durable writes", "bad", e.message, e.hint)
    finally:
        with suppress(CkptError):
            store.delete([e.key for e in store.list(folder)])
    return Checked("durable writes", "good", f"{FSYNCS / seconds:,.0f} a second (file and folder flushed)")


def filesystem_of(path: Path, mounts: str = "/proc/self/mountinfo") -> str | None:
    """The kind of the file system that a path lies on, by the mount table; None where there is none."""
    try:
        lines = Path(mounts).read_text().splitlines()
    except OSError:
        return None
    best, kind = -1, None
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        if (path.resolve().is_relative_to(point)) and len(point) >= best:  # of two at one place the later is on top
            best, kind = len(point), after.split()[0]
    return kind
