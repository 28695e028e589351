"""Damaged and hostile checkpoints of others: plain DCP folders and safetensors, and what the tools must say of them.

``statuses`` are the exit statuses of inspect, validate full, adopt and export; ``says`` is part of what the full
validation prints.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

CANARY = "/tmp/torchrelay-foreign-was-executed"
HUGE = 1 << 60
ALWAYS, BYTES, FULL = (1, 1, 1, 1), (0, 1, 1, 1), (0, 0, 0, 0)


class Runs:
    """What executes when it is unpickled by something careless."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {CANARY}",)


@dataclass(frozen=True)
class Recipe:
    """One checkpoint that somebody could be given."""

    name: str
    build: Callable[[Path], object]
    statuses: tuple[int, int, int, int]
    says: str


# --- plain DCP ------------------------------------------------------------------------------------------------


class Dcp:
    """A plain DCP folder as dcp.save leaves it, to be spoiled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        state = {"model": {"w": torch.arange(2000.0).reshape(40, 50), "b": torch.ones(3)}, "note": {"text": "x"}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=folder, no_dist=True)
        self.data = folder / "__0_0.distcp"
        self.metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())

    def place(self, key: str) -> Any:
        """Where an entry lies."""
        return next(info for index, info in self.metadata.storage_data.items() if index.fqn == key)

    def write_metadata(self) -> None:
        """Write the metadata as it is now."""
        (self.folder / ".metadata").write_bytes(pickle.dumps(self.metadata))

    def replace(self, key: str, item: bytes) -> None:
        """Put other bytes in an entry's place, at the file's end."""
        info = self.place(key)
        info.offset, info.length = self.data.stat().st_size, len(item)
        self.data.write_bytes(self.data.read_bytes() + item)
        self.write_metadata()

    def item(self, key: str) -> bytes:
        """The bytes of an entry."""
        info = self.place(key)
        return self.data.read_bytes()[info.offset : info.offset + info.length]


def frame(value: Any) -> bytes:
    """What torch.save writes."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def rezipped(item: bytes, change: Callable[[str, bytes], bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """A frame with other records, its checksums right."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(item)) as old, zipfile.ZipFile(out, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return out.getvalue()


def _pickled(data: bytes) -> Callable[[str, bytes], bytes]:
    return lambda name, old: data if name.endswith("data.pkl") else old


def _dcp(change: Callable[[Dcp], object]) -> Callable[[Path], object]:
    return lambda folder: change(Dcp(folder))


def _flip(folder: Dcp, key: str, at: int) -> None:
    data = bytearray(folder.data.read_bytes())
    data[folder.place(key).offset + at] ^= 8
    folder.data.write_bytes(data)


def _path(name: str) -> Callable[[Dcp], None]:
    def change(folder: Dcp) -> None:
        (folder.folder.parent / "x").write_bytes(folder.data.read_bytes())
        folder.place("model.w").relative_path = name
        folder.write_metadata()

    return change


def _set(key: str, **fields: int) -> Callable[[Dcp], None]:
    def change(folder: Dcp) -> None:
        vars(folder.place(key)).update(fields)
        folder.write_metadata()

    return change


def _sizes(sizes: list[int], size: list[int] | None = None) -> Callable[[Dcp], None]:
    def change(folder: Dcp) -> None:
        md = folder.metadata.state_dict_metadata["model.w"]
        md.chunks[0].sizes = torch.Size(sizes)
        md.size = torch.Size(size) if size else md.size
        folder.write_metadata()

    return change


def _overlapping(folder: Dcp) -> None:
    """A zip whose directory names one record twenty times: each would be unpacked."""
    item = frame(bytes(50_000))
    at = item.index(b"PK\x01\x02")
    directory = item[at : item.index(b"PK\x05\x06", at)]
    first = directory[: directory.index(b"PK\x01\x02", 4)]
    names = b"".join(first.replace(b"data.pkl", b"data.p%02d" % n) for n in range(20))
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 20, 20, len(names), at, 0)
    folder.replace("note.text", item[:at] + names + end)


def _many_entries(folder: Dcp) -> None:
    item = frame("x")
    at = item.index(b"PK\x06\x06")
    item = item[: at + 24] + struct.pack("<4Q", HUGE, HUGE, HUGE, 0) + item[at + 56 :]
    folder.replace("note.text", item)


BOMB = rezipped(frame(bytes(8 << 20)), lambda _, data: data, zipfile.ZIP_DEFLATED)
COPIES = b"\x80\x02c_codecs\nencode\nX\xe8\x03\x00\x00" + b"a" * 1000 + b"X\x06\x00\x00\x00latin1\x86q\x000"
COPIES += b"(c_codecs\nencode\nq\x01h\x00R" + b"h\x01h\x00R" * 50_000 + b"l."
STORAGE = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu\x8a\x08" + struct.pack("<q", HUGE) + b"tQK\x00K(K2\x86K2K\x01\x86\x89"
    b"ccollections\nOrderedDict\n)RtR."
)

