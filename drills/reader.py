"""Compares checkpoint folders byte by byte through PyTorch's own DCP reader; run as a script, in its own process.

It imports torch and nothing of this project, so that what it says does not rest on the code it judges. The
request comes as JSON on stdin, the answer leaves as JSON on stdout (see ``main``). ``.metadata`` is a pickle that
DCP loads as it is: use this only on folders that a command you started has written.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import struct
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

BATCH_BYTES = 256 << 20
MAX_DIFFERENCES = 16


def open_reader(url: str, options: dict[str, Any]) -> FileSystemReader:
    """A plain DCP reader of one checkpoint folder.

    For anything but local files this is ``FsspecReader``, which lives in a private module of torch; there is no
    public reader of object storage, and taking our own would make the toolkit judge itself.
    """
    if url.startswith("file://") or "://" not in url:
        return FileSystemReader(url.removeprefix("file://"))
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(url, **options)


class _RawValues(DefaultLoadPlanner):
    """Reads tensors as DCP does, and keeps values as the bytes that are stored, undecoded."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep the stored bytes."""
        self.state_dict[read_item.dest_index.fqn] = value.getvalue()


class UnreadableError(Exception):
    """DCP could not read one of the two folders; ``side`` says which."""

    def __init__(self, side: str, cause: BaseException) -> None:
        if isinstance(cause, CheckpointException):  # its own text is a stack of traces
            cause = next(iter(cause.failures.values()))[0]
        super().__init__(f"{type(cause).__name__}: {str(cause)[:400]}")
        self.side, self.lacks = side, isinstance(cause, ImportError)


class Folder:
    """One checkpoint folder: its keys, and their content on demand; ``side`` is "left" or "right"."""

    def __init__(self, side: str, url: str, options: dict[str, Any]) -> None:
        self._side, self._url, self._options = side, url, options
        try:
            metadata: Metadata = open_reader(url, options).read_metadata()
        except Exception as e:
            raise UnreadableError(side, e) from e
        self.entries = metadata.state_dict_metadata

    def kind(self, key: str) -> str:
        """ "tensor" or "value"."""
        return "tensor" if isinstance(self.entries[key], TensorStorageMetadata) else "value"

    def describe(self, key: str) -> str:
        """Dtype and shape of a tensor, "value" for a value."""
        entry = self.entries[key]
        if isinstance(entry, TensorStorageMetadata):
            return f"{str(entry.properties.dtype).removeprefix('torch.')} {list(entry.size)}"
        return "value"

    def bytes_of(self, key: str) -> int:
        """Bytes of a tensor; 0 for a value, whose size the metadata does not say."""
        entry = self.entries[key]
        if isinstance(entry, TensorStorageMetadata):
            return math.prod(entry.size) * entry.properties.dtype.itemsize
        return 0

    def load(self, keys: list[str]) -> dict[str, Any]:
        """Tensors and raw values of ``keys``."""
        target: dict[str, Any] = {}
        for key in keys:
            entry = self.entries[key]
            target[key] = (
                torch.empty(entry.size, dtype=entry.properties.dtype)
                if isinstance(entry, TensorStorageMetadata)
                else b""
            )
        try:
            reader = open_reader(self._url, self._options)
            load(target, storage_reader=reader, planner=_RawValues(), no_dist=True)
        except (Exception, CheckpointException) as e:  # the latter is no Exception
            raise UnreadableError(self._side, e) from e
        return target


def compare_folders(left: Folder, right: Folder) -> dict[str, Any]:
    """Every entry of both folders, compared.

    ``groups`` counts entries, and those that differ, by the first part of the key; ``differences`` describes the
    first ``MAX_DIFFERENCES`` of each group in the order of keys, ``different_keys`` names all.
    """
    both = sorted(left.entries.keys() & right.entries.keys())
    counts = {"tensors": 0, "values": 0, "bytes": 0}
    groups: dict[str, list[int]] = {}
    differences: list[dict[str, Any]] = []

    def note(key: str, difference: dict[str, Any] | None) -> None:
        group = groups.setdefault(key.split(".")[0], [0, 0])
        group[0] += 1
        if difference is not None:
            group[1] += 1
            differences.append({"key": key, **difference})

    for key in sorted(left.entries.keys() ^ right.entries.keys()):
        has = "left" if key in left.entries else "right"
        note(key, {"what": "missing", "in": "right" if has == "left" else "left"})
    alike = []
    for key in both:
        counts["tensors" if left.kind(key) == "tensor" else "values"] += 1
        counts["bytes"] += left.bytes_of(key)
        if left.describe(key) != right.describe(key):
            note(key, {"what": "layout", "left": left.describe(key), "right": right.describe(key)})
        else:
            alike.append(key)
    for batch in _batches(alike, left):
        a, b = left.load(batch), right.load(batch)
        for key in batch:
            note(key, _difference(left.kind(key), a[key], b[key]))
    differences.sort(key=lambda d: str(d["key"]))
    shown: list[dict[str, Any]] = []
    for _, same_group in itertools.groupby(differences, key=lambda d: str(d["key"]).split(".")[0]):
        shown += itertools.islice(same_group, MAX_DIFFERENCES)
    return {**counts, "groups": groups, "differences": shown, "different_keys": [d["key"] for d in differences]}


def _batches(keys: list[str], folder: Folder) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for key in keys:
        if batch and size + folder.bytes_of(key) > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(key)
        size += folder.bytes_of(key)
    if batch:
        yield batch


