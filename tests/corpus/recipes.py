"""Damaged and hostile folders, each a few lines that change one good step, with what the tools must say of it.

A recipe gets a copy of the golden run and changes its newest step, 2. ``statuses`` are the exit statuses of inspect,
validate quick, validate full on that step; ``says`` is part of what the full validation prints. A *resealed* folder
is what an attacker makes: all digests fit again, so that only the checks behind them can help.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.format.digest import digest
from ckpt.format.fields import seal

ATTEMPT = "000000000002-e00000002-0"
FOLDER = "steps/000000000002/e00000002-0"
OTHER = "steps/000000000001/e00000001-0"


class Step:
    """The step to spoil."""

    def __init__(self, run: Path) -> None:
        self.run, self.folder, self.other = run, run / FOLDER, run / OTHER
        self.commit = run / f"commits/{ATTEMPT}.json"

    def flip(self, name: str, at: int = -1, *, bit: int = 4) -> None:
        """Flip one bit of an object (by default in its last byte)."""
        data = bytearray((self.folder / name).read_bytes())
        data[at] ^= 1 << bit
        (self.folder / name).write_bytes(data)

    def edit(self, name: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Change a JSON record and reseal everything that vouches for it."""
        path = self.folder / name
        record = json.loads(path.read_bytes())
        change(record)
        self.replace(name, json.dumps(record).encode())

    def replace(self, name: str, data: bytes) -> None:
        """Put other bytes in an object's place and reseal."""
        (self.folder / name).write_bytes(data)
        self.reseal(name)

    def reseal(self, *names: str) -> None:
        """Make manifest and commit record agree with the objects as they are now."""
        path = self.folder / "manifest.json"
        if names != ("manifest.json",):
            manifest = json.loads(path.read_bytes())
            for o in manifest["objects"]:
                if o["name"] in names:
                    data = (self.folder / o["name"]).read_bytes()
                    o["bytes"], o["digest"] = len(data), digest(data)
            path.write_text(json.dumps(manifest))
        self.edit_commit(lambda c: c.update(manifest_digest=digest(path.read_bytes())))

    def edit_commit(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the commit record."""
        record = json.loads(self.commit.read_bytes())
        del record["digest"]
        change(record)
        self.commit.write_bytes(seal(json.dumps(record, indent=1).encode() + b"\n"))

    def item(self, n: int, **changes: Any) -> None:
        """Change fields of the n-th item of rank 1's index and reseal."""

        def change(index: dict[str, Any]) -> None:
            for field, value in changes.items():
                index["items"][n][index["fields"].index(field)] = value

        self.edit("index/00001.json", change)


@dataclass(frozen=True)
class Recipe:
    """One way to spoil a step, and what the tools must answer."""

    name: str
    spoil: Callable[[Step], object]
    statuses: tuple[int, int, int]
    says: str


def _objects(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Step], None]:
    return lambda step: step.edit("manifest.json", lambda m: change(m["objects"]) and None)


def _manifest(**fields: Any) -> Callable[[Step], None]:
    return lambda step: step.edit("manifest.json", lambda m: m.update(fields))


def _swap(a: str, b: str) -> Callable[[Step], None]:
    def swap(step: Step) -> None:
        one, two = (step.folder / a).read_bytes(), (step.folder / b).read_bytes()
        (step.folder / a).write_bytes(two)
        (step.folder / b).write_bytes(one)

    return swap


def _swap_same_size(step: Step) -> None:
    """Exchange two momentum and weight frames of rank 1, which are as long as each other."""
    path = step.folder / "__1_0.distcp"
    index = json.loads((step.folder / "index/00001.json").read_bytes())
    spans = [(i[5], i[6]) for i in index["items"] if i[0] in ("model.weight", "optim.state.weight.momentum_buffer")]
    (a, n), (b, m) = spans
    assert n == m
    data = bytearray(path.read_bytes())
    data[a : a + n], data[b : b + n] = data[b : b + n], data[a : a + n]
    path.write_bytes(data)


def _twice(data: bytes, key: bytes) -> bytes:
    """JSON with its first key written twice."""
    return data.replace(b"{", b'{"%s": 0, ' % key, 1)


