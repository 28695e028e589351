"""Write a checkpoint in a format that others read: check names → write aside → read back and compare → publish."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Literal

import torch

from ckpt.engine.fingerprint import partial
from ckpt.errors import Damaged, Refused, StorageError
from ckpt.foreign import files, hub, pieces, safetensors
from ckpt.foreign.pieces import Advance, decode, fingerprint, same
from ckpt.foreign.plain import PlainDcp, check_item
from ckpt.foreign.source import PIECE_BYTES, Names, Path, Source, Tensor
from ckpt.foreign.step import Step
from ckpt.format import torchpickle, zipframe
from ckpt.format.boxes import Box
from ckpt.format.fingerprint import Partial, digest
from ckpt.format.torchpickle import Stored
from ckpt.store import open_store
from ckpt.store.contract import Buffer
from ckpt.store.keys import TEMP_PREFIX
from ckpt.values import value_digest

Format = Literal["safetensors", "torch", "dcp"]
MAX_SHARD_BYTES = 5 << 30
_TORCH = "file.pt"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written and published. ``alike`` are groups of tensors with the same content, such as tied weights."""

    out: str
    format: Format
    tensors: int
    values: int
    bytes: int
    files: int
    alike: tuple[tuple[str, ...], ...]


@dataclass
class _Content:
    """The chosen entries under their new names; sums up each tensor's fingerprint while it is written."""

    source: Source
    old: dict[str, str]
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
    paths: Mapping[str, Path]
    advance: Advance
    written: dict[str, str] = field(default_factory=dict)

    def pieces(self, name: str) -> Iterator[tuple[Box, torch.Tensor]]:
        total, tensor = Partial(), self.tensors[name]
        for box, piece in pieces.tensors(self.source, self.old[name], self.advance):
            total += partial(piece, tensor.shape, box[0])
            yield box, piece
        self.written[name] = digest(tensor.dtype, tensor.shape, total)


def export(
    source: Source, out: FilePath, *, to: Format, names: Names, max_shard_bytes: int, advance: Advance
) -> Exported:
    """Write ``source`` to the local path ``out``, which must not exist; whole and durable on return.

    Every tensor is read back from what was written and its fingerprint compared with the manifest's, where the
    source has one, and with what was read. Extra memory: a few pieces of 32 MiB. Raises ``Refused`` naming what the
    format cannot hold, ``Damaged`` where the source is not what was saved.
    """
    if os.path.lexists(out):
        raise Refused(f"{out} exists already; nothing is overwritten", hint=f"move it away, or write to {out}-2")
    if not out.absolute().parent.is_dir():
        raise Refused(f"there is no folder {out.absolute().parent}")
    named = names.choose(source)
    if to == "safetensors":
        _refuse_for_safetensors(source, named)
    is_file = to == "torch" or (to == "safetensors" and out.name.endswith(safetensors.SUFFIX))
    raw = {named[k]: source.value(k) for k in source.values if k in named}
    old = {new: k for k, new in named.items() if k in source.tensors}
    tensors = {new: source.tensors[k] for new, k in old.items()}
    if to == "safetensors" and is_file and (n := sum(t.nbytes for t in tensors.values())) > max_shard_bytes:
        raise Refused(f"{n} bytes do not fit into one file of at most {max_shard_bytes}",
                      hint=f"give a folder: {out.with_suffix('')}   |   --max-shard")  # fmt: skip
    content = _Content(source, old, tensors, {k: decode(v, k) for k, v in raw.items()},
                       {new: names.path(source, k, new) for k, new in named.items()}, advance)  # fmt: skip
    aside = out.absolute().parent / f"{TEMP_PREFIX}{uuid.uuid4().hex}"
    try:
        aside.mkdir()
        _write(content, aside, to, raw, max_shard_bytes)
        for name, found in content.written.items():
            if isinstance(source, Step):
                same(name, source.manifest.tensors[old[name]].fingerprint, found, source.where)
        _publish(aside, out, is_file)
    except (OSError, RuntimeError) as e:  # torch's zip writer calls a full disk "unexpected pos"
        full = shutil.disk_usage(out.absolute().parent).free < PIECE_BYTES
        reason = "the disk is full" if full else getattr(e, "strerror", None) or str(e).splitlines()[0][:200]
        raise StorageError(f"{out} cannot be written: {reason}", hint=f"df -h {out.absolute().parent}") from e
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    there = [out] if is_file else sorted(out.iterdir())
    return Exported(str(out), to, len(tensors), len(raw), sum(p.stat().st_size for p in there), len(there),
                    _alike(content))  # fmt: skip