DCP = [
    Recipe("untouched", _dcp(lambda f: None), FULL, "good"),
    Recipe("bit flipped in a tensor", _dcp(lambda f: _flip(f, "model.w", 3000)), BYTES, "model.w"),
    Recipe("bit flipped in a value", _dcp(lambda f: _flip(f, "note.text", 73)), BYTES, "note.text"),
    Recipe("bit flipped in a directory", _dcp(lambda f: _flip(f, "model.b", -30)), BYTES, "__0_0.distcp"),
    Recipe(
        ".metadata that runs a program",
        _dcp(lambda f: (f.folder / ".metadata").write_bytes(pickle.dumps(Runs()))),
        ALWAYS,
        "not on the allow-list",
    ),
    Recipe(
        "place that runs a program",
        _dcp(lambda f: (f.metadata.storage_data.update({MetadataIndex("x"): Runs()}), f.write_metadata())),
        ALWAYS,
        "not on the allow-list",
    ),
    Recipe("value that runs a program", _dcp(lambda f: f.replace("note.text", frame(Runs()))), BYTES, "allow-list"),
    Recipe(
        "value that imports quietly",
        _dcp(lambda f: f.replace("note.text", rezipped(frame(1), _pickled(b"\x80\x02cantigravity\nx\n.")))),
        BYTES,
        "antigravity.x",
    ),
    Recipe(
        "value in a newer protocol",
        _dcp(lambda f: f.replace("note.text", rezipped(frame(1), _pickled(pickle.dumps(Runs(), 5))))),
        BYTES,
        "never writes",
    ),
    Recipe(
        "value that is a bare pickle", _dcp(lambda f: f.replace("note.text", pickle.dumps(Runs()))), (0, 3, 1, 1), ""
    ),
    Recipe("tensor that runs a program", _dcp(lambda f: f.replace("model.b", frame(Runs()))), BYTES, "allow-list"),
    Recipe(
        "tensor by a function of torch",
        _dcp(lambda f: f.replace("model.b", frame([torch.hub.load]))),
        BYTES,
        "allow-list",
    ),
    Recipe("zip bomb in a value", _dcp(lambda f: f.replace("note.text", BOMB)), BYTES, "compressed"),
    Recipe(
        "zip bomb in a tensor",
        _dcp(lambda f: f.replace("model.b", rezipped(f.item("model.b"), lambda _, d: d, zipfile.ZIP_DEFLATED))),
        BYTES,
        "compressed",
    ),
    Recipe("zip whose records overlap", _dcp(_overlapping), BYTES, "two names"),
    Recipe("zip that claims 2^60 records", _dcp(_many_entries), BYTES, "not inside it"),
    Recipe(
        "value that copies itself",
        _dcp(lambda f: f.replace("note.text", rezipped(frame(1), _pickled(COPIES)))),
        BYTES,
        "more memory",
    ),
    Recipe(
        "storage of 2^60 elements",
        _dcp(lambda f: f.replace("model.w", rezipped(f.item("model.w"), _pickled(STORAGE)))),
        BYTES,
        "model.w",
    ),
    Recipe("name that climbs out", _dcp(_path("../x")), BYTES, "outside the folder"),
    Recipe("absolute name", _dcp(_path("/etc/passwd")), BYTES, "outside the folder"),
    Recipe("name with an escape sequence", _dcp(_path("\x1b[2J")), BYTES, "outside the folder"),
    Recipe("item past the end", _dcp(_set("model.w", length=HUGE)), BYTES, "not whole"),
    Recipe("item that overlaps", _dcp(_set("model.w", offset=0)), BYTES, "overlap"),
    Recipe("item with negative offset", _dcp(_set("model.w", offset=-1)), ALWAYS, "not laid out"),
    Recipe("file missing", _dcp(lambda f: f.data.unlink()), BYTES, "missing"),
    Recipe("file cut short", _dcp(lambda f: os.truncate(f.data, 300)), BYTES, "300 bytes"),
    Recipe("chunk with a hole", _dcp(_sizes([39, 50])), BYTES, "do not make up"),
    Recipe("chunk of another shape", _dcp(_sizes([50, 40], [50, 40])), BYTES, "the metadata says"),
    Recipe("tensor of 2^60 elements", _dcp(_sizes([HUGE], [HUGE])), ALWAYS, "not laid out"),
    Recipe(
        "place of nothing",
        _dcp(lambda f: (f.metadata.state_dict_metadata.pop("model.b"), f.write_metadata())),
        BYTES,
        "places what it does not have",
    ),
]


# --- safetensors ----------------------------------------------------------------------------------------------


