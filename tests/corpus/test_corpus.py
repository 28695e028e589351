"""Every spoiled step is judged as its recipe says: no traceback, no allocation beyond the files' size, no execution."""

from __future__ import annotations

import json
import random
import shutil
import tracemalloc
from pathlib import Path

import pytest

from ckpt import cli
from ckpt.format import layout
from ckpt.store import open_store
from ckpt.tools import render
from ckpt.tools.validate import validate
from tests.corpus.golden import GOLDEN_V1
from tests.corpus.mutate import mutated_bytes, mutated_json
from tests.corpus.recipes import ATTEMPT, CANARY, FOLDER, RECIPES, Recipe, Step

PARSED_PER_BYTE = 60  # what a byte of JSON or pickle may become in memory while it is read
FIXED_BYTES = 8 << 20  # what printing and click take


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN_V1, tmp_path / "run"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_spoiled_step(recipe: Recipe, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = Step(run)
    recipe.spoil(step)
    size = sum(p.stat().st_size for p in run.rglob("*") if p.is_file())
    for command, status in zip(
        (["inspect"], ["validate"], ["validate", "--level", "full"]), recipe.statuses, strict=True
    ):
        tracemalloc.start()
        got = cli.run([*command, f"{run}@2"])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        said = capsys.readouterr()
        assert got == status, (command, said.out, said.err)
        assert "Traceback" not in said.err
        assert peak < size * PARSED_PER_BYTE + FIXED_BYTES, f"{command}: {peak} bytes for {size} bytes of files"
        assert said.out.isprintable() or said.out.replace("\n", "").isprintable()
    assert recipe.says in said.out
    assert not Path(CANARY).exists()


def test_the_same_words_in_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Step(run).flip("__1_0.distcp", 700)
    assert cli.run(["validate", f"{run}@2", "--level", "full", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["verdict"], found["newest_good"]) == ("ckpt.validate/1", "bad", 1)
    (finding,) = found["checkpoints"][0]["findings"]
    assert (finding["object"], finding["rank"], finding["block"]) == ("__1_0.distcp", 1, 0)
    assert finding["item"] is not None
    assert finding["expected"].startswith("xxh3-128 ")


def test_all_damage_is_listed_not_only_the_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = Step(run)
    for name, at in (("__0_0.distcp", 100), ("__1_0.distcp", 700), ("__1_0.distcp", 5000), (".metadata", 40)):
        step.flip(name, at)
    assert cli.run(["validate", str(run), "--level", "full"]) == 1
    said = capsys.readouterr().out
    assert "bad: step 2 (full): 4 damaged" in said
    assert "good: step 1 (full)" in said
    assert "newest good step: 1 (full)" in said


def test_damaged_base_record_leaves_unknown_what_counts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "epochs/00000002.base.json").write_bytes(b"")
    assert cli.run(["ls", str(run)]) == 1
    said = capsys.readouterr()
    assert said.out.count("unknown") == 2
    assert "epochs/00000002.base.json does not end with its digest" in said.err
    assert cli.run(["validate", str(run)]) == 1


@pytest.mark.parametrize("name", ["manifest.json", "index/00001.json", ".metadata", "commit"])
def test_random_damage_that_is_vouched_for(name: str, run: Path) -> None:
    """Whatever a record says, with all digests made to fit, ends in a verdict."""
    store = open_store(str(run))
    step = Step(run)
    clean = (step.commit if name == "commit" else step.folder / name).read_bytes()
    manifest, commit = (step.folder / "manifest.json").read_bytes(), step.commit.read_bytes()
    verdicts = {"good": 0, "bad": 0, "not verified": 0}
    for seed in range(100):
        rng = random.Random(seed)
        (step.folder / "manifest.json").write_bytes(manifest)
        step.commit.write_bytes(commit)
        changed = mutated_bytes(clean, rng) if name == ".metadata" or seed % 4 == 0 else mutated_json(clean, rng)
        if name == "commit":
            step.commit.write_bytes(changed)
        else:
            step.replace(name, changed)
        report = validate(store, f"{FOLDER}/", level="full", attempt=layout.parse_attempt(ATTEMPT))
        verdicts[report.verdict] += 1
        assert all(line.isprintable() for line in render.report_lines(report))
        json.loads(render.as_json("x", {"report": report}))
    assert verdicts["bad"] > 30


def test_every_flipped_bit_is_found_and_its_object_named(run: Path) -> None:
    """Any bit of any file of the step, its commit record included."""
    store, rng = open_store(str(run)), random.Random(7)
    files = [p for p in [*(run / FOLDER).rglob("*"), Step(run).commit] if p.is_file()]
    assert len(files) == 7
    for n in range(140):
        path = files[n % len(files)]
        clean = path.read_bytes()
        spoiled = bytearray(clean)
        spoiled[rng.randrange(len(spoiled))] ^= 1 << rng.randrange(8)
        path.write_bytes(spoiled)
        report = validate(store, f"{FOLDER}/", level="full", attempt=layout.parse_attempt(ATTEMPT))
        path.write_bytes(clean)
        if path == Step(run).commit and report.verdict == "good":
            continue  # a field that nothing depends on: the time, the base, a size
        names = {f.object for f in report.findings}
        name = path.relative_to(run / FOLDER).as_posix() if path.is_relative_to(run / FOLDER) else path.name
        if path == Step(run).commit:
            assert report.verdict in ("bad", "not verified")
        else:
            assert (report.verdict, names) == ("bad", {name})
    assert validate(store, f"{FOLDER}/", level="full", attempt=layout.parse_attempt(ATTEMPT)).verdict == "good"
