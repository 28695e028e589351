"""Incremental saves: what a committed step holds already is referred to, if its bytes are the same, and not written.

The coordinator offers each rank the places of its chunks in the step before; the rank compares its staged bytes with
the digests recorded there, head and tail of the frame included. A reference always names the attempt that holds the
bytes, so there are no chains.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from ckpt.engine.reader import ObjectReader
from ckpt.engine.torchapi import StorageInfo
from ckpt.errors import CkptError, Incomplete
from ckpt.format import layout
from ckpt.format.blocks import Item
from ckpt.format.layout import Attempt
from ckpt.format.manifest import Manifest, ObjectRecord
from ckpt.store.contract import Store

WORTH = 0.25  # of an object's bytes must be unchanged: what is referred to stays on the store as a whole
_log = logging.getLogger("ckpt.save")


@dataclass(frozen=True, slots=True)
class Offer:
    """Where one rank's chunks lie in the step before, as the new attempt would name it. It travels to that rank."""

    places: Mapping[MetadataIndex, StorageInfo] = field(default_factory=dict)
    manifest: Manifest | None = None  # of the step before; its objects renamed, and only those that are offered

    def items(self, store: Store, prefix: str) -> dict[MetadataIndex, Item]:
        """The offered items with their digests, from verified indexes; none where one cannot be read."""
        if self.manifest is None:
            return {}
        reader = ObjectReader.in_run(store, prefix, self.manifest)
        reader.set_up_storage_reader(Metadata(state_dict_metadata={}, storage_data=dict(self.places)), False)
        try:
            return {index: reader.find(index) for index in self.places}
        except CkptError as e:
            _log.warning("all is written again, as the step before cannot be referred to: %s", e)
            return {}

    def records(self, items: Iterable[Item]) -> list[ObjectRecord]:
        """Of the objects that hold these items, and of their indexes."""
        assert self.manifest is not None
        names = {i.object for i in items}
        names |= {_index_of(name) for name in names}
        return [o for o in self.manifest.objects if o.name in names]

    def worth(self, same: Sequence[Item]) -> set[str]:
        """Names of the objects of which enough is unchanged."""
        if self.manifest is None:
            return set()
        sums: dict[str, int] = {}
        for item in same:
            sums[item.object] = sums.get(item.object, 0) + item.length
        return {o.name for o in self.manifest.objects if sums.get(o.name, -1) >= WORTH * o.bytes}


NOTHING = Offer()


@dataclass(frozen=True, slots=True)
class Previous:
    """The newest committed step of this start, or the one that it resumed. On the coordinator."""

    attempt: Attempt
    manifest: Manifest
    metadata: Metadata

    def offer(self, plan: SavePlan, unwanted: Collection[Attempt]) -> Offer:
        """What of a rank's plan the step may hold already; nothing that lies in one of the ``unwanted`` attempts."""
        places = {}
        stored = self.metadata.storage_data or {}
        for item in plan.items:
            info = stored.get(item.index) if item.type != WriteItemType.BYTE_IO else None
            if info is not None and self._holder(info.relative_path) not in unwanted:
                places[item.index] = StorageInfo(self._named(info.relative_path), info.offset, info.length)
        if not places:
            return NOTHING
        names = {info.relative_path for info in places.values()}
        names |= {_index_of(name) for name in names}
        objects = (replace(o, name=self._named(o.name)) for o in self.manifest.objects)
        offered = tuple(o for o in objects if o.name in names)
        return Offer(places, replace(self.manifest, objects=offered, tensors={}, values={}, topology={}))

    def check(self, metadata: Metadata, manifest: Manifest) -> None:
        """Compare the fingerprints of tensors that are wholly referred to. Raises ``Incomplete``."""
        referred = {i.fqn: True for i in metadata.storage_data}
        for index, info in metadata.storage_data.items():
            referred[index.fqn] &= layout.split_name(info.relative_path)[0] is not None
        for key, record in manifest.tensors.items():
            if referred[key] and (before := self.manifest.tensors.get(key)) != record:
                raise Incomplete(f"{key} was not written, as its bytes are those of {self.attempt}, and yet differs",
                                 facts=[("then", f"{before}"), ("now", f"{record}")])  # fmt: skip

    def _holder(self, name: str) -> Attempt:
        return layout.split_name(name)[0] or self.attempt

    def _named(self, name: str) -> str:
        """An object of the step before as another attempt names it."""
        return layout.reference_name(self._holder(name), layout.split_name(name)[1])


def _index_of(name: str) -> str:
    """The index that covers a data object."""
    rank = layout.data_rank(name)
    return layout.reference_name(layout.split_name(name)[0], layout.index_name(-1 if rank is None else rank))
