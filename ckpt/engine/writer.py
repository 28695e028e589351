"""``ObjectWriter``: DCP's StorageWriter on any store. Hashes what was staged, uploads, and commits last.

Under plain ``dcp.save`` it writes one self-explaining folder that counts from the moment its manifest exists.
:mod:`ckpt.save` drives the same class inside a run's attempt folder and adds the commit record.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckpt.engine.fingerprint import partial
from ckpt.engine.frame import frame, owned
from ckpt.engine.planner import Snapshot, dtype_name
from ckpt.engine.references import NOTHING, Offer
from ckpt.engine.torchapi import StorageInfo
from ckpt.errors import Incomplete, Refused, Unsafe
from ckpt.format import layout, torchpickle
from ckpt.format.blocks import Item, block_bytes_for
from ckpt.format.digest import Buffer, digest, digest_all
from ckpt.format.fingerprint import Partial, covers, whole
from ckpt.format.fingerprint import digest as fingerprint
from ckpt.format.manifest import REFERENCES, Index, Manifest, ObjectRecord, TensorRecord, ValueRecord, dump, utc_now
from ckpt.store import open_store
from ckpt.store.contract import Store

OBJECT_BYTES = 512 << 20  # a data object is closed once it is larger than this
UPLOADS_IN_FLIGHT = 2
SMALL_BYTES = 1 << 20
_PER_RANK = re.compile(r"\.rank\d{5}$")


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank tells the coordinator of one item, and (with its first item) of its objects.

    ``proof`` is a tensor chunk's part of the fingerprint, or the digest of a value's bytes.
    """

    info: StorageInfo
    proof: Partial | str
    objects: tuple[ObjectRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class _Piece:
    """One item to write: what the index will say of it, its bytes as head, payload and tail, what makes its proof."""

    index: MetadataIndex
    item: Item
    parts: tuple[Buffer, ...]
    prove: Callable[[], Partial | str]

    def result(self, written_bytes: int) -> WriteResult:
        """What the coordinator is told of it; sums the fingerprint."""
        info = StorageInfo(self.item.object, self.item.start, self.item.length)
        return WriteResult(self.index, written_bytes, Written(info, self.prove()))

    def is_same(self, old: Item) -> bool:
        """Whether an item that was written earlier has the same bytes, all of them, and means the same."""
        return self.item == replace(old, object="", start=0)


class ObjectWriter(StorageWriter):
    """Write one folder of a store as a plain-DCP checkpoint with checksums and a manifest.

    Use it with any ``dcp.save(state_dict, storage_writer=ckpt.ObjectWriter(url))``; DCP's collectives and time-outs
    hold. The folder must be empty: nothing is ever overwritten. Durable when ``dcp.save`` returns.

    Raises ``Refused`` where a checkpoint is there already, ``StorageError`` where the store fails.
    """

    def __init__(self, url: str, *, client: str | None = None, **storage_options: Any) -> None:
        self._options = {"client": client, **storage_options}
        self._attach(open_store(url, **self._options), "", step=None, attempt=None)

    @classmethod
    def in_run(cls, store: Store, attempt: layout.Attempt) -> ObjectWriter:
        """Make a writer for one attempt folder of a run; the caller commits after ``finish``."""
        self = cls.__new__(cls)
        self._options = {}
        self._attach(store, attempt.prefix, step=attempt.step, attempt=str(attempt))
        return self

    def _attach(self, store: Store, prefix: str, *, step: int | None, attempt: str | None) -> None:
        self._store, self._prefix, self._step, self._attempt = store, prefix, step, attempt
        self.record: Manifest | None = None  # set by publish, on the coordinator, like its bytes:
        self.manifest: bytes | None = None

    # --- DCP's sequence of calls --------------------------------------------------------------------------

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any URL or path."""
        return bool(str(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Point the writer at another folder; the storage options given at the start stay in force."""
        if checkpoint_id is not None:
            self._attach(open_store(str(checkpoint_id), **self._options), "", step=None, attempt=None)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse a folder that holds something already (asked by the coordinator alone)."""
        if is_coordinator and (there := self._store.list(self._prefix)):
            raise Refused(
                f"{self._where} is not empty: {there[0].key} and {len(there) - 1} more objects",
                hint="give each save a folder of its own; nothing is overwritten",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to prepare."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell every rank its number, which names its objects."""
        return [SavePlan(p.items, rank, p.planner_data, p.usable) for rank, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Hash and upload this rank's items; the future holds the results, or the first error."""
        future: Future[list[WriteResult]] = Future()
        try:
            future.set_result(self.write(plan, planner))
        except Exception as e:
            future.set_exception(e)  # type: ignore[arg-type]
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata`` and the manifest, which makes the folder count (coordinator only)."""
        self.publish(metadata, results, world_size=len(results))
        assert self.manifest is not None
        if not self._store.put_if_absent(self._prefix + layout.MANIFEST, self.manifest):
            raise Refused(f"{self._where} was committed by another writer meanwhile")

    # --- what it does -------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return f"{self._store.url.rstrip('/')}/{self._prefix}".rstrip("/")

    def write(self, plan: SavePlan, planner: SavePlanner, offer: Offer = NOTHING) -> list[WriteResult]:
        """Write the data objects and the index of this rank; on return they are durable.

        Bytes are hashed as they were staged, before they leave the process. What the ``offer`` holds already, byte for
        byte, is referred to and not written. Any thread; no collectives.
        """
        rank = int(plan.storage_data)
        if not plan.items:
            return []
        pieces: Iterable[_Piece] = (_hashed(item, planner) for item in plan.items)
        same: list[_Piece] = []
        if offered := offer.items(self._store, self._prefix):
            same, pieces = _split(list(pieces), offered, offer)
        items: list[tuple[Item, WriteResult]] = []
        records: list[ObjectRecord] = offer.records(p.item for p in same) if same else []
        with ThreadPoolExecutor(UPLOADS_IN_FLIGHT, thread_name_prefix="ckpt-upload") as pool:
            uploads = []
            for n, batch in enumerate(_batches(pieces)):
                name = layout.data_name(rank, n)
                placed, buffers = _lay_out(name, batch)
                size = sum(map(len, buffers))
                records.append(ObjectRecord(name=name, bytes=size, digest=digest_all(buffers), rank=rank))
                uploads.append(pool.submit(self._store.put, self._prefix + name, buffers))
                items += [(p.item, p.result(p.item.length)) for p in placed]  # proven while the bytes travel
            for upload in uploads:  # the first error is raised, after the pool has let the others end
                upload.result()
        if items:
            name = layout.index_name(rank)
            index = dump("index", Index(rank=rank, items=tuple(i for i, _ in items)))
            self._store.put(self._prefix + name, [index])
            records.append(ObjectRecord(name=name, bytes=len(index), digest=digest(index), rank=rank))
        written = [result for _, result in items] + [p.result(0) for p in same]
        first = written[0]
        told = replace(first.storage_data, objects=tuple(records))
        written[0] = WriteResult(first.index, first.size_in_bytes, told)
        return written

    def publish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]], *, world_size: int) -> None:
        """Check that everything planned is there, write ``.metadata``, and build ``self.manifest`` (not written).

        Coordinator only. Raises ``Incomplete`` naming the first item or object that is missing.
        """
        flat = [r for rank in results for r in rank]
        stored = {r.index: r.storage_data.info for r in flat}
        for key, index in _planned(metadata):
            if index not in stored:
                raise Incomplete(f"{self._where}: {key} {tuple(index.offset or ())} was planned and not written")
        objects = list(dict.fromkeys(o for r in flat for o in r.storage_data.objects))  # ranks may share a reference
        metadata.storage_data = stored
        metadata.storage_meta = None
        meta = pickle.dumps(metadata)
        self._store.put(self._prefix + layout.METADATA, [meta])
        objects.append(ObjectRecord(name=layout.METADATA, bytes=len(meta), digest=digest(meta), rank=0))
        tensors, values = self._prove(metadata, flat)
        references = tuple(sorted({str(a) for o in objects if (a := layout.split_name(o.name)[0])}))
        self.record = Manifest(
            step=self._step, attempt=self._attempt, created=utc_now(), world_size=world_size,
            objects=tuple(sorted(objects, key=lambda o: o.name)), tensors=tensors, values=values, writer=_versions(),
            fingerprint=whole({k: t.fingerprint for k, t in tensors.items() if t.fingerprint}),
            references=references, requires=(REFERENCES,) if references else (),
        )  # fmt: skip
        self._check_sizes(self.record)
        self.manifest = dump("manifest", self.record)

    def _prove(
        self, metadata: Metadata, results: Iterable[WriteResult]
    ) -> tuple[dict[str, TensorRecord], dict[str, ValueRecord]]:
        """Add up the chunks' fingerprints; a tensor that its chunks do not cover exactly is not committed."""
        parts: dict[str, Partial] = {}
        digests: dict[str, str] = {}
        for r in results:
            proof = r.storage_data.proof
            if isinstance(proof, Partial):
                parts[r.index.fqn] = parts.get(r.index.fqn, Partial()) + proof
            else:
                digests[r.index.fqn] = proof
        tensors: dict[str, TensorRecord] = {}
        values: dict[str, ValueRecord] = {}
        for key, md in metadata.state_dict_metadata.items():
            if isinstance(md, TensorStorageMetadata):
                dtype, shape = dtype_name(md.properties.dtype), tuple(md.size)
                if not covers(shape, parts[key]):
                    raise Incomplete(f"{self._where}: {key} {shape}: {parts[key].elements} elements were written")
                tensors[key] = TensorRecord(dtype=dtype, shape=shape, fingerprint=fingerprint(dtype, shape, parts[key]))
            else:
                kind = "per_rank" if _PER_RANK.search(key) else "replicated"
                values[key] = ValueRecord(kind=kind, digest=digests[key])
        return tensors, values

    def _check_sizes(self, manifest: Manifest) -> None:
        there = manifest.sizes_there(self._prefix, self._store.list)
        for o in manifest.objects:
            if (size := there.get(o.name)) != o.bytes:
                found = "is missing" if size is None else f"has {size} bytes"
                raise Incomplete(f"{self._where}/{o.name} {found} after the upload, expected {o.bytes}",
                                 facts=[("written by", f"rank {o.rank}")])  # fmt: skip


def _split(
    pieces: list[_Piece], offered: Mapping[MetadataIndex, Item], offer: Offer
) -> tuple[list[_Piece], list[_Piece]]:
    """Pieces that the offer holds already, placed there, and those that must be written."""
    same = {p.index: replace(p, item=old) for p in pieces if (old := offered.get(p.index)) and p.is_same(old)}
    worth = offer.worth([p.item for p in same.values()])
    same = {k: p for k, p in same.items() if p.item.object in worth}
    return list(same.values()), [p for p in pieces if p.index not in same]


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Cut the sequence in objects; what is not asked for yet is not resolved yet."""
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        size += piece.item.length
        batch.append(piece)
        if size > OBJECT_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _harmless(item: WriteItem, value: bytes) -> bytes:
    """The value, if a load will take it: one that it would refuse is refused now, and not when it is needed."""
    try:
        torchpickle.check_value(value, f"value {item.index.fqn!r}")
    except Unsafe as e:
        raise Refused(e.message, hint="keep plain numbers, text, tensors, lists and dicts in it") from None
    return value


def _hashed(write_item: WriteItem, planner: SavePlanner) -> _Piece:
    """One item with the digests of its blocks; its place is not known yet. A dense tensor is not copied."""
    data = planner.resolve_data(write_item)
    offsets: tuple[int, ...] | None = None
    shape: tuple[int, ...] = ()
    dtype: str | None = None
    prove: Callable[[], Partial | str]
    if isinstance(data, io.BytesIO):
        value = _harmless(write_item, data.getvalue())
        head, payload, tail = b"", memoryview(value), b""
        block = block_bytes_for((len(value),), 1)
        prove = functools.partial(digest, value)
    else:
        data = owned(data)
        f = frame(data)
        head, payload, tail = f.head, f.payload, f.tail
        shape, dtype = tuple(data.shape), dtype_name(data.dtype)
        chunk = write_item.tensor_data
        assert chunk is not None
        offsets = tuple(chunk.chunk.offsets)
        block = block_bytes_for(shape, data.element_size())
        if isinstance(planner, Snapshot):  # which may have summed it already
            prove = functools.partial(planner.part, write_item)
        else:
            prove = functools.partial(partial, data, tuple(chunk.size), offsets)
    length = len(head) + len(payload) + len(tail)
    item = Item(write_item.index.fqn, offsets, shape, dtype, "", 0, length, len(head), len(payload), block, ())
    digests = tuple(
        digest(*_cut(head, payload, tail, lo, hi)) for lo, hi in map(item.block_range, range(item.block_count))
    )
    return _Piece(write_item.index, replace(item, digests=digests), (head, payload, tail), prove)


def _lay_out(name: str, batch: list[_Piece]) -> tuple[list[_Piece], list[Buffer]]:
    """Give each piece its place in the object; returns them and the object's bytes, tensors uncopied."""
    placed: list[_Piece] = []
    buffers: list[Buffer] = []
    start = 0
    for piece in batch:
        placed.append(replace(piece, item=replace(piece.item, object=name, start=start)))
        head, payload, tail = piece.parts
        if len(payload) > SMALL_BYTES:
            buffers += [head, payload, tail]
        else:  # many tiny pieces cost a client more than one copy does
            buffers.append(b"".join((head, payload, tail)))
        start += piece.item.length
    return placed, buffers


def _cut(head: bytes, payload: memoryview, tail: bytes, lo: int, hi: int) -> Iterator[Buffer]:
    """Bytes [lo, hi) of head + payload + tail, as views."""
    for part in (memoryview(head), payload, memoryview(tail)):
        if lo < len(part) and hi > 0:
            yield part[max(lo, 0) : hi]
        lo, hi = lo - len(part), hi - len(part)


def _planned(metadata: Metadata) -> Iterator[tuple[str, MetadataIndex]]:
    for key, md in metadata.state_dict_metadata.items():
        if isinstance(md, TensorStorageMetadata):
            for chunk in md.chunks:
                yield key, MetadataIndex(key, chunk.offsets)
        else:
            yield key, MetadataIndex(key)


def _versions() -> dict[str, str]:
    try:
        own = version("torchrelay")
    except PackageNotFoundError:
        own = "unknown"
    return {"torchrelay": own, "torch": torch.__version__, "python": platform.python_version()}
