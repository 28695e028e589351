"""A disk that forgets: what a file system may hold after a power cut at any moment, while a LocalStore works on it.

What was written and not flushed may be there or not: the bytes of a file until ``fsync`` of it, an entry of a folder
until ``fsync`` of the folder. The operations are those that the store really makes, seen where it makes them.
"""

from __future__ import annotations

import copy
import os
import pathlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ckpt.store.local

Node = "File | Folder"


@dataclass(slots=True, eq=False)
class File:
    """Bytes as written, and as they are sure to be after a power cut."""

    now: bytes = b""
    sure: bytes = b""


@dataclass(slots=True, eq=False)
class Folder:
    """Entries as they are, as they are sure to be, and each change since: (added names, removed names) at once."""

    now: dict[str, Any] = field(default_factory=dict)
    sure: dict[str, Any] = field(default_factory=dict)
    since: list[tuple[dict[str, Any], tuple[str, ...]]] = field(default_factory=list)

    def change(self, added: dict[str, Any], *removed: str) -> None:
        """Add and remove entries in one operation; not sure until the folder is flushed."""
        self.since.append((added, removed))
        self.now = {n: e for n, e in self.now.items() if n not in removed} | added


class Disk:
    """Follows what happens below ``root``, which is sure. ``moments`` holds a copy of all of it after each operation,
    with the ``note`` that the caller had made by then.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.note = root, 0
        self.moments: list[tuple[Folder, int]] = []
        self._tree = Folder()
        self._fds: dict[int, Any] = {}
        self._lock = threading.RLock()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Within the block every operation of a LocalStore below the root is followed."""
        with pytest.MonkeyPatch.context() as patch:
            ours = {n: self._wrapped(getattr(os, n), getattr(self, f"_{n}"))
                    for n in ("open", "write", "fsync", "replace", "link")}  # fmt: skip
            patch.setattr(ckpt.store.local, "os", SimpleNamespace(**{n: getattr(os, n) for n in dir(os)} | ours))
            for n in ("mkdir", "unlink", "rmdir"):
                patch.setattr(pathlib.Path, n, self._wrapped(getattr(pathlib.Path, n), getattr(self, f"_{n}")))
            yield

    def _wrapped(self, real: Callable[..., Any], follow: Callable[..., None]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            with self._lock:
                result = real(*args, **how)
                if isinstance(args[0], int) or Path(args[0]).is_relative_to(self.root / "run"):
                    follow(result, *args)
                    self.moments.append((copy.deepcopy(self._tree), self.note))
                elif follow == self._open:
                    self._fds[result] = self._tree if Path(args[0]) == self.root else None
                return result

        return call

    def _place(self, path: Any) -> tuple[Folder, str]:
        *above, name = Path(path).relative_to(self.root).parts
        here: Any = self._tree
        for part in above:
            here = here.now[part]
        return here, name

    def _open(self, fd: int, path: Any, flags: int, *_: Any) -> None:
        folder, name = self._place(path)
        if flags & os.O_CREAT:
            folder.change({name: File()})
        self._fds[fd] = folder.now[name]

    def _write(self, done: int, fd: int, data: Any) -> None:
        self._fds[fd].now += bytes(data[:done])

    def _fsync(self, _: None, fd: int) -> None:
        node = self._fds[fd]
        if isinstance(node, File):
            node.sure = node.now
        elif node is not None:
            node.sure, node.since = dict(node.now), []

    def _replace(self, _: None, old: Any, new: Any) -> None:
        (folder, name), (target, final) = self._place(old), self._place(new)
        assert folder is target, "a rename between folders is two changes, which this model does not have"
        folder.change({final: folder.now[name]}, name)

    def _link(self, _: None, old: Any, new: Any) -> None:
        (source, name), (folder, final) = self._place(old), self._place(new)
        folder.change({final: source.now[name]})

    def _mkdir(self, _: None, path: Any, *__: Any) -> None:
        folder, name = self._place(path)
        folder.change({name: Folder()})

    def _unlink(self, _: None, path: Any, *__: Any) -> None:
        folder, name = self._place(path)
        folder.change({}, name)

    _rmdir = _unlink


def after_power_cut(tree: Folder, into: Path, rng: random.Random | None) -> None:
    """Write what is there after the cut: only what is sure, or with ``rng`` any part of the rest, too."""
    entries = dict(tree.sure)
    for added, removed in tree.since:
        if rng is not None and rng.random() < 0.5:
            entries = {n: e for n, e in entries.items() if n not in removed} | added
    into.mkdir(parents=True)
    for name, node in entries.items():
        if isinstance(node, Folder):
            after_power_cut(node, into / name, rng)
        else:
            kept = node.now[: rng.randrange(len(node.now) + 1)] if rng is not None and len(node.now) else b""
            (into / name).write_bytes(node.sure if len(node.sure) >= len(kept) else kept)
