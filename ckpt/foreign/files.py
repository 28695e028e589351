"""Writers of other people's formats: one tensor piece after the other, each file from its beginning to its end."""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import methodcaller
from pathlib import Path as FilePath
from typing import IO, Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt.engine.frame import raw_view
from ckpt.engine.torchapi import StorageInfo, rebuild_tensor_v2, rebuild_tensor_v3
from ckpt.foreign import safetensors
from ckpt.foreign.pieces import put
from ckpt.foreign.source import Path, Tensor
from ckpt.format.boxes import Box
from ckpt.format.fields import DTYPE_BYTES
from ckpt.format.layout import METADATA, data_name
from ckpt.format.torchpickle import STORAGE_OF

OBJECT_BYTES = 1 << 30  # a DCP data file is closed once it is larger than this
Pieces = Iterator[tuple[Box, torch.Tensor]]


class Content(Protocol):
    """What is written: tensors in their order, values as objects, the nested keys of both."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
    paths: Mapping[str, Path]

    def pieces(self, name: str) -> Pieces:
        """One tensor's pieces in row-major order, each to be used before the next is asked for."""
        ...


# --- safetensors ----------------------------------------------------------------------------------------------


def write_safetensors(content: Content, out: FilePath, max_shard_bytes: int) -> None:
    """A folder: ``model.safetensors``, or shards of at most ``max_shard_bytes`` (or one tensor) and their index."""
    order = sorted(content.tensors, key=lambda k: (-DTYPE_BYTES[content.tensors[k].dtype], k))
    shards: list[list[str]] = [[]]
    size = 0
    for name in order:
        n = content.tensors[name].nbytes
        if shards[-1] and size + n > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += n
    if len(shards) == 1:
        write_safetensors_file(content, order, out / safetensors.SINGLE)
        return
    place: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}{safetensors.SUFFIX}"
        write_safetensors_file(content, names, out / file)
        place |= dict.fromkeys(names, file)
    total = sum(t.nbytes for t in content.tensors.values())
    (out / safetensors.INDEX).write_bytes(safetensors.index(place, total))


def write_safetensors_file(content: Content, names: list[str], file: FilePath) -> None:
    """One file with these tensors, in this order."""
    with open(file, "xb") as f:
        f.write(safetensors.header((k, content.tensors[k].dtype, content.tensors[k].shape) for k in names))
        for name in names:
            for _, piece in content.pieces(name):
                f.write(raw_view(piece))


# --- torch.save -----------------------------------------------------------------------------------------------


class _Storage:
    """A record of the file that a tensor's elements will be in."""

    def __init__(self, dtype: str, key: int, numel: int) -> None:
        name = STORAGE_OF.get(dtype)
        size = 1 if name else DTYPE_BYTES[dtype]
        kind = getattr(torch, name) if name else torch.UntypedStorage
        self.pid = ("storage", kind, str(key), "cpu", numel * size)


class _Tensor:
    """What becomes a tensor when the file is loaded; its bytes are written later."""

    def __init__(self, tensor: Tensor, key: int) -> None:
        self.tensor = tensor
        self.storage = _Storage(tensor.dtype, key, math.prod(tensor.shape))

    def __reduce__(self) -> tuple[Any, ...]:
        shape = self.tensor.shape
        stride = tuple(math.prod(max(n, 1) for n in shape[d + 1 :]) for d in range(len(shape)))
        hooks: OrderedDict[str, Any] = OrderedDict()
        args = (self.storage, 0, shape, stride, False, hooks)
        if self.tensor.dtype in STORAGE_OF:
            return rebuild_tensor_v2, args
        return rebuild_tensor_v3, (*args, getattr(torch, self.tensor.dtype))


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, _Storage) else None


def write_torch(content: Content, file: FilePath) -> bytes:
    """One file as ``torch.save`` of the nested state writes it, with CRC-32; returns its pickle."""
    small: list[torch.Tensor] = []  # of values; their records follow those of the content's tensors

    def planted(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            small.append(value.detach().contiguous())
            name = str(value.dtype).removeprefix("torch.")
            return _Tensor(Tensor(name, tuple(value.shape)), len(content.tensors) + len(small) - 1)
        kind = type(value)
        if kind in (dict, OrderedDict, Counter):
            return kind((k, planted(v)) for k, v in value.items())
        return kind(planted(v) for v in value) if kind in (list, tuple) else value

    root: Any = None
    for number, (name, tensor) in enumerate(content.tensors.items()):
        root = put(root, content.paths[name], _Tensor(tensor, number))
    for name, value in content.values.items():
        root = put(root, content.paths[name], planted(value))
    out = io.BytesIO()
    _Pickler(out, 2).dump({} if root is None else root)
    with open(file, "x+b") as f, zipfile.ZipFile(f, "w", zipfile.ZIP_STORED) as z:
        _record(z, f, "data.pkl", iter([out.getvalue()]))
        _record(z, f, "byteorder", iter([b"little"]))
        for number, name in enumerate(content.tensors):
            _record(z, f, f"data/{number}", (raw_view(piece) for _, piece in content.pieces(name)))
        for number, value in enumerate(small, start=len(content.tensors)):
            _record(z, f, f"data/{number}", iter([raw_view(value.clone())]))
        _record(z, f, "version", iter([b"3\n"]))
    return out.getvalue()


def _record(z: zipfile.ZipFile, file: Any, name: str, data: Iterator[bytes | memoryview]) -> None:
    """One record whose bytes begin at a multiple of 64, as torch wants it for memory maps."""
    info = zipfile.ZipInfo(f"archive/{name}")
    file.seek(0, io.SEEK_END)
    begin = file.tell() + 30 + len(info.filename) + 20 + 4  # local header, name, sizes of 64 bits, padding's header
    pad = -begin % 64
    info.extra = struct.pack("<2sH", b"FB", pad) + b"Z" * pad
    with z.open(info, "w", force_zip64=True) as record:
        for piece in data:
            record.write(piece)


# --- plain DCP ------------------------------------------------------------------------------------------------


def write_dcp(content: Content, folder: FilePath, values: Mapping[str, bytes]) -> None:
    """A folder that ``torch.distributed.checkpoint.load`` reads; every item carries torch's CRC-32."""
    stored: dict[MetadataIndex, StorageInfo] = {}
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    with _Objects(folder) as objects:
        for name, data in values.items():
            entries[name] = BytesStorageMetadata()
            stored[MetadataIndex(name)] = objects.add(methodcaller("write", data))
        for name, tensor in content.tensors.items():
            chunks = []
            for (offsets, sizes), piece in content.pieces(name):
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                chunks.append(chunk)
                index = MetadataIndex(name, chunk.offsets, len(chunks) - 1)
                stored[index] = objects.add(partial(torch.save, piece))
            properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
            entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    metadata = Metadata(entries, planner_data=dict(content.paths), storage_data=stored)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


class _Objects:
    """Data files, one after the other."""

    def __init__(self, folder: FilePath) -> None:
        self._folder, self._number = folder, 0
        self._file = self._open()

    def add(self, write: Callable[[IO[bytes]], object]) -> StorageInfo:
        """Let one item be written; where it lies."""
        if self._file.tell() > OBJECT_BYTES:
            self._file.close()
            self._number += 1
            self._file = self._open()
        start = self._file.tell()
        write(self._file)
        return StorageInfo(data_name(0, self._number), start, self._file.tell() - start)

    def _open(self) -> IO[bytes]:
        return open(self._folder / data_name(0, self._number), "xb")

    def __enter__(self) -> _Objects:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