def _difference(kind: str, left: Any, right: Any) -> dict[str, Any] | None:
    return tensor_difference(left, right) if kind == "tensor" else value_difference(left, right)


def tensor_difference(left: torch.Tensor, right: torch.Tensor) -> dict[str, Any] | None:
    """The first element whose bytes differ, with both values; None when all bytes are equal (NaN too)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return {
            "what": "layout",
            "left": f"{left.dtype} {list(left.shape)}",
            "right": f"{right.dtype} {list(right.shape)}",
        }
    a, b = (t.detach().contiguous().reshape(-1) for t in (left, right))
    raw_a, raw_b = (t.view(torch.uint8).reshape(len(t), -1) if len(t) else t.view(torch.uint8) for t in (a, b))
    if torch.equal(raw_a, raw_b):
        return None
    wrong = (raw_a != raw_b).any(dim=1)
    first = int(wrong.nonzero()[0])
    index = [int(i) for i in np.unravel_index(first, tuple(left.shape))] if left.dim() else []
    return {
        "what": "element", "index": index, "elements": int(wrong.sum()), "of": len(a),
        "left": _shown(a[first], raw_a[first]), "right": _shown(b[first], raw_b[first]),
    }  # fmt: skip


def _shown(element: torch.Tensor, raw: torch.Tensor) -> str:
    return f"{element.item()!r} (0x{bytes(raw.tolist())[::-1].hex()})"


def value_difference(left: bytes, right: bytes) -> dict[str, Any] | None:
    """Where two stored values differ; equal bytes, or equal after decoding, are no difference."""
    if left == right:
        return None
    try:
        a, b = decode(left), decode(right)
    except Exception as e:  # whatever the decoder refuses: the two cannot be told apart or together
        return {"what": "undecodable", "left": f"{len(left)} bytes", "right": f"{len(right)} bytes",
                "reason": str(e).splitlines()[0][:200] if str(e) else type(e).__name__}  # fmt: skip
    found = _first_unlike(a, b, "")
    return None if found is None else {"what": "value", "at": found[0], "left": found[1], "right": found[2]}


def decode(data: bytes) -> Any:
    """A stored value, decoded without running code from it: only tensors, numpy arrays and plain containers."""
    rebuild: Any = np.zeros(0).__reduce__()[0]  # numpy moved it between versions, so an array is asked for it
    numbers = [type(np.dtype(t)) for t in ("u1", "u4", "u8", "i4", "i8", "f4", "f8", "?")]
    with torch.serialization.safe_globals([rebuild, np.ndarray, np.dtype, *numbers]):
        return torch.load(io.BytesIO(data), weights_only=True)


def _first_unlike(a: Any, b: Any, path: str) -> tuple[str, str, str] | None:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype == b.dtype:
        a, b = torch.from_numpy(np.ascontiguousarray(a)), torch.from_numpy(np.ascontiguousarray(b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        found = tensor_difference(a, b)
        return found if found is None else (f"{path}{found.get('index', '')}", found["left"], found["right"])
    if type(a) is not type(b):
        return path, _short(a), _short(b)
    if isinstance(a, dict):
        return _first_unlike_dict(a, b, path)
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return path, f"{len(a)} entries", f"{len(b)} entries"
        pairs = ((f"{path}[{n}]", x, y) for n, (x, y) in enumerate(zip(a, b, strict=True)))
        return next((f for p, x, y in pairs if (f := _first_unlike(x, y, p))), None)
    same = struct.pack("<d", a) == struct.pack("<d", b) if isinstance(a, float) else bool(a == b)
    return None if same else (path, _short(a), _short(b))


def _first_unlike_dict(a: dict[Any, Any], b: dict[Any, Any], path: str) -> tuple[str, str, str] | None:
    for key in [*a, *(k for k in b if k not in a)]:
        where = f"{path}.{key}" if path else str(key)
        if key not in a or key not in b:
            return where, "missing" if key not in a else _short(a[key]), "missing" if key not in b else _short(b[key])
        if found := _first_unlike(a[key], b[key], where):
            return found
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def main() -> None:
    """Answer one request.

    Request: ``{"pairs": [{"step", "left", "right"}], "options": {...}}``, left and right being folder URLs.
    Answer: ``{"pairs": [{"step", "left", "right", "tensors", "values", ..., "error": null}], "foreign": [...]}``;
    an ``error`` is ``{"side", "text", "lacks"}``, ``lacks`` when a library is not installed; ``foreign`` names
    modules of the toolkit that were imported in spite of the rule (must be empty).
    """
    request = json.load(sys.stdin)
    options = request.get("options") or {}
    answer = []
    for pair in request["pairs"]:
        result: dict[str, Any] = {**pair, "error": None}
        try:
            left, right = (Folder(side, pair[side], options) for side in ("left", "right"))
            result.update(compare_folders(left, right))
        except UnreadableError as e:  # a finding about that pair, not the end of the comparison
            result["error"] = {"side": e.side, "text": str(e), "lacks": e.lacks}
        answer.append(result)
    foreign = sorted({m.split(".")[0] for m in sys.modules} & {"ckpt", "elastic", "drills"})
    json.dump({"pairs": answer, "foreign": foreign, "torch": str(torch.__version__)}, sys.stdout)


if __name__ == "__main__":
    import warnings

    warnings.filterwarnings("ignore")  # DCP warns that there is no process group, which is the point here
    main()