def file(header: bytes | dict[str, Any] | str, data: bytes = bytes(16), length: int | None = None) -> bytes:
    """A safetensors file with any header."""
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    text = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: Any = (4,), offsets: Any = (0, 16), dtype: Any = "F32") -> dict[str, Any]:
    """One tensor of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _st(data: bytes) -> Callable[[Path], object]:
    def build(folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(data)

    return build


def _shards(index: Any, **shards: bytes) -> Callable[[Path], object]:
    def build(folder: Path) -> None:
        folder.mkdir()
        (folder.parent / "x.safetensors").write_bytes(GOOD)
        text = index if isinstance(index, bytes) else json.dumps({"weight_map": index}).encode()
        (folder / "model.safetensors.index.json").write_bytes(text)
        for name, data in shards.items():
            (folder / f"{name}.safetensors").write_bytes(data)

    return build


GOOD = file({"w": entry()})
SAFETENSORS = [
    Recipe("untouched", _st(GOOD), (0, 3, 0, 0), "no checksums"),
    Recipe("header of 2^60 bytes", _st(file({"w": entry()}, length=HUGE)), ALWAYS, "100 MB"),
    Recipe("header past the end", _st(file({"w": entry()}, length=5000)), ALWAYS, "says that its header"),
    Recipe("empty", _st(b""), ALWAYS, "too few"),
    Recipe("name twice", _st(file('{"w": %s, "w": %s}' % ((json.dumps(entry()),) * 2))), ALWAYS, "appears twice"),
    Recipe("field twice", _st(file('{"w": {"dtype": "F32", "dtype": "I32"}}')), ALWAYS, "appears twice"),
    Recipe("overlap", _st(file({"a": entry((2,), (0, 8)), "b": entry((3,), (4, 16))})), ALWAYS, "overlaps"),
    Recipe("hole", _st(file({"a": entry((2,), (0, 8)), "b": entry((1,), (12, 16))})), ALWAYS, "hole"),
    Recipe("bytes after the last tensor", _st(file({"w": entry((2,), (0, 8))})), ALWAYS, "speaks of"),
    Recipe("negative shape", _st(file({"w": entry((-4,))})), ALWAYS, "no whole numbers"),
    Recipe("two negative shapes", _st(file({"w": entry((-2, -2))})), ALWAYS, "no whole numbers"),
    Recipe("shape as a fraction", _st(file({"w": entry((4.0,))})), ALWAYS, "no whole numbers"),
    Recipe("shape of true", _st(file({"w": entry((True, 4))})), ALWAYS, "no whole numbers"),
    Recipe("NaN as a size", _st(file({"w": entry((float("nan"),))})), ALWAYS, "no number of JSON"),
    Recipe("shape of 2^60", _st(file({"w": entry((HUGE,), (0, HUGE * 4))})), ALWAYS, "speaks of"),
    Recipe("shape that wraps around", _st(file({"w": entry((1 << 32, 1 << 32), (0, 0))})), ALWAYS, "takes"),
    Recipe("offsets backwards", _st(file({"w": entry((4,), (16, 0))})), ALWAYS, "takes"),
    Recipe("unknown dtype", _st(file({"w": entry(dtype="os.system")})), ALWAYS, "not known"),
    Recipe("dtype that is a list", _st(file({"w": entry(dtype=["F32"])})), ALWAYS, "not known"),
    Recipe("not UTF-8", _st(file(b'{"\xff": {}}')), ALWAYS, "not JSON"),
    Recipe("not JSON", _st(file(pickle.dumps(Runs()))), ALWAYS, "not JSON"),
    Recipe("list instead of a table", _st(file("[]")), ALWAYS, "not a table"),
    Recipe("nested deeply", _st(file("[" * 200_000)), ALWAYS, "not JSON"),
    Recipe("number of a million digits", _st(file('{"w": ' + "1" * 1_000_000 + "}")), ALWAYS, "not JSON"),
    Recipe("metadata that is no text", _st(file({"__metadata__": {"a": 1}})), ALWAYS, "__metadata__"),
    Recipe("shard that climbs out", _shards({"w": "../x.safetensors"}), ALWAYS, "not a .safetensors file in"),
    Recipe("absolute shard", _shards({"w": "/etc/x.safetensors"}), ALWAYS, "not a .safetensors file in"),
    Recipe("shard in another folder", _shards({"w": "a/../../x.safetensors"}), ALWAYS, "not a .safetensors file in"),
    Recipe("shard of another kind", _shards({"w": "x.bin"}), ALWAYS, "not a .safetensors file in"),
    Recipe("shard that is no text", _shards({"w": ["a"]}), ALWAYS, "weight_map"),
    Recipe("index that is not JSON", _shards(b"\x80\x02."), ALWAYS, "not JSON"),
    Recipe("shard missing", _shards({"w": "a.safetensors"}), ALWAYS, "is missing"),
    Recipe("tensor missing", _shards({"w": "a.safetensors", "v": "a.safetensors"}, a=GOOD), ALWAYS, "does not"),
    Recipe("tensor too many", _shards({"v": "a.safetensors"}, a=GOOD), ALWAYS, "index does not have it"),
    Recipe(
        "tensor twice",
        _shards({"w": "a.safetensors", "v": "b.safetensors"}, a=GOOD, b=file({"w": entry()})),
        ALWAYS,
        "another shard",
    ),
]
