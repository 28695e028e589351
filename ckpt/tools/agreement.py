"""Whether an index says what the manifest and DCP's metadata say. Pure."""

from __future__ import annotations

from ckpt.format.blocks import Item
from ckpt.format.manifest import Manifest

Places = dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]


def contradiction(item: Item, manifest: Manifest, places: Places | None) -> str | None:
    """What an index says against the manifest or ``.metadata``; takes the item's place out of ``places``."""
    if places is not None and places.pop((item.fqn, item.offsets), None) != (item.object, item.start, item.length):
        return "DCP's metadata has this in another place, or not at all"
    if item.dtype is not None:
        tensor = manifest.tensors.get(item.fqn)
        if tensor is None or tensor.dtype != item.dtype or not _inside(item, tensor.shape):
            return "the manifest has no tensor that this could be a chunk of"
        return None
    value = manifest.values.get(item.fqn)
    if value is None:
        return "the manifest has no such value"
    is_one_block = (item.block_count, item.payload_length) == (1, item.length)
    return "the manifest has another digest of this value" if is_one_block and item.digests[0] != value.digest else None


def is_place(item: Item, places: Places | None) -> bool:
    """Whether ``.metadata`` says that the step's chunk or value lies here."""
    return places is not None and places.get((item.fqn, item.offsets)) == (item.object, item.start, item.length)


def _inside(item: Item, shape: tuple[int, ...]) -> bool:
    offsets = item.offsets or ()
    return len(offsets) == len(shape) and all(o + n <= s for o, n, s in zip(offsets, item.shape, shape, strict=True))
