"""Prove a step by loading it: on one process, in bounded memory, without the model that it is for. Imports torch.

Every tensor is read through the engine's own reader, cut in other boxes than those in which it was saved; the
fingerprint of what was loaded must be the one that was recorded. Every value is decoded with torch's allow-list.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ckpt.engine import fingerprint as engine
from ckpt.engine.planner import decode_value, dtype_name
from ckpt.engine.reader import ObjectReader
from ckpt.errors import Damaged, Mismatch
from ckpt.format import fingerprint as fp
from ckpt.format import layout
from ckpt.format.digest import digest
from ckpt.format.fields import DTYPE_BYTES
from ckpt.format.manifest import Manifest
from ckpt.tools.report import Finding

if TYPE_CHECKING:
    from ckpt.tools.validate import _Check

BOX_BYTES = 48 << 20  # of tensors loaded at once; the reader holds about as much again
_CONTEXT = "how a model and an optimizer take the loaded values: only a restore shows that"


def load_check(job: _Check, manifest: Manifest) -> None:
    """Load all of a step; report to ``job`` what differs, what was proven, and what was not verified."""
    reader = ObjectReader.in_run(job.store, job.prefix, manifest)
    try:
        metadata = reader.read_metadata()
    except Damaged as e:
        job.add(_finding(e))
        return
    reader.set_up_storage_reader(metadata, True)
    loading = _Loading(job, manifest, reader, metadata)
    names = [n for n, md in sorted(metadata.state_dict_metadata.items()) if isinstance(md, TensorStorageMetadata)]
    for name in sorted(manifest.tensors.keys() ^ set(names)):
        job.add(Finding(what="the manifest and DCP's metadata differ in what the step holds", object=layout.METADATA,
                        rank=0, item=name))  # fmt: skip
    pieces: dict[str, tuple[int, Callable[[], bool]]] = {}
    for n, group in enumerate(_groups([k for k in names if k in manifest.tensors], manifest)):
        size = sum(_nbytes(manifest, name) for name in group)
        pieces[f"tensors#{n}"] = size, partial(loading.tensors, group)
    values = [n for n, md in sorted(metadata.state_dict_metadata.items()) if isinstance(md, BytesStorageMetadata)]
    for n in range(0, len(values), 256):
        pieces[f"values#{n // 256}"] = 0, partial(loading.values, values[n : n + 256])
    for work in job.within_budget(pieces):
        work()
    job.end_budget()
    loading.tell()


def _groups(names: Sequence[str], manifest: Manifest) -> Iterator[list[str]]:
    """Tensors that are loaded together; a large one is alone."""
    group: list[str] = []
    size = 0
    for name in names:
        if group and size + _nbytes(manifest, name) > BOX_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += _nbytes(manifest, name)
    if group:
        yield group


def _nbytes(manifest: Manifest, name: str) -> int:
    tensor = manifest.tensors[name]
    return math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]


def boxes(
    shape: tuple[int, ...], itemsize: int, limit: int = BOX_BYTES
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) that partition a tensor, none larger than ``limit`` bytes: cut along the first dimensions."""
    if math.prod(shape) * itemsize <= limit or not shape:
        yield (0,) * len(shape), shape
        return
    inner = math.prod(shape[1:]) * itemsize
    if inner > limit:
        for i in range(shape[0]):
            for offsets, sizes in boxes(shape[1:], itemsize, limit):
                yield (i, *offsets), (1, *sizes)
        return
    rows = max(1, limit // inner)
    if rows > 1 and shape[0] % rows == 0:
        rows -= 1  # so that boxes seldom end where shards do
    for lo in range(0, shape[0], rows):
        yield (lo, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - lo), *shape[1:])


