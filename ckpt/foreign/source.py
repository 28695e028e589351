"""What every checkpoint looks like to those who copy it: tensors in chunks, values as bytes. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from ckpt.errors import Refused
from ckpt.format import boxes
from ckpt.format.boxes import Box
from ckpt.format.fields import DTYPE_BYTES
from ckpt.store.contract import Buffer

PIECE_BYTES = 32 << 20  # of a tensor, held at once
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a checkpoint; ``span`` are bytes of ``object``."""

    what: str
    object: str
    item: str | None = None
    span: tuple[int, int] | None = None
    expected: str | None = None
    found: str | None = None


@dataclass(frozen=True, slots=True)
class Tensor:
    """A logical tensor of a source."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        n = DTYPE_BYTES[self.dtype]
        for s in self.shape:
            n *= s
        return n


class Source(Protocol):
    """A checkpoint to copy from; read-only. ``paths`` are the nested keys of an entry, where they are known."""

    where: str
    kind: str
    tensors: Mapping[str, Tensor]
    values: Sequence[str]
    paths: Mapping[str, Path]

    @property
    def proof(self) -> str:
        """What the bytes that were read so far were checked against."""
        ...

    def chunks(self, name: str) -> Sequence[Box]:
        """The boxes in which a tensor is stored; they make it up exactly."""
        ...

    def fetch(self, name: str, chunk: Box, lo: int, hi: int) -> Buffer:
        """Bytes [lo, hi) of a chunk's elements, row-major. Raises ``Damaged`` where they are not what was stored."""
        ...

    def value(self, name: str) -> bytes:
        """A value as ``torch.save`` wrote it. Raises ``Unsafe`` where decoding it could do anything but make data."""
        ...


def pieces(source: Source, name: str, limit: int = PIECE_BYTES) -> Iterator[tuple[Box, memoryview]]:
    """A tensor's pieces in row-major order, one at a time: consecutive elements, all of them."""
    tensor = source.tensors[name]
    itemsize = DTYPE_BYTES[tensor.dtype]
    for piece in boxes.pieces(tensor.shape, itemsize, limit):
        yield piece, assemble(source, name, piece)


def assemble(source: Source, name: str, piece: Box) -> memoryview:
    """One of the pieces, out of the chunks that hold parts of it; each part lies in one range of its chunk."""
    itemsize = DTYPE_BYTES[source.tensors[name].dtype]
    shared = [(c, part) for c in source.chunks(name) if (part := boxes.common(piece, c)) is not None]
    out: list[tuple[Box, Buffer]] = []
    for chunk, part in shared:
        lo = boxes.place_in(part, chunk) * itemsize
        out.append((part, source.fetch(name, chunk, lo, lo + _count(part) * itemsize)))
    if len(out) == 1 and out[0][0] == piece:
        return memoryview(out[0][1]).cast("B")
    import numpy as np  # only where chunks are put side by side

    whole = np.empty((*piece[1], itemsize), np.uint8)
    for part, data in out:
        at = tuple(slice(o - p, o - p + n) for o, p, n in zip(part[0], piece[0], part[1], strict=True))
        whole[at] = np.frombuffer(data, np.uint8).reshape((*part[1], itemsize))
    return memoryview(whole.reshape(-1))  # type: ignore[arg-type]


def _count(box: Box) -> int:
    n = 1
    for s in box[1]:
        n *= s
    return n


@dataclass(frozen=True, slots=True)
class Names:
    """Which entries are taken, and what they are called: ``only`` are globs, ``rename`` are prefixes (old, new).

    The first prefix that fits is replaced; ``strip`` is one that is taken off.
    """

    only: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()

    def choose(self, source: Source) -> dict[str, str]:
        """New name by old one. Raises ``Refused`` where nothing is left, or two entries would have one name."""
        every = [*source.tensors, *source.values]
        kept = [k for k in every if not self.only or any(fnmatchcase(k, g) for g in self.only)]
        if not kept:
            raise Refused(
                f"no entry of {source.where} matches {', '.join(self.only) or 'anything'}",
                facts=[("it has", ", ".join(sorted(every)[:5]) or "nothing at all")],
                hint="ckpt inspect shows the names; globs are of whole names, such as 'model.*'",
            )
        named: dict[str, str] = {}
        owner: dict[str, str] = {}
        for k in kept:
            new = self._renamed(k)
            if not new:
                raise Refused(f"{k!r} would have no name left")
            if new in owner:
                raise Refused(f"{owner[new]!r} and {k!r} would both be called {new!r}",
                              hint="choose with --only what is to be taken")  # fmt: skip
            named[k], owner[new] = new, k
        unused = [old for old, _ in self.rename if not any(k.startswith(old) for k in kept)]
        if unused:
            raise Refused(f"no name begins with {unused[0]!r}", facts=[("names", ", ".join(sorted(kept)[:5]))])
        return named

    def _renamed(self, name: str) -> str:
        for old, new in self.rename:
            if name.startswith(old):
                return new + name[len(old) :]
        return name

    def path(self, source: Source, old: str, new: str) -> Path:
        """The nested keys of an entry under its new name."""
        path = source.paths.get(old, (old,))
        if old == new:
            return path
        for n in range(1, len(path)):  # where a prefix of whole keys was replaced, the rest stays as it is
            tail = ".".join(map(str, path[n:]))
            if new == tail:
                return path[n:]
            if new.endswith(f".{tail}"):
                return (*new[: -len(tail) - 1].split("."), *path[n:])
        return (new,)
