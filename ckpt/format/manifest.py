"""Records of format v1 and their JSON codec. Pure; every field of a file is checked before it is believed.

A manifest makes an attempt's folder explain itself; an index is one rank's block table; claim, base, commit,
quarantine and retire are small records beside them, each of which ends with a digest of itself. Unknown fields are
ignored (they may come with a later minor version); an unknown entry of ``requires`` is not: the reader refuses it by
name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from ckpt.errors import Unsupported
from ckpt.format.blocks import Item, block_count
from ckpt.format.fields import DTYPE_BYTES, FORMAT, MAX_BYTES, SEALED, Fields, seal
from ckpt.format.layout import parse_attempt, reference_name, split_name

REFERENCES = "references"  # what a manifest requires of its reader that names objects of other attempts
KNOWN_FEATURES = frozenset({REFERENCES})
ADOPTED = "adopted_from"  # in a manifest's writer: whose checkpoint the step was; it may lack entries of a State


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRecord:
    """One object: name in the folder, size, digest of all its bytes, the rank that wrote it.

    An object of another attempt, which is referred to, has the path to it as its name (``layout.reference_name``).
    """

    name: str
    bytes: int
    digest: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One logical tensor. ``fingerprint`` None means *not verified*."""

    dtype: str
    shape: tuple[int, ...]
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRecord:
    """One value that is no tensor: ``kind`` is "replicated" or "per_rank"; ``digest`` is of its bytes."""

    kind: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What an attempt's folder holds. ``step`` and ``attempt`` are None for a folder outside a run."""

    step: int | None
    attempt: str | None
    created: str
    world_size: int
    objects: tuple[ObjectRecord, ...]
    tensors: dict[str, TensorRecord]
    values: dict[str, ValueRecord]
    writer: dict[str, str] = field(default_factory=dict)
    topology: dict[str, Any] = field(default_factory=dict)
    codec: str = "raw"
    fingerprint: str | None = None
    references: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all objects, also those that are referred to."""
        return sum(o.bytes for o in self.objects)

    @property
    def own_bytes(self) -> int:
        """Bytes of the objects in the attempt's own folder."""
        return sum(o.bytes for o in self.objects if split_name(o.name)[0] is None)

    def sizes_there(self, prefix: str, listed: Callable[[str], Sequence[_Listed]]) -> dict[str, int]:
        """Sizes of what lies in the folder and in those that it refers to, by name; ``listed`` lists a prefix."""
        holders = [None, *filter(None, map(parse_attempt, self.references))]
        return {
            reference_name(holder, e.key.removeprefix(at)): e.size
            for holder in holders
            for at in [prefix if holder is None else holder.prefix]
            for e in listed(at)
        }

    def differing_objects(self, prefix: str, listed: Callable[[str], Sequence[_Listed]]) -> list[tuple[str, str]]:
        """Facts about each object that is missing or has another size."""
        sizes = self.sizes_there(prefix, listed)
        return [
            ("object", f"{o.name}: expected {o.bytes} bytes, "
                       f"{'missing' if (n := sizes.get(o.name)) is None else f'{n} bytes'} (written by rank {o.rank})")
            for o in self.objects
            if sizes.get(o.name) != o.bytes
        ]  # fmt: skip

    def load_index(self, data: bytes, name: str, where: str) -> Index:
        """Decode and check an index that this manifest names, its own or one that it refers to.

        Items of the latter are named as they are from here; those in objects that are not referred to are left out.
        """
        holder, _ = split_name(name)
        sizes = {own: o.bytes for o in self.objects for at, own in [split_name(o.name)] if at == holder}
        index = load_index(data, where, sizes, in_part=holder is not None)
        if holder is None:
            return index
        return replace(index, items=tuple(replace(i, object=reference_name(holder, i.object)) for i in index.items))


