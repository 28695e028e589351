"""Commit somebody else's checkpoint as a step of a run: check → claim → write → compare → base → commit.

The source is only read, three times: its checksums, its bytes, and its bytes again when what was written is compared
with it. A source that is damaged is refused before anything is claimed.
"""

from __future__ import annotations

import io
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ckpt import catalog
from ckpt.catalog import Catalog, Listing
from ckpt.engine.writer import ObjectWriter
from ckpt.errors import Damaged, ObjectMissing, Refused
from ckpt.foreign.pieces import Advance, as_tensor, decode, encode, fingerprint, put, same
from ckpt.foreign.source import PIECE_BYTES, Names, Path, Source, assemble
from ckpt.foreign.step import Step
from ckpt.format import boxes
from ckpt.format.fields import DTYPE_BYTES
from ckpt.format.layout import Attempt
from ckpt.format.manifest import ADOPTED, Manifest, dump, load_claim, load_commit, load_manifest
from ckpt.store.contract import Store
from ckpt.values import value_digest

GROUP_BYTES = 64 << 20  # written at once: one object and its index, as if by a rank of its own
ALIVE_S = 24 * 3600.0  # a run that was claimed or saved since then may still be running
_PER_RANK = re.compile(r"\.rank(\d{5})$")


@dataclass(frozen=True, slots=True)
class Adopted:
    """A committed step that came from elsewhere. ``joined`` are values that were one object and are one again."""

    step: int
    attempt: str
    tensors: int
    values: int
    bytes: int
    joined: tuple[str, ...]
    fingerprint: str


def adopt(source: Source, store: Store, *, step: int | None, names: Names, takeover: bool, advance: Advance) -> Adopted:
    """Commit ``source`` as ``step`` of the run at ``store``; on return it is durable, and was compared.

    Extra memory: about ``GROUP_BYTES`` and a few pieces. Raises ``Damaged`` or ``Unsafe`` for a bad source before
    anything is written, ``Refused`` where a step that counts is newer or the run may still be alive, ``Superseded``
    where another start came in between.
    """
    named = names.choose(source)
    kept = {old: new for old, new in named.items() if old in source.tensors}
    values, paths, joined = _values(source, names, named)
    for old in kept:  # opens every frame, which compares its checksums
        for chunk in source.chunks(old):
            source.fetch(old, chunk, 0, 0)
    records = Catalog(store)
    listing = records.listing()
    _place(records, listing, step)
    if not takeover:
        _refuse_alive(store, listing)
    epoch = catalog.claim(store, world_size=1)
    listing = records.listing()
    catalog.check_not_superseded(store, epoch, listing.epochs)
    number, base = _place(records, listing, step)
    attempt = Attempt(number, epoch)
    writer = ObjectWriter.in_run(store, attempt)
    writer.set_up_storage_writer(True)
    feed = _Feed(source, {new: old for old, new in kept.items()}, values, advance)
    results = [writer.write(SavePlan(items, storage_data=n), feed) for n, items in enumerate(feed.groups())]
    ranks = [int(m[1]) + 1 for new in values if (m := _PER_RANK.search(new))]
    writer.publish(feed.describe(paths), results, world_size=max(ranks, default=1))
    assert writer.manifest is not None
    manifest = load_manifest(writer.manifest, attempt.prefix)
    manifest = replace(manifest, writer={**manifest.writer, ADOPTED: f"{source.kind} {source.where}"})
    _compare(source, Step(store, attempt.prefix, manifest), kept, values, manifest, advance)
    total = sum(r.size_in_bytes for group in results for r in group)
    catalog.write_base(store, epoch, base)
    catalog.commit(store, attempt, base, dump("manifest", manifest), total)
    return Adopted(number, str(attempt), len(kept), len(values), total, joined, manifest.fingerprint or "")


# --- where it goes --------------------------------------------------------------------------------------------


def _place(records: Catalog, listing: Listing, step: int | None) -> tuple[int, Attempt | None]:
    """The number of the step and what it builds on. Raises ``Refused`` where it would bury what is there."""
    url = records.store.url
    usable = records.usable(listing)
    base = records.newest_valid()
    if base is None and (listing.commits or any(records.base_of(e) for e in listing.with_base)):
        raise Refused(f"{url} has steps and none can be used", hint=f"ckpt ls {url} --all   |   take another URL")
    if base is not None and usable and usable[0] != base:
        raise Refused(f"step {usable[0].step} of {url} is newer than the newest valid one, {base.step}",
                      hint=f"ckpt validate {url}   |   take another URL: nothing is buried")  # fmt: skip
    if step is None and base is not None:
        raise Refused(f"{url} has steps up to {base.step}: say which one this is", hint=f"--step {base.step + 1}")
    number = step or 0
    if base is not None and number <= base.step:
        raise Refused(f"step {number} would not count: {url} has step {base.step} already",
                      hint=f"--step {base.step + 1} or higher   |   take another URL")  # fmt: skip
    return number, base


