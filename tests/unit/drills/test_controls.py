"""A control run is taken again only for what would run the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from drills.controls import Shelf, key
from drills.history import FILE, History, load
from drills.scenario import Plan
from drills.schedule import When


def plan(script: Path) -> Plan:
    return Plan(drill="kill-any-rank", command=("python", str(script), "{url}", "{log}"), seed=1, url_base="file:///x")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "code/train.py"
    path.parent.mkdir()
    path.write_text("print(1)")
    return path


def test_another_drill_or_seed_of_the_same_command_shares_it(script: Path) -> None:
    a = plan(script)
    assert key(a) == key(replace(a, drill="kill-all", seed=2, when=When(rank=0), budget_s=5.0, control_runs=2))


def test_what_may_change_the_run_changes_the_key(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = plan(script)
    keys = {key(a), key(replace(a, nproc=2)), key(replace(a, command=(*a.command, "--seed", "2")))}
    keys.add(key(replace(a, default_url=False, url_base="s3://b/one/kill-1")))
    monkeypatch.setenv("DEFECT", "noise")
    keys.add(key(a))
    monkeypatch.delenv("DEFECT")
    script.write_text("print(2)")
    keys.add(key(a))
    (script.parent / "model.py").write_text("x = 1")
    keys.add(key(a))
    assert len(keys) == 7


def test_a_kept_run_is_put_into_another_drill_as_if_it_had_run_there(script: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    shelf = Shelf(tmp_path / "controls", plan(script))
    assert shelf.kept() is None
    with History(first) as h:
        h.begin(plan(script), {})
        h.add("run.started", run="control", url=shelf.url, argv=["a"], pid=1, start=1)
        h.add("commit.seen", run="control", step=4, name="n", folder="f", t=12.5)
        h.add("run.started", run="drilled", url="file:///y", argv=["a"], pid=2, start=1)
        h.add("run.ended", run="control", status=0, stopped=None, t=14.0)
        (first / "control").mkdir()
        (first / "control/log.jsonl").write_text('{"step": 1, "rank": 0}\n')
        shelf.keep(first)
    assert shelf.kept() == (shelf.url, {"n"})
    assert Shelf(tmp_path / "controls", plan(script)).kept() == shelf.kept()
    with History(second) as h:
        h.begin(plan(script), {})
        shelf.take(second, h)
    record = load(second)
    assert record.cached_control is not None
    assert set(record.runs) == {"control"}
    assert (record.runs["control"].url, record.runs["control"].status) == (shelf.url, 0)
    assert record.runs["control"].log.last_step == 1
    assert [json.loads(t)["event"] for t in (second / FILE).read_text().splitlines()][1] == "control.cached"