def _write(content: _Content, aside: FilePath, to: Format, raw: dict[str, bytes], max_shard_bytes: int) -> None:
    """Write, read back, compare."""
    back: Source
    if to == "torch":
        pickled = files.write_torch(content, aside / _TORCH)
        _check_torch(content, aside / _TORCH, pickled)
        return
    if to == "dcp":
        files.write_dcp(content, aside, raw)
        back = PlainDcp(open_store(str(aside)))
        for name, value in content.values.items():
            found = value_digest(decode(back.value(name), name))
            same(name, value_digest(value), found, "what was written")
    else:
        files.write_safetensors(content, aside, max_shard_bytes)
        store = open_store(str(aside))
        back = hub.Safetensors(store, "", hub.find(store, "") or "")
    if back.tensors != content.tensors:
        raise Damaged("what was written does not hold the tensors that were read")
    for name, saved in content.written.items():
        same(name, saved, fingerprint(back, name, content.advance), "what was written")


def _check_torch(content: _Content, file: FilePath, pickled: bytes) -> None:
    """Compare every record's CRC-32, the pickle, and every tensor's fingerprint."""
    back = _TorchFile(file, content.tensors)
    faults, _ = check_item(back.read, (file.name, 0, back.size), "the file", None)
    if faults or back.pickled != pickled:
        raise Damaged("what was written is not what is there when it is read back")
    for name, saved in content.written.items():
        at: Any = back.root
        for part in content.paths[name]:
            at = at[part]
        if not isinstance(at, Stored) or Tensor(at.dtype, at.shape) != content.tensors[name]:
            raise Damaged(f"{name!r} was not written as it was read")
        back.stored[name] = at
        same(name, saved, fingerprint(back, name, content.advance), "what was written")


def _refuse_for_safetensors(source: Source, named: Mapping[str, str]) -> None:
    hint = "--only 'model.*' takes one part   |   --to torch or --to dcp holds everything"
    if values := [k for k in source.values if k in named]:
        raise Refused(f"safetensors holds tensors only, and {values[0]!r} is a value", hint=hint,
                      facts=[("values", f"{len(values)}: {', '.join(values[:5])}")])  # fmt: skip
    groups = {k.split(".param_groups")[0] for k in source.values if ".param_groups" in k}
    if state := [k for k in named if k in source.tensors and any(k.startswith(f"{g}.state.") for g in groups)]:
        raise Refused(f"{state[0]!r} is the state of an optimizer, which no reader of safetensors looks for", hint=hint,
                      facts=[("of its kind", str(len(state)))])  # fmt: skip
    for k in named:
        if (dtype := source.tensors[k].dtype) not in safetensors.NAMES:
            raise Refused(f"safetensors has no dtype for {k!r}: {dtype}", hint=hint)
    if "__metadata__" in named.values():
        raise Refused("'__metadata__' is no name for a tensor in safetensors")


def _alike(content: _Content) -> tuple[tuple[str, ...], ...]:
    """Tensors that have the same content and more than one dimension: probably one tensor under several names."""
    groups: dict[str, list[str]] = {}
    for name, mark in content.written.items():
        if len(content.tensors[name].shape) > 1 and content.tensors[name].nbytes:
            groups.setdefault(mark, []).append(name)
    return tuple(tuple(sorted(g)) for g in groups.values() if len(g) > 1)


def _publish(aside: FilePath, out: FilePath, is_file: bool) -> None:
    """Make it durable, then visible under its name; never in the place of something else."""
    for path in [*aside.iterdir(), aside]:
        _fsync(path)
    try:
        if is_file:
            (only,) = aside.iterdir()
            os.link(only, out)
        else:
            os.rename(aside, out)  # fails where there is a file, or a folder that is not empty
    except OSError as e:
        if e.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise StorageError(f"{out} cannot be written: {e.strerror}") from None
        raise Refused(f"{out} has come to exist meanwhile; nothing is overwritten") from None
    _fsync(out.absolute().parent)


def _fsync(path: FilePath) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _TorchFile:
    """A file of ``torch.save``, read back without loading it."""

    kind: str = "torch"
    proof: str = "CRC-32"
    where: str = "what was written"
    values: Sequence[str] = ()

    def __init__(self, file: FilePath, tensors: Mapping[str, Tensor]) -> None:
        self._file, self.size = file, file.stat().st_size
        self._records = {r.name: r for r in zipframe.records(self.read, self.size, self.where)}
        record = self._records["archive/data.pkl"]
        self.pickled = bytes(self.read(record.start, record.start + record.length))
        self.root = torchpickle.load(self.pickled, self.where)
        self.tensors: Mapping[str, Tensor] = tensors
        self.stored: dict[str, Stored] = {}
        self.paths: Mapping[str, Path] = {}

    def read(self, lo: int, hi: int) -> bytes:
        return _read(self._file, lo, hi)

    def chunks(self, name: str) -> list[Box]:
        shape = self.tensors[name].shape
        return [((0,) * len(shape), shape)]

    def fetch(self, name: str, chunk: Box, lo: int, hi: int) -> Buffer:
        start = self._records[f"archive/data/{self.stored[name].key}"].start
        return self.read(start + lo, start + hi)

    def value(self, name: str) -> bytes:
        raise KeyError(name)


def _read(file: FilePath, lo: int, hi: int) -> bytes:
    with open(file, "rb") as f:
        f.seek(lo)
        return f.read(hi - lo)