class _Listed(Protocol):
    """What a store's listing says of an object."""

    @property
    def key(self) -> str: ...
    @property
    def size(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The commit record: the step counts from the moment this exists (unless a newer epoch says otherwise).

    ``references`` are the attempts whose objects the step needs too; ``quarantined``: its mark was written first.
    """

    attempt: str
    step: int
    base: str | None
    manifest_digest: str
    manifest_bytes: int
    total_bytes: int
    created: str
    references: tuple[str, ...] = ()
    quarantined: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The claim of an epoch; ``writer`` is unique, so that one can recognise one's own."""

    epoch: str
    writer: str
    host: str
    pid: int
    world_size: int
    created: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What an epoch builds on: the name of an attempt, or None for a start from zero.

    ``fresh`` says that starting from zero was asked for, beside steps that may have been there. ``request`` is what the
    job of this start asked for, by which a restart of that job is told from another wish; None: nothing.
    """

    epoch: str
    attempt: str | None
    created: str
    fresh: bool = False
    request: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A quarantine or retire record: why, by which epoch, when; of a retired step, what its readers still need."""

    attempt: str
    reason: str
    epoch: str | None
    created: str
    details: tuple[str, ...] = ()
    references: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """One rank's items in the order in which they lie in its data objects."""

    rank: int
    items: tuple[Item, ...]


def dump(kind: str, record: object) -> bytes:
    """Encode a record as JSON that a person can read; ``kind`` is manifest, commit, claim, base, mark, index."""
    body = {"schema": f"ckpt.{kind}/{FORMAT}", **_plain(asdict(record))}  # type: ignore[call-overload]
    if kind == "index":
        body["items"] = [[i[k] for k in _ITEM_FIELDS] for i in body["items"]]
        body["fields"] = list(_ITEM_FIELDS)
    text = (json.dumps(body, indent=None if kind == "index" else 1, sort_keys=False) + "\n").encode()
    return seal(text) if kind in SEALED else text


def utc_now() -> str:
    """The time in the form that all records use."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def load_manifest(data: bytes, where: str) -> Manifest:
    """Decode and check a manifest; ``where`` names it in errors.

    Raises ``Unsupported`` for a newer version or an unknown required feature, ``Damaged`` for anything malformed.
    """
    d = Fields(data, "manifest", where)
    requires = d.strings("requires")
    if unknown := sorted(set(requires) - KNOWN_FEATURES):
        raise Unsupported(
            f"{where} needs features that this version does not have: {', '.join(unknown)}",
            hint="install a newer torchrelay to read this step; it is not damaged",
        )
    if (codec := d.text("codec")) != "raw":
        raise Unsupported(f"{where} is written with codec {codec!r}, which this version cannot read")
    objects = tuple(
        ObjectRecord(name=o.name("name"), bytes=o.size("bytes"), digest=o.digest("digest"), rank=o.size("rank"))
        for o in d.records("objects")
    )
    if len({o.name for o in objects}) != len(objects):
        d.bad("objects", "a name appears twice")
    references = d.strings("references")
    if {str(a) for o in objects if (a := split_name(o.name)[0])} != set(references):
        d.bad("references", "are not the attempts whose objects it names")
    if references and REFERENCES not in requires:
        d.bad("requires", f"lacks {REFERENCES!r}")
    if math.fsum(o.bytes for o in objects) > MAX_BYTES:
        d.bad("objects", "the sizes add up to more than any store holds")
    tensors = {
        k: TensorRecord(dtype=t.dtype("dtype"), shape=t.sizes("shape"), fingerprint=t.optional("fingerprint", t.text))
        for k, t in d.mapping("tensors")
    }
    if large := [k for k, t in tensors.items() if math.prod(t.shape) * DTYPE_BYTES[t.dtype] > MAX_BYTES]:
        d.bad("tensors", f"has {large[0][:80]!r}, which is larger than any store")
    return Manifest(
        step=d.optional("step", d.size), attempt=d.optional("attempt", d.text), created=d.time("created"),
        world_size=d.size("world_size"), objects=objects,
        tensors=tensors,
        values={k: ValueRecord(kind=v.one_of("kind", "replicated", "per_rank"), digest=v.digest("digest"))
                for k, v in d.mapping("values")},
        writer={k: str(v) for k, v in d.table("writer").items() if isinstance(v, (str, int, float))},
        topology=d.table("topology"), codec=codec,
        fingerprint=d.optional("fingerprint", d.text), references=references, requires=requires,
    )  # fmt: skip


def load_index(data: bytes, where: str, objects: dict[str, int], *, in_part: bool = False) -> Index:
    """Decode and check an index against the sizes of the objects that the manifest names.

    ``in_part``: items of objects that it does not name are left out, else they are damage.
    """
    d = Fields(data, "index", where)
    fields = d.strings("fields")
    if missing := sorted(set(_ITEM_FIELDS) - set(fields)):
        d.bad("fields", f"lacks {', '.join(missing)}")
    rows = (d.row(i, fields) for i in range(d.length("items")))
    items = tuple(_item(row, objects) for row in rows if not in_part or row.text("object") in objects)
    end: dict[str, int] = {}
    for it in items:  # items follow one another without holes: no byte of an object is outside a checksum
        if it.start != end.get(it.object, 0):
            d.bad("items", f"{it.fqn}: starts at {it.start} in {it.object}, expected {end.get(it.object, 0)}")
        end[it.object] = it.start + it.length
    for name, stop in end.items():
        if stop != objects[name]:
            d.bad("items", f"items of {name} end at {stop}, the object has {objects[name]} bytes")
    return Index(rank=d.size("rank"), items=items)


def load_commit(data: bytes, where: str) -> Commit:
    """Decode and check a commit record."""
    d = Fields(data, "commit", where)
    return Commit(
        attempt=d.text("attempt"), step=d.size("step"), base=d.optional("base", d.text),
        manifest_digest=d.digest("manifest_digest"), manifest_bytes=d.size("manifest_bytes"),
        total_bytes=d.size("total_bytes"), created=d.time("created"),
        references=d.optional("references", d.strings) or (), quarantined=bool(d.optional("quarantined", d.flag)),
    )  # fmt: skip


def load_claim(data: bytes, where: str) -> Claim:
    """Decode and check a claim."""
    d = Fields(data, "claim", where)
    return Claim(epoch=d.text("epoch"), writer=d.text("writer"), host=d.text("host"), pid=d.size("pid"),
                 world_size=d.size("world_size"), created=d.time("created"))  # fmt: skip


def load_base(data: bytes, where: str) -> Base:
    """Decode and check a base record."""
    d = Fields(data, "base", where)
    return Base(epoch=d.text("epoch"), attempt=d.optional("attempt", d.text), created=d.time("created"),
                fresh=d.flag("fresh"), request=d.optional("request", d.text))  # fmt: skip


def load_mark(data: bytes, where: str) -> Mark:
    """Decode and check a quarantine or retire record."""
    d = Fields(data, "mark", where)
    return Mark(attempt=d.text("attempt"), reason=d.text("reason"), epoch=d.optional("epoch", d.text),
                created=d.time("created"), details=d.strings("details"),
                references=d.optional("references", d.strings) or ())  # fmt: skip


_ITEM_FIELDS = ("fqn", "offsets", "shape", "dtype", "object", "start", "length", "payload_start",
                "payload_length", "block_bytes", "digests")  # fmt: skip


def _item(d: Fields, objects: dict[str, int]) -> Item:
    item = Item(
        fqn=d.text("fqn"), offsets=d.optional("offsets", d.sizes), shape=d.sizes("shape"),
        dtype=d.optional("dtype", d.dtype), object=d.name("object"), start=d.size("start"),
        length=d.size("length"), payload_start=d.size("payload_start"),
        payload_length=d.size("payload_length"), block_bytes=d.size("block_bytes"), digests=d.digests("digests"),
    )  # fmt: skip
    if item.object not in objects:
        d.bad("object", f"{item.object} is not in the manifest")
    if item.start + item.length > objects[item.object]:
        d.bad("length", f"reaches past the end of {item.object} ({objects[item.object]} bytes)")
    if item.payload_start + item.payload_length > item.length or item.block_bytes < 1:
        d.bad("payload_length", "does not fit into the item")
    if item.dtype is not None:
        want = math.prod(item.shape) * DTYPE_BYTES[item.dtype]
        if item.payload_length != want:
            d.bad("payload_length", f"is {item.payload_length}, {item.dtype} {item.shape} takes {want}")
        if item.offsets is None or len(item.offsets) != len(item.shape):
            d.bad("offsets", "do not match the shape")
    if len(item.digests) != block_count(item.payload_length, item.block_bytes):
        d.bad("digests", f"has {len(item.digests)} blocks")
    return item


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
