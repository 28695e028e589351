"""A set of safetensors files as a source: one file, or shards with an index. No torch; there is nothing to unpickle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckpt.errors import CkptError, Damaged, Incomplete, NotFound, ObjectMissing
from ckpt.foreign import safetensors
from ckpt.foreign.safetensors import INDEX, SUFFIX, Part
from ckpt.foreign.source import Fault, Path, Tensor
from ckpt.format.boxes import Box
from ckpt.store.contract import Buffer, Store

Parts = dict[str, tuple[str, Part]]  # by tensor: its file, and where in it


def find(store: Store, prefix: str) -> str | None:
    """The name of what to open below a folder: an index, ``model.safetensors``, or the only such file; else None."""
    if any(e.key == prefix + INDEX for e in store.list(prefix + INDEX)):
        return INDEX
    files = candidates(store, prefix)
    return safetensors.SINGLE if safetensors.SINGLE in files else files[0] if len(files) == 1 else None


def candidates(store: Store, prefix: str) -> list[str]:
    """All safetensors files directly in a folder."""
    there = (e.key.removeprefix(prefix) for e in store.list(prefix))
    return sorted(k for k in there if k.endswith(SUFFIX) and "/" not in k)


class Safetensors:
    """Safetensors files to copy from. ``name`` is the index or the one file, relative to ``prefix``.

    Raises ``Damaged`` naming the first thing that is wrong with headers, shards or index.
    """

    kind = "safetensors"
    proof = "nothing: the format has no checksums"
    values: Sequence[str] = ()

    def __init__(self, store: Store, prefix: str, name: str) -> None:
        self._store, self._prefix = store, prefix
        self.where = f"{store.url.rstrip('/')}/{prefix}{'' if name == INDEX else name}".rstrip("/")
        parts, faults = survey(store, prefix, name)
        if faults:
            f = faults[0]
            facts = [("file", f.object), ("tensor", f.item), ("expected", f.expected), ("found", f.found)]
            raise Damaged(f.what, facts=[(k, v) for k, v in facts if v])
        self._parts = parts
        self.tensors: Mapping[str, Tensor] = {k: Tensor(p.dtype, p.shape) for k, (_, p) in parts.items()}
        self.paths: Mapping[str, Path] = {}

    def chunks(self, name: str) -> Sequence[Box]:
        """A tensor lies in one piece."""
        shape = self.tensors[name].shape
        return [((0,) * len(shape), shape)]

    def fetch(self, name: str, chunk: Box, lo: int, hi: int) -> Buffer:
        """Bytes [lo, hi) of a tensor."""
        file, part = self._parts[name]
        if lo == hi:
            return b""
        try:
            (data,) = self._store.get_ranges(self._prefix + file, [(part.start + lo, part.start + hi)])
        except ObjectMissing:
            raise Incomplete(f"{self._store.url}/{self._prefix}{file} is missing") from None
        return data

    def value(self, name: str) -> bytes:
        """There are none."""
        raise NotFound(f"{self.where} has no value {name!r}")


def survey(store: Store, prefix: str, name: str) -> tuple[Parts, list[Fault]]:
    """Every tensor of a set with its place, and all that is wrong. Reads headers and the index only."""
    sizes = {e.key.removeprefix(prefix): e.size for e in store.list(prefix if name == INDEX else prefix + name)}
    if name != INDEX:
        found, faults = _file(store, prefix, name, sizes.get(name))
        return {k: (name, p) for k, p in found.items()}, faults
    try:
        where = f"{store.url.rstrip('/')}/{prefix}{name}"
        shards = safetensors.parse_index(store.get(prefix + name, max_bytes=safetensors.MAX_INDEX_BYTES), where)
    except Damaged as e:
        return {}, [Fault(e.message, name)]
    parts: Parts = {}
    faults = []
    for file in sorted(set(shards.values())):
        found, wrong = _file(store, prefix, file, sizes.get(file))
        faults += wrong
        if not wrong:
            faults += _agreement(name, file, found, shards, parts)
        parts |= {k: (file, p) for k, p in found.items() if k not in parts}
    return parts, faults


def _agreement(
    name: str, file: str, found: Mapping[str, Part], shards: Mapping[str, str], parts: Parts
) -> Iterator[Fault]:
    """What a shard and the index say against each other."""
    for tensor in sorted(found.keys() - {k for k, f in shards.items() if f == file}):
        other = shards.get(tensor)
        what = "the index does not have it" if other is None else "the index has it in another shard"
        yield Fault(what, file, tensor, expected=other)
    for tensor in sorted(k for k, f in shards.items() if f == file and k not in found):
        yield Fault("the index has it in this shard, which does not", name, tensor, expected=file)
    for tensor in sorted(found.keys() & parts.keys()):
        yield Fault("two shards have it", file, tensor, found=parts[tensor][0])


def _file(store: Store, prefix: str, file: str, size: int | None) -> tuple[dict[str, Part], list[Fault]]:
    if size is None:
        return {}, [Fault("the file is missing", file)]
    try:
        (start,) = store.get_ranges(prefix + file, [(0, min(8, size))]) if size else (b"",)
        length = safetensors.header_length(bytes(start), size, file)
        (text,) = store.get_ranges(prefix + file, [(8, 8 + length)]) if length else (b"",)
        return safetensors.parse_header(bytes(text), size, file), []
    except CkptError as e:
        if not isinstance(e, Damaged):
            raise
        return {}, [Fault(e.message, file)]