class _Runs:
    """What executes when it is unpickled by something careless."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {CANARY}",)


R = Recipe
GOOD, FULL, ALWAYS, NEWER = (0, 0, 0), (0, 0, 1), (1, 1, 1), (5, 3, 3)  # when the damage shows
INDEX = "index/00001.json"
CANARY = "/tmp/torchrelay-corpus-was-executed"
HUGE = 1 << 60

RECIPES = [
    # --- accidents: nothing vouches for the change
    R("untouched", lambda s: None, GOOD, "good: step 2 (full)"),
    R("bit flipped in a payload", lambda s: s.flip("__1_0.distcp", 700), FULL, "rank 1"),
    R("bit flipped in a frame's tail", lambda s: s.flip("__1_0.distcp"), FULL, "__1_0.distcp"),
    R("bit flipped in an index", lambda s: s.flip(INDEX, 300), FULL, INDEX),
    R("bit flipped in .metadata", lambda s: s.flip(".metadata", 40), FULL, ".metadata"),
    R("bit flipped in the manifest", lambda s: s.flip("manifest.json", 900), ALWAYS, "not the one that was"),
    R("object cut short", lambda s: os.truncate(s.folder / "__0_0.distcp", 100), ALWAYS, "100 bytes"),
    R("object missing", lambda s: (s.folder / "__0_0.distcp").unlink(), ALWAYS, "nothing"),
    R("object empty", lambda s: (s.folder / "__1_0.distcp").write_bytes(b""), ALWAYS, "found       0 bytes"),
    R("index missing", lambda s: (s.folder / "index/00000.json").unlink(), ALWAYS, "index/00000.json"),
    R("index empty", lambda s: (s.folder / "index/00000.json").write_bytes(b""), ALWAYS, "another size"),
    R(".metadata missing", lambda s: (s.folder / ".metadata").unlink(), ALWAYS, ".metadata"),
    R("manifest missing", lambda s: (s.folder / "manifest.json").unlink(), ALWAYS, "manifest is missing"),
    R("manifest empty", lambda s: (s.folder / "manifest.json").write_bytes(b""), ALWAYS, "not the one"),
    R("commit record empty", lambda s: s.commit.write_bytes(b""), ALWAYS, "does not end with its digest"),
    R("commit record of zeros", lambda s: s.commit.write_bytes(bytes(264)), ALWAYS, "does not end with its digest"),
    R("objects of two ranks exchanged", _swap("__0_0.distcp", "__1_0.distcp"), ALWAYS, "another size"),
    R("indexes exchanged", _swap("index/00000.json", INDEX), ALWAYS, "index/00000.json"),
    R("two tensors exchanged in an object", _swap_same_size, FULL, "momentum_buffer"),
    R("object of another step", lambda s: shutil.copy(s.other / "__1_0.distcp", s.folder), FULL, "model.weight"),
    R("manifest of another step", lambda s: shutil.copy(s.other / "manifest.json", s.folder), ALWAYS, "committed"),
    R(
        "folder of another step",
        lambda s: shutil.copytree(s.other, s.folder, dirs_exist_ok=True),
        ALWAYS,
        "not the one",
    ),
    R(
        "object with zeros at its end",
        lambda s: s.replace("__1_0.distcp", (s.folder / "__1_0.distcp").read_bytes()[:-99] + bytes(99)),
        FULL,
        "block 0",
    ),
    # --- attacks and bugs: resealed
    R(
        "manifest of another step, resealed",
        lambda s: s.replace("manifest.json", (s.other / "manifest.json").read_bytes()),
        ALWAYS,
        "manifest is of another attempt",
    ),
    R(
        "commit record of another step",
        lambda s: shutil.copy(s.run / "commits/000000000001-e00000001-0.json", s.commit),
        ALWAYS,
        "commit record is of another attempt",
    ),
    R("size of 2^60 bytes", _objects(lambda o: o[1].update(bytes=HUGE)), ALWAYS, f"{HUGE} bytes"),
    R("sizes that add up to 2^62", _objects(lambda o: [x.update(bytes=HUGE) for x in o]), ALWAYS, "add up"),
    R("negative size", _objects(lambda o: o[1].update(bytes=-1)), ALWAYS, "is -1, expected a whole number"),
    R("size as a fraction", _objects(lambda o: o[1].update(bytes=18807.0)), ALWAYS, "whole number"),
    R("size as true", _objects(lambda o: o[1].update(bytes=True)), ALWAYS, "whole number"),
    R(
        "name that climbs out",
        _objects(lambda o: o[1].update(name="../../../epochs/00000001.json")),
        ALWAYS,
        "inside the folder",
    ),
    R("absolute name", _objects(lambda o: o[1].update(name="/etc/passwd")), ALWAYS, "inside the folder"),
    R("name with an escape sequence", _objects(lambda o: o[1].update(name="\x1b[2J")), ALWAYS, "inside the folder"),
    R("name twice", _objects(lambda o: o.append(dict(o[1]))), ALWAYS, "a name appears twice"),
    R(
        "key twice",
        lambda s: s.replace("manifest.json", _twice((s.folder / "manifest.json").read_bytes(), b"step")),
        ALWAYS,
        "a key appears twice",
    ),
    R("unknown required feature", _manifest(requires=["time-travel"]), NEWER, "time-travel"),
    R("unknown codec", _manifest(codec="brotli"), NEWER, "brotli"),
    R("newer version", _manifest(schema="ckpt.manifest/2"), NEWER, "format version '2'"),
    R("other kind of record", _manifest(schema="ckpt.index/1"), ALWAYS, "expected 'ckpt.manifest'"),
    R("not JSON", lambda s: s.replace("manifest.json", b"\x80\x04K\x01."), ALWAYS, "is not JSON"),
    R("JSON nested deeply", lambda s: s.replace("manifest.json", b"[" * 100_000), ALWAYS, "is not JSON"),
    R(
        "JSON nested to the limit",
        _manifest(objects=json.loads("[" * 900 + "]" * 900)),
        ALWAYS,
        "expected a list of objects",
    ),
    R(
        "number of a million digits",
        lambda s: s.replace("manifest.json", b'{"schema": ' + b"1" * 1_000_000 + b"}"),
        ALWAYS,
        "is not JSON",
    ),
    R("list instead of an object", lambda s: s.replace("manifest.json", b"[]"), ALWAYS, "not a JSON object"),
    R(
        "tensor larger than the world",
        _manifest(tensors={"w": {"dtype": "int8", "shape": [1 << 62] * 64}}),
        ALWAYS,
        "larger than any store",
    ),
    R("unknown dtype", _manifest(tensors={"w": {"dtype": "os.system", "shape": [1]}}), ALWAYS, "a dtype"),
    R(
        "tensor left out of the manifest",
        lambda s: s.edit("manifest.json", lambda m: m["tensors"].pop("model.fine")),
        FULL,
        "model.fine",
    ),
    R(".metadata left out of the manifest", _objects(lambda o: o.pop(0)), ALWAYS, "does not name it"),
    R(
        "index left out of the manifest",
        _objects(lambda o: [o.remove(x) for x in list(o) if x["name"] == INDEX]),
        FULL,
        "no index covers the object",
    ),
    R(
        "rank left out of the manifest",
        _objects(lambda o: [o.remove(x) for x in list(o) if x["name"] in (INDEX, "__1_0.distcp")]),
        FULL,
        "no index has it",
    ),
    R("other digest of an object", _objects(lambda o: o[2].update(digest="0" * 32)), FULL, "0" * 32),
    R("time that is none", _manifest(created="yesterday"), ALWAYS, "a time with its zone"),
    R("index with a hole", lambda s: s.edit(INDEX, lambda i: i["items"].pop(1)), FULL, "starts at"),
    R(
        "index that stops early",
        lambda s: s.edit(INDEX, lambda i: i["items"].pop()),
        FULL,
        "items of __1_0.distcp end at",
    ),
    R("index with an overlap", lambda s: s.item(1, start=0), FULL, "starts at 0"),
    R("index past the end", lambda s: s.item(1, length=HUGE), FULL, "past the end"),
    R("index with negative length", lambda s: s.item(0, length=-1), FULL, "is -1"),
    R("index with blocks of nothing", lambda s: s.item(0, block_bytes=0), FULL, "does not fit"),
    R("index with very many digests", lambda s: s.item(0, digests=["0" * 32] * 50_000), FULL, "50000 blocks"),
    R("index with other digests", lambda s: s.item(0, digests=["0" * 32]), FULL, "block 0"),
    R("index with another shape", lambda s: s.item(0, shape=[3]), FULL, "payload_length"),
    R("index with another offset", lambda s: s.item(0, offsets=[0, 0]), FULL, "DCP's metadata has this"),
    R("index with another name", lambda s: s.item(0, fqn="model.fine"), FULL, "DCP's metadata has this"),
    R("index of another object", lambda s: s.item(0, object="__7_0.distcp"), FULL, "is not in the manifest"),
    R("index of the wrong rank", lambda s: s.edit(INDEX, lambda i: i.update(rank=0)), FULL, "speaks for another rank"),
    R(
        ".metadata that runs a program",
        lambda s: s.replace(".metadata", pickle.dumps(_Runs())),
        FULL,
        "not on the allow-list",
    ),
    R(
        ".metadata that runs a program on the way",
        lambda s: s.replace(".metadata", pickle.dumps([_Runs(), 1], 2)),
        FULL,
        "not on the allow-list",
    ),
    R(
        ".metadata with a memo of gigabytes",
        lambda s: s.replace(".metadata", b"\x80\x02Nr\xff\xff\xff\x7f."),
        FULL,
        "not laid out",
    ),
    R(
        ".metadata with a key that overflows the stack",
        lambda s: s.replace(".metadata", b"\x80\x04})" + b"\x85" * 50_000 + b"Ns."),
        FULL,
        "cannot be decoded",
    ),
    R(".metadata of another kind", lambda s: s.replace(".metadata", pickle.dumps({"a": 1})), FULL, "not laid out"),
    R(".metadata of another step's place", lambda s: s.replace(".metadata", b""), FULL, "cannot be decoded"),
]
