"""``validate`` in parts: exact cover, memory, damage, and JUnit; ``--level load``."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import cli
from ckpt.format.blocks import Item, block_count
from ckpt.format.layout import parse_attempt
from ckpt.format.manifest import ObjectRecord
from ckpt.store.local import LocalStore
from ckpt.tools import loading, scrub
from ckpt.tools.scrub import Budget, Scrub, cut
from tests.corpus.golden import GOLDEN_V1
from tests.corpus.recipes import FOLDER, Step

ATTEMPT = parse_attempt("000000000002-e00000002-0")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN_V1, tmp_path / "run"))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "PIECE_BYTES", 1)  # every block by itself


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = cli.run(["validate", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


# --- cover ----------------------------------------------------------------------------------------------------


def item(n: int, start: int, payload: int, block: int) -> Item:
    digests = ("0" * 32,) * block_count(payload, block)
    return Item(f"t{n}", (0,), (payload,), "uint8", "o", start, payload + 20, 10, payload, block, digests)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 90)), max_size=8), st.integers(1, 500))
@settings(max_examples=60, deadline=None)
def test_pieces_are_all_blocks_once(shapes: list[tuple[int, int]], piece: int) -> None:
    items, at = [], 0
    for n, (payload, block) in enumerate(shapes):
        items.append(item(n, at, payload, block))
        at += payload + 20
    old, scrub.PIECE_BYTES = scrub.PIECE_BYTES, piece
    try:
        pieces = cut(ObjectRecord(name="o", bytes=at, digest="0" * 32, rank=0), items)
    finally:
        scrub.PIECE_BYTES = old
    assert [b for p in pieces for b in p.blocks] == [(i, n) for i in items for n in range(i.block_count)]
    spans = [p.span for p in pieces]
    assert spans[0][0] == 0
    assert spans[-1][1] == at
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    assert len({p.name for p in pieces}) == len(pieces)


@given(st.integers(0, 200), st.integers(1, 12))
def test_the_parts_of_a_subset_are_disjoint_and_together_all(pieces: int, of: int) -> None:
    names = [str(n) for n in range(pieces)]
    parts = [Budget(subset=(n, of)).part(names) for n in range(1, of + 1)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("level", ["full", "load"])
def test_the_parts_find_each_damage_once(level: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Step(run).flip("__1_0.distcp", 700)
    status = [ask(capsys, f"{run}@2", "--level", level, "--subset", f"{n}/3") for n in (1, 2, 3)]
    assert sorted(s for s, _ in status) == [0, 0, 1]
    reports = [d["checkpoints"][0] for _, d in status]
    assert [len(r["findings"]) for r in reports if r["verdict"] == "bad"] == [1]
    assert all(r["coverage"]["left"] == 0 for r in reports if "left" in r["coverage"])
    whole = ask(capsys, f"{run}@2", "--level", level, "--max-age", "0s")[1]["checkpoints"][0]
    assert sum(r["coverage"]["pieces"] for r in reports) == whole["coverage"]["pieces"] > 1


# --- memory ---------------------------------------------------------------------------------------------------


def test_a_plain_validation_writes_nothing(run: Path) -> None:
    before = sorted(p for p in run.rglob("*"))
    for level in ("quick", "full", "load"):
        assert cli.run(["validate", str(run), "--level", level, "--all"]) == 0
    assert sorted(p for p in run.rglob("*")) == before


@pytest.mark.usefixtures("small_pieces")
def test_a_scrub_goes_on_where_it_stopped(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left, seen = [3], []
    monkeypatch.setattr(Budget, "over", property(lambda self: (left.__setitem__(0, left[0] - 1), left[0] < 0)[1]))
    while True:
        left[0] = 3
        status, document = ask(capsys, f"{run}@2", "--level", "full", "--max-duration", "1h")
        coverage = document["checkpoints"][0]["coverage"]
        seen.append((coverage["before"], coverage["now"]))
        if status == 0:
            break
        assert status == 3
        assert "left for another time" in document["checkpoints"][0]["reason"]
    assert len(seen) > 2
    assert all(now == 3 for _, now in seen[:-1])
    assert [b for b, _ in seen] == [3 * n for n in range(len(seen))]
    assert sum(now for _, now in seen) == coverage["pieces"]
    left[0] = 1000
    assert ask(capsys, f"{run}@2", "--level", "full", "--max-age", "1h")[1]["checkpoints"][0]["bytes_hashed"] < 4000
    fresh = ask(capsys, f"{run}@2", "--level", "full", "--max-age", "0s")[1]["checkpoints"][0]["coverage"]
    assert (fresh["before"], fresh["now"]) == (0, coverage["pieces"])


def test_damage_is_not_remembered_as_good(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Step(run).flip("__1_0.distcp", 700)
    for _ in range(2):
        status, document = ask(capsys, f"{run}@2", "--level", "full", "--max-age", "7d")
        assert status == 1
        assert document["checkpoints"][0]["findings"][0]["object"] == "__1_0.distcp"


def test_what_was_good_of_another_manifest_or_level_says_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(capsys, f"{run}@2", "--level", "full", "--max-age", "7d")[0] == 0
    loaded = ask(capsys, f"{run}@2", "--level", "load", "--max-age", "7d")[1]["checkpoints"][0]["coverage"]
    assert loaded["before"] == 0
    Step(run).edit("manifest.json", lambda m: m["writer"].update(note="another"))
    assert ask(capsys, f"{run}@2", "--level", "full", "--max-age", "7d")[1]["checkpoints"][0]["coverage"]["before"] == 0


def test_torn_and_foreign_records_are_ignored(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / f"scrub/{ATTEMPT}"
    assert ask(capsys, f"{run}@2", "--level", "full", "--max-age", "7d")[0] == 0
    (good,) = folder.iterdir()
    text = good.read_text()
    good.unlink()
    record = json.loads(text)
    for n, data in enumerate([
        text[: len(text) // 2], "", "[]", "null", "[" * 5000, text.replace("ckpt.scrub/1", "ckpt.scrub/2"), "\0" * 99,
        json.dumps({**record, "good": 7}), json.dumps({**record, "created": "yesterday"}),
        json.dumps({**record, "created": "2999-01-01T00:00:00Z"}), json.dumps({**record, "created": "2026-11-30"}),
        json.dumps({**record, "good": [["x"], None]}),
    ]):  # fmt: skip
        (folder / f"{n}.json").write_text(data)
    (folder / "notes.txt").write_text("mine")
    status, document = ask(capsys, f"{run}@2", "--level", "full", "--max-age", "7d")
    assert status == 0
    assert document["checkpoints"][0]["coverage"]["before"] == 0
    assert document["checkpoints"][0]["coverage"]["now"] == document["checkpoints"][0]["coverage"]["pieces"]


@pytest.mark.usefixtures("small_pieces")
def test_two_scrubs_at_once_do_no_harm(run: Path) -> None:
    store = LocalStore(str(run))
    names = [str(n) for n in range(40)]

    def one(_: int) -> int:
        mine = Scrub(store, ATTEMPT, "full", Budget(until=float("inf")))
        for name in mine.begin("0" * 32, names):
            mine.good(name)
        return mine.end().left

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(one, range(24))) == {0}
    assert Scrub(store, ATTEMPT, "full", Budget(max_age_s=60.0)).begin("0" * 32, names) == []


def test_a_long_scrub_remembers_as_it_goes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "RECORD_EVERY_S", 0.0)
    store = LocalStore(str(run))
    killed = Scrub(store, ATTEMPT, "full", Budget(until=float("inf")))
    killed.begin("0" * 32, ["a", "b", "c"])
    killed.good("a")
    killed.good("b")  # and no end
    assert Scrub(store, ATTEMPT, "full", Budget(max_age_s=60.0)).begin("0" * 32, ["a", "b", "c"]) == ["c"]


def test_a_store_that_may_only_be_read_is_scrubbed_all_the_same(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "scrub").write_text("a file where the records would go")
    status, document = ask(capsys, f"{run}@2", "--level", "full", "--max-age", "7d")
    assert status == 0
    assert any("nothing is remembered" in hint for hint in document["checkpoints"][0]["hints"])


def test_a_folder_outside_a_run_has_no_memory(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(run / FOLDER, tmp_path / "alone"))
    status, document = ask(capsys, str(folder), "--level", "full", "--subset", "1/1")
    assert status == 0
    assert "outside a run" in document["checkpoints"][0]["hints"][0]
    assert not (folder / "scrub").exists()


# --- load -----------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 9), max_size=4).map(tuple), st.sampled_from([1, 2, 8]), st.integers(1, 300)
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_boxes_partition_a_tensor(shape: tuple[int, ...], itemsize: int, limit: int) -> None:
    covered: set[tuple[int, ...]] = set()
    total = 0
    for offsets, sizes in loading.boxes(shape, itemsize, max(limit, itemsize)):
        elements = 1
        for o, n, whole in zip(offsets, sizes, shape, strict=True):
            assert 0 <= o <= o + n <= whole
            elements *= n
        assert elements * itemsize <= max(limit, itemsize)
        total += elements
        covered.add(offsets)
    expected = 1
    for n in shape:
        expected *= n
    assert total == expected
    assert len(covered) == sum(1 for _ in loading.boxes(shape, itemsize, max(limit, itemsize)))


@pytest.mark.parametrize("box_bytes", [1, 16, 100, 1 << 20])
def test_a_load_proves_in_boxes_of_any_size(
    box_bytes: int, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "BOX_BYTES", box_bytes)
    monkeypatch.setattr(loading.boxes, "__defaults__", (box_bytes,))
    status, document = ask(capsys, str(run), "--level", "load", "--all")
    assert status == 0
    assert [r["tensors_proven"] for r in document["checkpoints"]] == [5, 5]


LOAD_DAMAGE = {
    "flip": lambda s: s.flip("__1_0.distcp", 700),
    "fingerprint": lambda s: s.edit("manifest.json", lambda m: m["tensors"]["model.fine"].update(
        fingerprint="fp1:" + "0" * 32)),
    "whole": lambda s: s.edit("manifest.json", lambda m: m.update(fingerprint="fp1:" + "0" * 32)),
    "shape": lambda s: s.edit("manifest.json", lambda m: m["tensors"]["model.weight"].update(shape=[1 << 40, 1 << 20])),
    "lost": lambda s: s.edit("manifest.json", lambda m: m["tensors"].pop("model.fine")),
    "value": lambda s: s.edit("manifest.json", lambda m: m["values"]["note"].update(digest="0" * 32)),
    "metadata": lambda s: s.replace(".metadata", b"\x80\x04cos\nsystem\n."),
}  # fmt: skip


@pytest.mark.parametrize("damage", LOAD_DAMAGE)
def test_a_load_names_damage(damage: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LOAD_DAMAGE[damage](Step(run))
    status, document = ask(capsys, f"{run}@2", "--level", "load")
    report = document["checkpoints"][0]
    assert (status, report["verdict"]) == (1, "bad")
    assert report["findings_total"] == len(report["findings"]) <= 2
    assert report["findings"][0]["object"] in (".metadata", "__1_0.distcp", "manifest.json")


def test_chunks_that_do_not_make_up_a_tensor_are_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = loading.create_read_items_for_chunk_list
    monkeypatch.setattr(
        loading, "create_read_items_for_chunk_list", lambda name, *a: [] if name == "model.fine" else real(name, *a)
    )
    status, document = ask(capsys, f"{run}@2", "--level", "load")
    assert status == 1
    (found,) = document["checkpoints"][0]["findings"]
    assert (found["item"], found["found"]) == ("model.fine", "0 elements")
    assert "do not make up" in found["what"]


def test_a_missing_fingerprint_is_said_to_be_not_verified(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Step(run).edit("manifest.json", lambda m: m["tensors"]["model.fine"].update(fingerprint="fp9:new"))
    status, document = ask(capsys, f"{run}@2", "--level", "load")
    assert status == 0
    assert "1 of 5 tensors" in document["checkpoints"][0]["unverified"][0]
    assert "model.fine" in document["checkpoints"][0]["unverified"][0]


# --- JUnit ----------------------------------------------------------------------------------------------------


def test_junit_is_valid_and_counts(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Step(run).flip("__1_0.distcp", 700)
    Step(run).edit("manifest.json", lambda m: m["tensors"].update({"x\x1b&<": m["tensors"].pop("model.fine")}))
    out = tmp_path / "out.xml"
    assert cli.run(["validate", str(run), "--level", "full", "--all", "--junit", str(out)]) == 1
    suites = ET.parse(out).getroot()
    cases = suites.findall("testsuite/testcase")
    assert int(suites.get("tests")) == len(cases) == 6
    assert int(suites.get("failures")) == len(suites.findall("testsuite/testcase/failure")) >= 1
    assert {s.get("name")[:6] for s in suites} == {"step 2", "step 1"}
    failed = [c.get("name") for c in cases if c.find("failure") is not None]
    assert any(name.endswith("objects of rank 1") for name in failed)
    assert "\x1b" not in out.read_text()


def test_junit_that_cannot_be_written_is_a_usage_error(run: Path, tmp_path: Path) -> None:
    assert cli.run(["validate", str(run), "--junit", str(tmp_path / "no/such/folder.xml")]) == 2


def test_bounded_memory_of_a_large_tensor(tmp_path: Path) -> None:
    """One tensor of 156 MiB is proven in less memory than it has, above what torch takes itself."""
    code = (
        "import sys, torch, ckpt, ckpt.cli, re\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) >> 10\n"
        "url = sys.argv[2]\n"
        "if sys.argv[1] == 'make':\n"
        "    s = ckpt.State(m=torch.nn.Linear(6400, 6400, bias=False))\n"
        "    with ckpt.open(url) as c: c.resume(s); c.save(1, s)\n"
        "else:\n"
        "    import ckpt.tools.loading; before = peak()\n"
        "    assert ckpt.cli.run(['validate', url, '--level', 'load']) == 0\n"
        "    print(peak() - before, file=sys.stderr)\n"
    )
    url = str(tmp_path / "run")
    for what in ("make", "check"):
        done = subprocess.run([sys.executable, "-c", code, what, url], capture_output=True, text=True, check=True,
                              env={**os.environ, "OMP_NUM_THREADS": "2"}, timeout=120)  # fmt: skip
    assert int(done.stderr.split()[-1]) < 150