def _refuse_alive(store: Store, listing: Listing) -> None:
    """Refuse to take over from a start that may still be running."""
    newest = listing.newest_epoch
    if newest is None:
        return
    try:
        claim = load_claim(store.get(newest.claim_key), newest.claim_key)
        times = [claim.created]
        if mine := [a for a in listing.commits if a.epoch == newest]:
            times.append(load_commit(store.get(max(mine).commit_key), max(mine).commit_key).created)
    except (ObjectMissing, Damaged):
        return
    age = min((datetime.now(UTC) - datetime.fromisoformat(t)).total_seconds() for t in times)
    here = claim.host == socket.gethostname()
    if age < ALIVE_S and (claim.pid == os.getpid() or _runs(claim.pid) if here else True):
        if claim.pid == os.getpid() and here:
            return
        raise Refused(
            f"a job may still be writing to {store.url}: it would be superseded, and its next save would fail",
            facts=[("newest start", f"{newest} on {claim.host}, pid {claim.pid}"),
                   ("last sign", f"{age:.0f} s ago")],
            hint="stop it first; --takeover supersedes it",
        )  # fmt: skip


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


# --- what goes there ------------------------------------------------------------------------------------------


def _values(
    source: Source, names: Names, named: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Path], tuple[str, ...]]:
    """Values by their new names, the nested keys of every entry, and which values were put together.

    DCP flattens what has no tensors in it too; a State keeps it as one value. So the topmost part of a nested state
    that holds values only becomes one value: ``optim.param_groups.0.lr`` and its like are ``optim.param_groups``.
    """
    paths = {new: _as_in_a_state(names.path(source, old, new)) for old, new in named.items()}
    heads = {p[:n] for old, new in named.items() if old in source.tensors for p in [paths[new]] for n in range(len(p))}
    heads |= {p[:n] for new, p in paths.items() if _PER_RANK.search(new) for n in range(len(p))}
    whole: dict[Path, Any] = {}
    leaves: dict[str, Any] = {}
    kept = {new: p for old, new in named.items() if old in source.tensors for p in [paths[new]]}
    for old in source.values:
        if old not in named:
            continue
        path, value = paths[named[old]], decode(source.value(old), old)
        top = next((n for n in range(1, len(path)) if path[:n] not in heads), len(path))
        if top == len(path):
            leaves[named[old]] = value
            kept[named[old]] = path
        else:
            whole[path[:top]] = put(whole.get(path[:top]), path[top:], value)
    for path, value in whole.items():
        leaves[".".join(map(str, path))] = value
        kept[".".join(map(str, path))] = path
    return leaves, kept, tuple(sorted(".".join(map(str, p)) for p in whole))


def _as_in_a_state(path: Path) -> Path:
    """A flat name as a State nests it: entry, and what is below it."""
    return tuple(str(path[0]).split(".", 1)) if len(path) == 1 else path


class _Feed(DefaultSavePlanner):
    """Gives the writer one piece after the other, and then the metadata of all."""

    def __init__(self, source: Source, old: dict[str, str], values: dict[str, Any], advance: Advance) -> None:
        super().__init__()
        self._source, self._old, self._values, self._advance = source, old, values, advance

    def groups(self) -> Iterator[list[WriteItem]]:
        """Items in groups of bounded size; values come first."""
        group = [WriteItem(MetadataIndex(k), WriteItemType.BYTE_IO) for k in self._values]
        size = 0
        for name, old in self._old.items():
            tensor = self._source.tensors[old]
            for offsets, sizes in self._boxes(name):
                n = DTYPE_BYTES[tensor.dtype] * torch.Size(sizes).numel()
                if group and size + n > GROUP_BYTES:
                    yield group
                    group, size = [], 0
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                data = TensorWriteData(chunk, _properties(tensor.dtype), torch.Size(tensor.shape))
                group.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
                size += n
        if group:
            yield group

    def resolve_data(self, write_item: WriteItem) -> Any:
        """One piece as a tensor, or one value as bytes."""
        name = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(encode(self._values[name]))
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        old = self._old[name]
        data = assemble(self._source, old, (tuple(chunk.offsets), tuple(chunk.sizes)))
        self._advance(len(data))
        return as_tensor(data, self._source.tensors[old].dtype, tuple(chunk.sizes))

    def describe(self, paths: dict[str, Path]) -> Metadata:
        """DCP's description of all that was written."""
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            k: BytesStorageMetadata() for k in self._values
        }
        for name, old in self._old.items():
            tensor = self._source.tensors[old]
            chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in self._boxes(name)]
            entries[name] = TensorStorageMetadata(_properties(tensor.dtype), torch.Size(tensor.shape), chunks)
        return Metadata(entries, planner_data={k: paths.get(k, (k,)) for k in entries})

    def _boxes(self, name: str) -> Iterator[boxes.Box]:
        tensor = self._source.tensors[self._old[name]]
        return boxes.pieces(tensor.shape, DTYPE_BYTES[tensor.dtype], PIECE_BYTES)


def _properties(dtype: str) -> TensorProperties:
    return TensorProperties(dtype=getattr(torch, dtype))


def _compare(
    source: Source, written: Step, kept: dict[str, str], values: dict[str, Any], manifest: Manifest, advance: Advance
) -> None:
    """Read the source and the written step once more: both must be what the manifest says."""
    for old, new in kept.items():
        saved = manifest.tensors[new].fingerprint
        same(new, saved, fingerprint(written, new, advance), written.where)
        same(old, saved, fingerprint(source, old, advance), source.where)
    for name, value in values.items():
        found = value_digest(decode(written.value(name), name))
        same(name, value_digest(value), found, written.where)