@dataclass
class _Loading:
    job: _Check
    manifest: Manifest
    reader: ObjectReader
    metadata: Metadata
    proven: dict[str, str] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)  # loaded, but no fingerprint was recorded

    def tensors(self, group: Sequence[str]) -> bool:
        """Load and prove some tensors; True where none differs. A failure is told for each tensor by itself."""
        bad = self.job.total
        try:
            sums = self._load(group)
        except (Damaged, Mismatch) as e:
            if len(group) == 1:
                self.job.add(_finding(e, group[0]))
            else:
                for name in group:
                    self.tensors([name])
        else:
            for name in group:
                self._compare(name, sums[name])
        return self.job.total == bad

    def _load(self, group: Sequence[str]) -> dict[str, fp.Partial]:
        sums = dict.fromkeys(group, fp.Partial())
        shapes = {name: self.manifest.tensors[name].shape for name in group}
        if len(group) > 1:
            batches = iter([[(name, (0,) * len(shapes[name]), shapes[name]) for name in group]])
        else:
            (name,) = group
            itemsize = DTYPE_BYTES[self.manifest.tensors[name].dtype]
            batches = ([(name, at, sizes)] for at, sizes in boxes(shapes[name], itemsize))
        for batch in batches:
            items = [item for name, offsets, sizes in batch for item in self._reads(name, offsets, sizes)]
            targets = {
                name: torch.empty(sizes, dtype=getattr(torch, self.manifest.tensors[name].dtype))
                for name, _, sizes in batch
            }
            self.reader.read(LoadPlan(items), _Into(targets))
            for name, offsets, _ in batch:
                sums[name] += engine.partial(targets[name], shapes[name], offsets)
                self.job.advance(targets[name].nbytes)
                self.job.bytes_hashed += targets[name].nbytes
        return sums

    def _reads(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[ReadItem]:
        """What to read for a box. Raises ``Damaged`` where the stored chunks do not fill it."""
        saved, record = self.metadata.state_dict_metadata[name], self.manifest.tensors[name]
        assert isinstance(saved, TensorStorageMetadata)
        if (tuple(saved.size), dtype_name(saved.properties.dtype)) != (record.shape, record.dtype):
            raise Damaged("the manifest and DCP's metadata differ in what the step holds", facts=[("item", name)])
        if _nbytes(self.manifest, name) > self.manifest.total_bytes:
            raise Damaged("the tensor is larger than all objects of the step", facts=[("item", name)])
        box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(name, saved, [box])
        if (have := sum(math.prod(item.lengths) for item in items)) != math.prod(sizes):
            raise Damaged("the stored chunks do not make up the tensor", facts=[
                ("item", name), ("expected", f"{math.prod(sizes)} elements in the box at {offsets}"),
                ("found", f"{have} elements")])  # fmt: skip
        return items

    def _compare(self, name: str, sums: fp.Partial) -> None:
        record = self.manifest.tensors[name]
        found = fp.digest(record.dtype, record.shape, sums)
        if record.fingerprint is None or not record.fingerprint.startswith(fp.PREFIX):
            self.without.append(name)
        elif found != record.fingerprint:
            self.job.add(Finding(what="what was loaded is not what was saved, though its bytes are good",
                                 object=layout.METADATA, item=name, expected=record.fingerprint,
                                 found=found))  # fmt: skip
        else:
            self.proven[name] = found
            self.job.tensors += 1

    def values(self, names: Sequence[str]) -> bool:
        """Decode some values; True where all of them can be."""
        good = True
        for name in names:
            index, none = MetadataIndex(name), torch.Size((0,))
            item = ReadItem(type=LoadItemType.BYTE_IO, dest_index=index, dest_offsets=none,
                            storage_index=index, storage_offsets=none, lengths=none)  # fmt: skip
            try:
                self.reader.read(LoadPlan([item]), _Decode(self.manifest))
            except Damaged as e:
                self.job.add(_finding(e, name))
                good = False
            else:
                self.job.values += 1
        return good

    def tell(self) -> None:
        """Say what was not verified, and compare the digest of the whole state where all of it was loaded."""
        job, manifest = self.job, self.manifest
        if self.without:
            more = f" and {len(self.without) - 3} more" if len(self.without) > 3 else ""
            job.unverified.append(
                f"{len(self.without)} of {len(manifest.tensors)} tensors, saved without a fingerprint known here: "
                + ", ".join(self.without[:3]) + more
            )  # fmt: skip
        want = manifest.fingerprint
        known = want is not None and want.startswith(fp.PREFIX) and len(self.proven) == len(manifest.tensors)
        if known and (found := fp.whole(self.proven)) != want:
            job.add(Finding(what="the fingerprint of the whole state differs", object=layout.MANIFEST, rank=0,
                            expected=want, found=found))  # fmt: skip
        job.unverified.append(_CONTEXT)


class _Into(DefaultLoadPlanner):
    """Hands the reader the place of each slice in the boxes."""

    def __init__(self, targets: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the view of the box that a slice fills."""
        view = self._targets[read_item.dest_index.fqn]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, offset, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is kept."""


class _Decode(DefaultLoadPlanner):
    """Decodes values, and keeps none."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        self._manifest = manifest

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Compare the bytes with the manifest's digest, then decode them. Raises ``Damaged`` or ``Unsafe``."""
        name = read_item.dest_index.fqn
        record = self._manifest.values.get(name)
        if record is None or (found := digest(value.getbuffer())) != record.digest:
            facts = [("item", name)] + ([("expected", record.digest), ("found", found)] if record else [])
            raise Damaged("the manifest has another digest of this value, or none", facts=facts)
        decode_value(value, name)


def _finding(e: Damaged | Mismatch, item: str | None = None) -> Finding:
    facts = dict(e.facts)
    where = facts.get("object", "")
    rank = facts.get("written by", "").removeprefix("rank ")
    return Finding(what=e.message, object=where.rpartition("/")[2] if where else layout.METADATA,
                   rank=int(rank) if rank.isdigit() else None, item=facts.get("item", item),
                   expected=facts.get("expected"), found=facts.get("found"))  # fmt: skip
