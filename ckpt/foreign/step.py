"""A step of ours as a source: every block is compared with its digest before a byte of it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ckpt.engine.reader import ObjectReader
from ckpt.foreign.source import Path, Tensor
from ckpt.format import torchpickle
from ckpt.format.boxes import Box
from ckpt.format.manifest import Manifest
from ckpt.store.contract import Buffer, Store


class Step:
    """A committed step, or a folder that ``ObjectWriter`` wrote, to copy from."""

    kind = "torchrelay"
    proof = "XXH3-128 of every block, and the fingerprint of each tensor"

    def __init__(self, store: Store, prefix: str, manifest: Manifest) -> None:
        self.where = f"{store.url.rstrip('/')}/{prefix}".rstrip("/")
        self.manifest = manifest
        self._reader = ObjectReader.in_run(store, prefix, manifest)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, True)
        self._chunks: dict[str, list[Box]] = {
            k: [(tuple(c.offsets), tuple(c.sizes)) for c in md.chunks]
            for k, md in metadata.state_dict_metadata.items()
            if isinstance(md, TensorStorageMetadata)
        }
        self.tensors: Mapping[str, Tensor] = {k: Tensor(t.dtype, t.shape) for k, t in manifest.tensors.items()}
        self.values: Sequence[str] = tuple(manifest.values)
        self.paths: Mapping[str, Path] = metadata.planner_data or {}

    def chunks(self, name: str) -> Sequence[Box]:
        """The boxes in which a tensor is stored."""
        return self._chunks[name]

    def fetch(self, name: str, chunk: Box, lo: int, hi: int) -> Buffer:
        """Bytes [lo, hi) of a chunk's elements, verified."""
        return self._reader.fetch(self._reader.find(MetadataIndex(name, chunk[0])), lo, hi)

    def value(self, name: str) -> bytes:
        """A value's bytes, verified and proven harmless."""
        item = self._reader.find(MetadataIndex(name))
        data = bytes(self._reader.fetch(item, 0, item.payload_length))
        torchpickle.check_value(data, f"value {name!r} of {self.where}")
        return data
