"""``ObjectReader``: DCP's StorageReader on any store. Fetches the blocks that a slice needs and checks each one.

No byte reaches a target before the block that holds it has been compared with the digest made when it was saved.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckpt.engine.planner import decode_value
from ckpt.errors import Damaged, Incomplete, Mismatch, NotFound, ObjectMissing, Refused
from ckpt.format import dcpmeta, layout, torchpickle
from ckpt.format.blocks import Item, row_span
from ckpt.format.digest import Buffer, digest
from ckpt.format.fields import DTYPE_BYTES
from ckpt.format.manifest import Manifest, load_manifest
from ckpt.store import open_store
from ckpt.store.contract import Store

BATCH_BYTES = 128 << 20  # fetched and checked at once
READS_IN_FLIGHT = 4
_log = logging.getLogger("ckpt.load")


@dataclass(frozen=True, slots=True)
class _Need:
    """One read item: payload bytes [lo, hi) of an item of the index."""

    read: ReadItem
    item: Item
    lo: int
    hi: int


class ObjectReader(StorageReader):
    """Read one checkpoint folder that ``ObjectWriter`` or a run wrote; every block is verified.

    Use it with any ``dcp.load(state_dict, storage_reader=ckpt.ObjectReader(url))``; DCP's collectives and time-outs
    hold. Raises ``NotFound`` where there is no manifest, ``Damaged`` naming object, tensor and rank where bytes
    differ in two fresh reads, ``StorageError`` where the store fails.
    """

    def __init__(self, url: str, *, client: str | None = None, **storage_options: Any) -> None:
        self._options = {"client": client, **storage_options}
        self._attach(open_store(url, **self._options), "", None)

    @classmethod
    def in_run(cls, store: Store, prefix: str, manifest: Manifest | None) -> ObjectReader:
        """Make a reader for a folder below a store; ``manifest`` where it was read and checked already."""
        self = cls.__new__(cls)
        self._options = {}
        self._attach(store, prefix, manifest)
        return self

    def _attach(self, store: Store, prefix: str, manifest: Manifest | None) -> None:
        self._store, self._prefix, self._manifest = store, prefix, manifest
        self._metadata: Metadata | None = None
        self._indexes: dict[str, dict[tuple[str, tuple[int, ...] | None], Item]] = {}

    # --- DCP's sequence of calls --------------------------------------------------------------------------

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any URL or path."""
        return bool(str(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Point the reader at another folder; the storage options given at the start stay in force."""
        if checkpoint_id is not None:
            self._attach(open_store(str(checkpoint_id), **self._options), "", None)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``.metadata``, verified against the manifest, through an allow-list."""
        name = layout.METADATA
        record = next((o for o in self.manifest.objects if o.name == name), None)
        if record is None:
            raise Damaged(f"{self._where}: the manifest names no {name}")
        data = self._verified(name, record.bytes, record.digest, rank=0)
        metadata = dcpmeta.read(data, f"{self._where}/{name}", _torch_class)
        if not isinstance(metadata, Metadata):
            raise Damaged(f"{self._where}/{name} holds a {type(metadata).__name__}, not DCP metadata")
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keep the metadata, which says where each chunk lies."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to prepare."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to prepare."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch, verify and hand over every item of the plan."""
        future: Future[None] = Future()
        try:
            self.read(plan, planner)
            future.set_result(None)
        except Exception as e:
            future.set_exception(e)  # type: ignore[arg-type]
        return future

    # --- what it does -------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return f"{self._store.url.rstrip('/')}/{self._prefix}".rstrip("/")

    @property
    def manifest(self) -> Manifest:
        """The folder's manifest, read once."""
        if self._manifest is None:
            key = self._prefix + layout.MANIFEST
            try:
                data = self._store.get(key)
            except ObjectMissing:
                raise NotFound(
                    f"{self._where} holds no {layout.MANIFEST}: not a committed torchrelay checkpoint",
                    hint=f"ckpt ls {self._store.url}   |   a plain DCP folder is read by DCP's own FileSystemReader",
                ) from None
            manifest = load_manifest(data, f"{self._where}/{layout.MANIFEST}")
            if manifest.references and not self._prefix:
                raise Refused(f"{self._where} refers to objects of {len(manifest.references)} other steps of its run",
                              hint="open the run: ckpt.open(url).load(state, step)   |   ckpt export")  # fmt: skip
            # sizes are compared before any of them is believed: nothing is allocated for what is not there
            if facts := manifest.differing_objects(self._prefix, self._store.list):
                raise Incomplete(
                    f"{self._where}: {len(facts)} of {len(manifest.objects)} objects differ", facts=facts[:20]
                )
            self._manifest = manifest
        return self._manifest

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read this rank's items into the planner's targets. Any thread; no collectives."""
        needs = sorted(map(self._need, plan.items), key=lambda n: (n.item.object, n.item.start, n.lo))
        with ThreadPoolExecutor(READS_IN_FLIGHT, thread_name_prefix="ckpt-read") as pool:
            for batch in _batches(needs):
                payloads = pool.map(lambda n: self.fetch(n.item, n.lo, n.hi), batch)
                for need, payload in zip(batch, payloads, strict=True):
                    _hand_over(need, payload, planner)

    def _need(self, read: ReadItem) -> _Need:
        item = self.find(read.storage_index)
        if read.type is LoadItemType.BYTE_IO or item.dtype is None:
            return _Need(read, item, 0, item.payload_length)
        rows = (read.storage_offsets[0], read.lengths[0]) if item.shape else (0, 1)
        return _Need(read, item, *row_span(item.shape, DTYPE_BYTES[item.dtype], *rows))

    def value(self, name: str) -> Any:
        """A value that is no tensor, decoded with torch's allow-list. Raises ``Unsafe``."""
        item = self.find(MetadataIndex(name))
        return decode_value(io.BytesIO(self.fetch(item, 0, item.payload_length)), name)

    def chunks(self, name: str) -> list[Item]:
        """The stored chunks of a tensor, in the order of their offsets."""
        assert self._metadata is not None, "set_up_storage_reader comes first"
        stored = [i for i in self._metadata.storage_data if i.fqn == name]
        return sorted(map(self.find, stored), key=lambda i: i.offsets or ())

    def find(self, index: MetadataIndex) -> Item:
        """The item of the rank's index that a chunk of the metadata points to; any thread but one at a time."""
        assert self._metadata is not None, "set_up_storage_reader comes first"
        info = self._metadata.storage_data[index]
        holder, _ = layout.split_name(info.relative_path)
        rank = layout.data_rank(info.relative_path)
        if rank is None:
            raise Damaged(f"{self._where}: {index.fqn} points to {info.relative_path!r}, which is no data object")
        name = layout.reference_name(holder, layout.index_name(rank))
        if name not in self._indexes:
            self._indexes[name] = self._read_index(name, rank)
        key = (index.fqn, None if index.offset is None else tuple(index.offset))
        item = self._indexes[name].get(key) or self._indexes[name].get((index.fqn, None))
        if item is None or (item.object, item.start, item.length) != (
            info.relative_path,
            info.offset,
            info.length,
        ):
            raise Damaged(f"{self._where}: {name} and {layout.METADATA} disagree about {index.fqn}")
        return item

    def _read_index(self, name: str, rank: int) -> dict[tuple[str, tuple[int, ...] | None], Item]:
        record = next((o for o in self.manifest.objects if o.name == name), None)
        if record is None:
            raise Damaged(f"{self._where}: the manifest names no {name}")
        data = self._verified(name, record.bytes, record.digest, rank)
        return {(i.fqn, i.offsets): i for i in self.manifest.load_index(data, name, f"{self._where}/{name}").items}

    def _verified(self, name: str, size: int, want: str, rank: int) -> bytes:
        """A whole small object whose bytes are proven; read twice before it is called damaged."""
        found: list[str] = []
        for _ in range(2):
            try:
                data = self._store.get(layout.object_key(self._prefix, name), max_bytes=max(size, 1))
            except ObjectMissing:
                raise Incomplete(f"{self._where}/{name} is missing", facts=[("written by", f"rank {rank}")]) from None
            if len(data) == size and digest(data) == want:
                return data
            found.append(f"{digest(data)} in {len(data)} bytes")
        raise _damaged(f"{self._where}/{name}", None, rank, f"{want} in {size} bytes", found)

    def fetch(self, item: Item, first: int, last: int) -> memoryview:
        """Payload bytes [first, last) of an item, every block that holds one of them verified. Any thread."""
        numbers = item.blocks_covering(first, last)
        spans = [item.block_range(n) for n in numbers]
        begin, end = spans[0][0], spans[-1][1]  # blocks follow one another: one range
        (got,) = self._get(item.object, [(begin, end)])
        data = memoryview(got).cast("B")
        for n, (lo, hi) in zip(numbers, spans, strict=True):
            if (found := digest(data[lo - begin : hi - begin])) != item.digests[n]:
                piece = self._read_again(item, n, (lo, hi), found)
                data = memoryview(b"".join((data[: lo - begin], piece, data[hi - begin :])))
        skip = item.start + item.payload_start + first - begin
        return data[skip : skip + last - first]

    def _read_again(self, item: Item, n: int, span: tuple[int, int], first: str) -> Buffer:
        """Tell a fault on the way from damage at rest: only the same wrong bytes twice are proof."""
        (piece,) = self._get(item.object, [span])
        if (second := digest(piece)) == item.digests[n]:
            _log.warning(
                "%s/%s: block %d of %s was wrong once and right when read again",
                self._where,
                item.object,
                n,
                item.fqn,
            )
            return piece
        place = f"{item.fqn}, block {n} of {item.block_count}, bytes {span[0]}–{span[1]}"
        raise _damaged(f"{self._where}/{item.object}", place,
                       layout.data_rank(item.object), item.digests[n], [first, second])  # fmt: skip

    def _get(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        try:
            return self._store.get_ranges(layout.object_key(self._prefix, name), ranges)
        except ObjectMissing:
            raise Incomplete(
                f"{self._where}/{name} is missing", facts=[("written by", f"rank {layout.data_rank(name)}")]
            ) from None


def _damaged(where: str, item: str | None, rank: int | None, want: str, found: list[str]) -> Damaged:
    return Damaged(
        "stored bytes differ from what was saved",
        facts=[("object", where), *([("item", item)] if item else []), ("written by", f"rank {rank}"),
               ("expected", f"xxh3-128 {want}"), ("found", " and ".join(dict.fromkeys(found)))],
    )  # fmt: skip


def _batches(needs: Iterable[_Need]) -> Iterable[list[_Need]]:
    batch: list[_Need] = []
    size = 0
    for need in needs:
        batch.append(need)
        size += need.hi - need.lo
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _hand_over(need: _Need, payload: memoryview, planner: LoadPlanner) -> None:
    """Give the planner a value's bytes, or copy a verified slice into its target tensor."""
    read, item = need.read, need.item
    if read.type is LoadItemType.BYTE_IO:
        torchpickle.check_value(payload, f"value {item.fqn!r}")  # DCP's own planner unpickles whatever it is given
        planner.load_bytes(read, io.BytesIO(payload))
        return
    assert item.dtype is not None
    dtype = getattr(torch, item.dtype)
    target = planner.resolve_tensor(read).detach()
    if tuple(target.shape) != tuple(read.lengths) or target.dtype != dtype:
        raise Mismatch(
            f"{item.fqn}: {dtype} {tuple(read.lengths)} in the step, {target.dtype} {tuple(target.shape)} in memory",
            hint="load it in the dtype in which it was saved, then cast: casts are not made silently",
        )
    rows = (read.lengths[0], *item.shape[1:]) if item.shape else ()
    cut = (slice(None), *(slice(o, o + n) for o, n in zip(read.storage_offsets[1:], read.lengths[1:], strict=True)))
    whole = _WHOLE.get(dtype.itemsize)
    if whole is not None and target.device.type == "cpu":  # numpy takes read-only and unaligned memory as it is
        source = np.frombuffer(payload, whole[1]).reshape(rows)
        np.copyto(target.view(whole[0]).numpy(), source[cut] if rows else source)
    else:
        owned = torch.frombuffer(bytearray(payload), dtype=dtype) if payload else torch.empty(0, dtype=dtype)
        target.copy_(owned.reshape(rows)[cut] if rows else owned.reshape(rows))
    planner.commit_tensor(read, target)


# bits are copied as integers of the same size, whatever the dtype
_WHOLE: dict[int, tuple[torch.dtype, Any]] = {
    1: (torch.int8, np.int8), 2: (torch.int16, np.int16), 4: (torch.int32, np.int32), 8: (torch.int64, np.int64)
}  # fmt: skip


def _torch_class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
