"""The JSON codec of the records: round trips, and nothing but ``Damaged`` or ``Unsupported`` for anything else."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import Damaged, Unsupported
from ckpt.format import layout
from ckpt.format import manifest as m
from ckpt.format.blocks import Item, block_bytes_for, block_count
from tests.corpus.golden import GOLDEN_V1
from tests.corpus.mutate import mutated_bytes, mutated_json

names = st.text(min_size=1, max_size=30)
digests = st.text("0123456789abcdef", min_size=32, max_size=32)
stamps = st.just("2026-11-30T20:40:09.340Z") | st.just("2027-01-01T00:00:00+02:00")
sizes = st.integers(0, 1 << 40)
own_names = st.from_regex(r"[a-zA-Z_.]{1,8}[a-z](/[a-z]{1,5}){0,2}", fullmatch=True)
HOLDERS = ("000000000001-e00000001-0", "000000000002-e00000003.0a0b0c0d-1")
holders = st.sampled_from(HOLDERS).map(layout.parse_attempt)
object_names = own_names | st.builds(layout.reference_name, holders, own_names)


@st.composite
def manifests(draw: st.DrawFn) -> m.Manifest:
    tensors = st.builds(
        m.TensorRecord, dtype=st.sampled_from(sorted(m.DTYPE_BYTES)),
        shape=st.lists(st.integers(0, 1000), max_size=4).map(tuple), fingerprint=st.none() | digests,
    )  # fmt: skip
    values = st.builds(m.ValueRecord, kind=st.sampled_from(["replicated", "per_rank"]), digest=digests)
    objects = draw(st.lists(st.builds(m.ObjectRecord, name=object_names, bytes=sizes, digest=digests, rank=sizes),
                            unique_by=lambda o: o.name, max_size=4))  # fmt: skip
    return m.Manifest(
        step=draw(st.none() | sizes), attempt=draw(st.none() | names), created=draw(stamps), world_size=draw(sizes),
        objects=tuple(objects), tensors=draw(st.dictionaries(names, tensors, max_size=4)),
        values=draw(st.dictionaries(names, values, max_size=4)), writer=draw(st.dictionaries(names, names, max_size=2)),
        topology=draw(st.dictionaries(names, st.integers() | names, max_size=2)), fingerprint=draw(st.none() | digests),
        references=(held := tuple(sorted({str(a) for o in objects if (a := layout.split_name(o.name)[0])}))),
        requires=("references",) if held else (),
    )  # fmt: skip


@st.composite
def indexes(draw: st.DrawFn) -> tuple[m.Index, dict[str, int]]:
    items, ends = [], {}
    for _ in range(draw(st.integers(0, 5))):
        name = f"__0_{draw(st.integers(0, 1))}.distcp"
        dtype = draw(st.none() | st.sampled_from(["float32", "bfloat16", "int8"]))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3))) if dtype else ()
        itemsize = m.DTYPE_BYTES[dtype] if dtype else 1
        payload = itemsize * m.math.prod(shape) if dtype else draw(st.integers(0, 200))
        head, tail = draw(st.integers(0, 20)), draw(st.integers(0, 20))
        block = block_bytes_for(shape, itemsize, draw(st.integers(1, 64)))
        found = draw(st.lists(digests, min_size=(n := block_count(payload, block)), max_size=n))
        items.append(Item(
            fqn=draw(names), offsets=tuple(0 for _ in shape) if dtype else None, shape=shape, dtype=dtype, object=name,
            start=ends.get(name, 0), length=head + payload + tail, payload_start=head, payload_length=payload,
            block_bytes=block, digests=tuple(found),
        ))  # fmt: skip
        ends[name] = ends.get(name, 0) + head + payload + tail
    return m.Index(rank=draw(st.integers(0, 9)), items=tuple(items)), ends


@given(manifests())
def test_manifest_round_trips(record: m.Manifest) -> None:
    assert m.load_manifest(m.dump("manifest", record), "x") == record


@given(indexes())
def test_index_round_trips(case: tuple[m.Index, dict[str, int]]) -> None:
    index, sizes = case
    assert m.load_index(m.dump("index", index), "x", sizes) == index


@given(st.builds(m.Commit, attempt=names, step=sizes, base=st.none() | names, manifest_digest=digests,
                 manifest_bytes=sizes, total_bytes=sizes, created=stamps))  # fmt: skip
def test_commit_round_trips(record: m.Commit) -> None:
    assert m.load_commit(m.dump("commit", record), "x") == record


@given(
    st.builds(m.Claim, epoch=names, writer=names, host=names, pid=sizes, world_size=sizes, created=stamps),
    st.builds(m.Base, epoch=names, attempt=st.none() | names, created=stamps),
    st.builds(m.Mark, attempt=names, reason=names, epoch=st.none() | names, created=stamps,
              details=st.lists(names, max_size=3).map(tuple), references=st.lists(names, max_size=3).map(tuple)),
)  # fmt: skip
def test_small_records_round_trip(claim: m.Claim, base: m.Base, mark: m.Mark) -> None:
    assert m.load_claim(m.dump("claim", claim), "x") == claim
    assert m.load_base(m.dump("base", base), "x") == base
    assert m.load_mark(m.dump("mark", mark), "x") == mark


# --- mutations of real records --------------------------------------------------------------------------------

_STEP = GOLDEN_V1 / "steps/000000000002/e00000002-0"
_SIZES = {p.relative_to(_STEP).as_posix(): p.stat().st_size for p in _STEP.rglob("*") if p.is_file()}
REAL: list[tuple[Path, Callable[[bytes, str], Any]]] = [
    (_STEP / "manifest.json", m.load_manifest),
    (_STEP / "index/00001.json", lambda data, where: m.load_index(data, where, _SIZES)),
    (GOLDEN_V1 / "commits/000000000002-e00000002-0.json", m.load_commit),
    (GOLDEN_V1 / "epochs/00000002.json", m.load_claim),
    (GOLDEN_V1 / "epochs/00000002.base.json", m.load_base),
]


@pytest.mark.parametrize(("path", "load"), REAL, ids=lambda p: p.name if isinstance(p, Path) else "")
def test_mutated_records_raise_only_what_is_meant(path: Path, load: Callable[[bytes, str], Any]) -> None:
    data = path.read_bytes()
    load(data, "x")
    outcomes = {"accepted": 0, "refused": 0}
    for seed in range(1000):
        rng = random.Random(seed)
        changed = mutated_json(data, rng) if seed % 3 else mutated_bytes(data, rng)
        sealed = path.parent.name in ("commits", "epochs")
        if sealed and seed % 3 and isinstance(fields := json.loads(changed), dict):  # else the seal refuses all of it
            fields.pop("digest", None)
            changed = m.seal(json.dumps(fields, indent=1).encode() + b"\n")
        outcome = "refused"
        with contextlib.suppress(Damaged, Unsupported):
            load(changed, "x")
            outcome = "accepted"
        outcomes[outcome] += 1
    assert outcomes["refused"] > 300
    assert outcomes["accepted"] > 20  # unknown fields, other numbers, other names: the fuzz is not all noise


def test_json_nested_to_any_depth_is_damage() -> None:
    for depth in range(800, 1100):
        data = b'{"schema": "ckpt.manifest/1", "requires": %s}' % (b"[" * depth + b"]" * depth)
        with pytest.raises(Damaged):
            m.load_manifest(data, "x")


def test_unknown_fields_are_ignored_and_unknown_requirements_named() -> None:
    record = json.loads((_STEP / "manifest.json").read_bytes())
    assert m.load_manifest(json.dumps({**record, "colour": "blue"}).encode(), "x").step == 2
    with pytest.raises(Unsupported, match=r"features .*: a, b"):
        m.load_manifest(json.dumps({**record, "requires": ["b", "a"]}).encode(), "x")


@pytest.mark.parametrize(
    "name",
    [
        "", "/x", "a//b", "a/", "./a", "a/../b", "..", "a\\b", "a\x00b", "a\x1b[2J", "a\u202eb", "x" * 1025, "\ud800",
        "../../000000000001/e00000001-0/../x", "../../../000000000001/e00000001-0/x", "../000000000001/e00000001-0/x",
    ],
)  # fmt: skip
def test_names_that_are_refused(name: str) -> None:
    record = json.loads((_STEP / "manifest.json").read_bytes())
    record["objects"][1]["name"] = name
    with pytest.raises(Damaged, match="inside the folder"):
        m.load_manifest(json.dumps(record).encode(), "x")


def test_the_page_on_the_format_names_every_field_and_record() -> None:
    page = (Path(m.__file__).parents[1] / "FORMAT.md").read_text()
    for record in (m.Manifest, m.Commit, m.Claim, m.Base, m.Mark, m.ObjectRecord, m.TensorRecord, m.ValueRecord):
        assert [f for f in record.__dataclass_fields__ if f"`{f}`" not in page] == []
    assert [f for f in m._ITEM_FIELDS if f"`{f}`" not in page] == []
    for path, _ in REAL:
        assert json.loads(path.read_bytes())["schema"] in page


def test_references_are_those_of_the_objects_and_are_required() -> None:
    record = json.loads((_STEP / "manifest.json").read_bytes())
    holder = "000000000001-e00000001-0"
    name = "../../000000000001/e00000001-0/__0_0.distcp"
    record["objects"].append({"name": name, "bytes": 1, "digest": "0" * 32, "rank": 0})
    with pytest.raises(Damaged, match="are not the attempts"):
        m.load_manifest(json.dumps(record).encode(), "x")
    record["references"] = [holder]
    with pytest.raises(Damaged, match="requires"):
        m.load_manifest(json.dumps(record).encode(), "x")
    record["requires"] = ["references"]
    assert m.load_manifest(json.dumps(record).encode(), "x").references == (holder,)
