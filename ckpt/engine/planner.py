"""DCP's planners with three changes: values are atomic, a snapshot replaces the live state, loads report what differs.

DCP de-duplicates a nested value leaf by leaf, each leaf possibly from another rank; here one value is one item.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType

from ckpt.engine.fingerprint import partial
from ckpt.engine.frame import owned
from ckpt.errors import Mismatch, Refused, Unsafe
from ckpt.format.fingerprint import Box, Partial

StateDict = dict[str, Any]
Replica = tuple[tuple[int, ...], str, bytes]


@dataclass(frozen=True, slots=True)
class Atomic:
    """A value that is stored and restored as one piece: plain data, possibly with tensors in it."""

    value: Any


class Snapshot(DefaultSavePlanner):
    """A copy of this rank's share of a state, and the plan that says where it belongs.

    Build it on the thread that trains: on return nothing refers to live tensors any more, so that training may
    go on while another thread writes. ``create_global_plan`` is called on the coordinator only.
    """

    def __init__(self, state: StateDict) -> None:
        super().__init__(flatten_state_dict=True)
        self.set_up_planner(state, None, False)
        self.local_plan: SavePlan = self.create_local_plan()
        self._staged = {item.index: self._stage(item) for item in self.local_plan.items}
        self._parts: dict[MetadataIndex, Partial] = {}
        self.state_dict = {}  # let go of the live state

    def _stage(self, item: WriteItem) -> torch.Tensor | bytes:
        data = super().resolve_data(item)
        if isinstance(data, io.BytesIO):
            try:
                decode_value(io.BytesIO(data.getvalue()), item.index.fqn)
            except Unsafe as e:  # now, and not when it is needed
                raise Refused(e.message, hint="keep plain numbers, text, tensors, lists and dicts in it") from None
            return data.getvalue()
        copy = owned(data)
        return copy.clone() if copy.data_ptr() == data.data_ptr() else copy

    def part(self, item: WriteItem) -> Partial:
        """What a staged tensor chunk adds to its tensor's fingerprint; computed once. Any thread but one at a time."""
        if item.index not in self._parts:
            data, chunk = self._staged[item.index], item.tensor_data
            assert isinstance(data, torch.Tensor)
            assert chunk is not None
            self._parts[item.index] = partial(data, tuple(chunk.size), tuple(chunk.chunk.offsets))
        return self._parts[item.index]

    def parts(self) -> dict[str, dict[Box, Partial]]:
        """The same of all tensor chunks, by name and box."""
        out: dict[str, dict[Box, Partial]] = {}
        for item in self.local_plan.items:
            if (chunk := item.tensor_data) is not None:
                box = tuple(chunk.chunk.offsets), tuple(chunk.chunk.sizes)
                out.setdefault(item.index.fqn, {})[box] = self.part(item)
        return out

    def replicas(self) -> dict[str, Replica]:
        """What this rank holds of each tensor that is not sharded: shape, dtype, and its fingerprint's sums."""
        out: dict[str, Replica] = {}
        for item in self.local_plan.items:
            data = self._staged[item.index]
            if item.type == WriteItemType.TENSOR and isinstance(data, torch.Tensor):
                out[item.index.fqn] = (tuple(data.shape), dtype_name(data.dtype), self.part(item).encode())
        return out

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 (DCP's name)
        """Turn a value into bytes that ``torch.load(weights_only=True)`` reads back."""
        if write_item.type == WriteItemType.BYTE_IO and isinstance(object, Atomic):
            object = object.value  # noqa: A001
        return super().transform_object(write_item, object)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Give the copied data of one item of the final plan."""
        # the global plan adds a chunk number to the index; equality of MetadataIndex ignores it
        data = self._staged[write_item.index]
        return io.BytesIO(data) if isinstance(data, bytes) else data


class Target(DefaultLoadPlanner):
    """Where a step is loaded to: a flat dict from key to tensor, or to None where a value will be put.

    Tensors are filled in place; values are decoded with torch's allow-list and nothing else.
    """

    def __init__(self, flat: StateDict) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.flat = flat

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode one value into the flat dict. Raises ``Unsafe`` for anything outside the allow-list."""
        self.flat[read_item.dest_index.fqn] = decode_value(value, read_item.dest_index.fqn)


def decode_value(data: io.BytesIO, key: str) -> Any:
    """Decode the bytes of a value with torch's ``weights_only`` allow-list."""
    try:
        return torch.load(data, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:  # what lack of memory raises says nothing about the value
        raise Unsafe(f"value {key!r} is outside what may be loaded: {str(e).splitlines()[0][:200]}") from None


def compare_keys(flat: Mapping[str, Any], metadata: Metadata, ignore: Iterable[str] = ()) -> None:
    """Check that a target and a step have the same keys, shapes and dtypes; every difference is named.

    ``ignore`` are keys of the step that the target leaves out on purpose. Raises ``Mismatch``.
    """
    saved = metadata.state_dict_metadata
    differing = {k: list(_difference(flat[k], saved[k])) for k in sorted(flat.keys() & saved.keys())}
    facts = [("missing", f"{k}: in memory, not in the step") for k in sorted(flat.keys() - saved.keys())]
    facts += [
        ("unexpected", f"{k}: in the step, not in memory") for k in sorted(saved.keys() - flat.keys() - set(ignore))
    ]
    total = len(flat.keys() | (saved.keys() - set(ignore)))
    wrong = len(facts) + sum(map(bool, differing.values()))
    facts += [("differs", f"{key}: {d}") for key, found in differing.items() for d in found]
    if facts:
        shown = facts[:20] + ([("…", f"and {len(facts) - 20} more")] if len(facts) > 20 else [])
        raise Mismatch(
            f"{wrong} of {total} entries do not fit between the step and the state in memory",
            facts=shown,
            hint="build the same model and optimizer as when the step was saved, or start a new run URL",
        )


def _difference(live: Any, saved: TensorStorageMetadata | BytesStorageMetadata) -> Iterable[str]:
    if isinstance(live, torch.Tensor) != isinstance(saved, TensorStorageMetadata):
        yield "a tensor on one side, a value on the other"
    elif isinstance(live, torch.Tensor):
        saved = cast(TensorStorageMetadata, saved)
        if live.size() != saved.size:
            yield f"shape in memory {tuple(live.size())}, in the step {tuple(saved.size)}"
        if live.dtype != saved.properties.dtype:
            yield f"dtype in memory {live.dtype}, in the step {saved.properties.dtype} (casts are not made silently)"


def dtype_name(dtype: torch.dtype) -> str:
    """The name used in manifests: ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
