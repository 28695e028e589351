"""What a process leaves on its host at every step: its successor there can then tell when, and at which step, it died.

A killed process writes nothing to the run's storage, and a request a step would be too many. So each rank keeps one
small file below the host's folder for temporary files, mapped into memory: a step costs a copy of some bytes, no call
to the system. The kernel keeps it when the process is killed; a host that is lost takes it along, and the ledger
then says less. A clean end removes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from elastic.ledger.events import LastSeen

_FIELDS = struct.Struct("<4s80s32sqdqqdddd")  # magic, epoch, start, rank, time, steps, n, and four times
_SLOT = _FIELDS.size + 4
_MAGIC = b"TRL1"


def folder() -> Path:
    """Where these files are, for this user."""
    return Path(tempfile.gettempdir()) / f"torchrelay-{os.getuid()}"


class LastWords:
    """The file of one rank. Two slots are written in turn, each with a checksum: being killed spoils one of them."""

    def __init__(self, url: str, *, epoch: str, start: str, rank: int) -> None:
        home = folder()
        home.mkdir(mode=0o700, exist_ok=True)
        if not _ours(home):
            raise PermissionError(f"{home} belongs to somebody else")
        self._path = home / f"{_run(url)}-r{rank:05d}.last"
        self._head = (_MAGIC, epoch.encode()[:80], start.encode()[:32], rank)
        own = self._path.with_suffix(f".{os.getpid()}")
        with own.open("w+b") as file:
            file.truncate(2 * _SLOT)
            self._map = mmap.mmap(file.fileno(), 2 * _SLOT)
        own.replace(self._path)  # an older process that still runs keeps the file that it has
        self._inode = self._path.stat().st_ino
        self._turn = 0

    def write(
        self, unix_s: float, steps: int, n: int, seconds: float, data_s: float, boundary_s: float, save_s: float
    ) -> None:
        """``steps`` are completed, the last at ``unix_s``; the rest sums up what the ledger has not been told."""
        record = _FIELDS.pack(*self._head, unix_s, steps, n, seconds, data_s, boundary_s, save_s)
        at = self._turn * _SLOT
        self._map[at : at + _SLOT] = record + struct.pack("<I", zlib.crc32(record))
        self._turn ^= 1

    def close(self) -> None:
        """A clean end: there is nothing to tell."""
        with contextlib.suppress(OSError, ValueError):
            self._map.close()
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()


def found(url: str, *, before: str, rank: int, world: int, first_here: bool) -> Iterator[LastSeen]:
    """What processes of epochs below ``before`` have left for rank ``rank`` of ``world``; each is told once.

    ``first_here``: this is the first rank of its host, and tells for ranks that are no more.
    """
    home = folder()
    for path in sorted(home.glob(f"{_run(url)}-r*.last")) if _ours(home) else ():
        number = re.search(r"-r(\d+)\.last$", path.name)
        of = int(number[1]) if number else -1
        if of == rank or (first_here and of >= world):
            with contextlib.suppress(OSError):
                content = path.read_bytes()
                seen = _newest(content)
                if seen is not None and seen.of_epoch < before:
                    yield seen
                    path.unlink()


def _ours(home: Path) -> bool:
    """Whether nobody else can have put anything there."""
    return home.is_dir() and not home.is_symlink() and home.stat().st_uid == os.getuid()


def _newest(content: bytes) -> LastSeen | None:
    best: LastSeen | None = None
    for at in (0, _SLOT):
        record, check = content[at : at + _FIELDS.size], content[at + _FIELDS.size : at + _SLOT]
        if len(check) != 4 or struct.unpack("<I", check)[0] != zlib.crc32(record) or not record.startswith(_MAGIC):
            continue
        _, epoch, start, rank, unix_s, steps, n, seconds, data_s, boundary_s, save_s = _FIELDS.unpack(record)
        if best is None or (steps, unix_s) >= (best.steps, best.unix_s):
            best = LastSeen(of_epoch=_text(epoch), of_start=_text(start), of_rank=rank, unix_s=unix_s, steps=steps, n=n,
                            seconds=seconds, data_s=data_s, boundary_s=boundary_s, save_s=save_s)  # fmt: skip
    return best


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def _run(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:16]
