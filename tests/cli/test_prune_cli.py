"""``prune`` beside a job: it never claims, never writes where a start is in progress, and finishes what was begun."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt import catalog, cli
from ckpt.catalog import Catalog
from ckpt.format import layout
from ckpt.format.layout import Epoch
from ckpt.store import open_store
from ckpt.store.local import LocalStore
from ckpt.tools import pruning
from tests.corpus.golden import GOLDEN_V1
from tests.unit.ckpt.test_saves import half_a_save


def steps(url: str) -> list[int]:
    cat = Catalog(open_store(url))
    return [a.step for a in cat.usable(cat.listing())]


@pytest.fixture
def job(tmp_path: Path) -> tuple[str, ckpt.Checkpoints, ckpt.State]:
    """A job that has saved ten steps and goes on."""
    url = str(tmp_path / "run")
    state = ckpt.State(w=torch.arange(8.0))
    store = ckpt.open(url)
    store.resume(state)
    for step in range(1, 11):
        store.save(step, state).wait()
    return url, store, state


def test_a_running_job_goes_on_after_a_prune(job: tuple[str, ckpt.Checkpoints, ckpt.State]) -> None:
    url, store, state = job
    epochs = sorted(e.key for e in open_store(url).list(layout.EPOCHS))
    assert cli.run(["prune", url, "--keep", "latest:2,every:5", "--apply", "--grace", "0s"]) == 0
    assert steps(url) == [10, 9, 5]
    assert sorted(e.key for e in open_store(url).list(layout.EPOCHS)) == epochs
    assert {a.step for e in open_store(url).list(layout.STEPS) if (a := layout.parse_step_key(e.key))} == {10, 9, 5}
    assert store.save(11, state).wait().step == 11
    assert cli.run(["validate", url, "--level", "full", "--all"]) == 0


def test_a_dry_run_changes_nothing(job: tuple[str, ckpt.Checkpoints, ckpt.State]) -> None:
    url = job[0]
    before = {e.key: e.size for e in open_store(url).list()}
    assert cli.run(["prune", url, "--keep", "latest:1"]) == 0
    assert {e.key: e.size for e in open_store(url).list()} == before


def test_the_grace_period_is_kept(job: tuple[str, ckpt.Checkpoints, ckpt.State]) -> None:
    url = job[0]
    assert cli.run(["prune", url, "--keep", "latest:1", "--apply", "--grace", "1h"]) == 0
    assert steps(url) == [10]
    data = [e for e in open_store(url).list(layout.STEPS) if "000000000003/" in e.key]
    assert data
    assert cli.run(["prune", url, "--keep", "latest:1", "--apply", "--grace", "1h"]) == 0
    assert [e for e in open_store(url).list(layout.STEPS) if "000000000003/" in e.key] == data


def test_a_start_in_progress_forbids_it(
    job: tuple[str, ckpt.Checkpoints, ckpt.State], capsys: pytest.CaptureFixture[str]
) -> None:
    url = job[0]
    epoch = catalog.claim(open_store(url), world_size=4)
    before = {e.key: e.size for e in open_store(url).list()}
    assert cli.run(["prune", url, "--keep", "latest:1", "--apply", "--json"]) == 6
    said = json.loads(capsys.readouterr().out)
    assert str(epoch) in said["message"]
    facts = dict(said["facts"])
    assert "4 ranks" in facts["by"]
    assert "ago" in facts["claimed"]
    assert said["next"]
    assert {e.key: e.size for e in open_store(url).list()} == before
    catalog.write_base(open_store(url), epoch, Catalog(open_store(url)).resolve(7))
    assert cli.run(["prune", url, "--keep", "latest:1", "--apply"]) == 0
    assert steps(url) == [7]


def test_a_start_that_claims_in_between_deletes_nothing(
    job: tuple[str, ckpt.Checkpoints, ckpt.State], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim lands after the plan and before the fence: marks may be left, no record or data is deleted."""
    url = job[0]
    real = pruning.retire

    def late(*args: object, **options: object) -> object:
        catalog.claim(open_store(url), world_size=1)
        return real(*args, **options)

    monkeypatch.setattr(pruning, "retire", late)
    assert cli.run(["prune", url, "--keep", "latest:1", "--apply", "--grace", "0s"]) == 6
    cat = Catalog(open_store(url))
    assert len(cat.counted(cat.listing())) == 10
    assert len({a for e in open_store(url).list(layout.STEPS) if (a := layout.parse_step_key(e.key))}) == 10


def test_a_damaged_newest_step_keeps_all_others(job: tuple[str, ckpt.Checkpoints, ckpt.State]) -> None:
    url = job[0]
    store = open_store(url)
    newest = Catalog(store).resolve()
    store.delete([newest.prefix + layout.METADATA])
    assert cli.run(["prune", url, "--keep", "latest:1", "--apply", "--grace", "0s"]) == 1
    assert len(steps(url)) == 10
    assert cli.run(["quarantine", f"{url}@10", "--reason", "damaged"]) == 0
    assert cli.run(["prune", url, "--keep", "latest:1", "--apply", "--grace", "0s"]) == 0
    assert steps(url) == [9]


def test_a_retirement_finished_by_the_job_meanwhile_is_no_error(
    job: tuple[str, ckpt.Checkpoints, ckpt.State], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = job[0]
    assert cli.run(["prune", url, "--keep", "latest:3", "--apply", "--grace", "1h"]) == 0
    real, times = LocalStore.get, []

    def racing(self: LocalStore, key: str, **options: int) -> bytes:
        if key.startswith(layout.RETIRE):
            times.append(key)
            if len(times) == 12:
                self.delete([key])
        return real(self, key, **options)

    monkeypatch.setattr(LocalStore, "get", racing)
    assert cli.run(["prune", url, "--keep", "latest:3", "--apply", "--grace", "1h"]) == 0


def test_records_of_validations_go_with_their_step(tmp_path: Path) -> None:
    run = Path(shutil.copytree(GOLDEN_V1, tmp_path / "run"))
    assert cli.run(["validate", str(run), "--level", "full", "--all", "--max-age", "1d"]) == 0
    assert len(list((run / "scrub").iterdir())) == 2
    assert cli.run(["prune", str(run), "--keep", "latest:1", "--apply", "--grace", "0s"]) == 0
    assert [p.name for p in (run / "scrub").iterdir()] == ["000000000002-e00000002-0"]


def test_the_newest_of_two_attempts_at_a_step_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(tmp_path / "run")
    state = ckpt.State(w=torch.zeros(2))
    with ckpt.open(url) as store:
        store.resume(state)
        store.save(1, state).wait()
        store.save(1, state).wait()
    capsys.readouterr()
    assert cli.run(["prune", url, "--keep", "every:1", "--json"]) == 0
    fates = {a["attempt"]: (a["fate"], a["why"]) for a in json.loads(capsys.readouterr().out)["attempts"]}
    assert fates == {"000000000001-e00000001-1": ("keep", "newest, every:1"),
                     "000000000001-e00000001-0": ("retire", "a newer attempt of the step is kept")}  # fmt: skip


def test_lifting_a_mark_of_a_step_off_the_line_says_so(
    job: tuple[str, ckpt.Checkpoints, ckpt.State], capsys: pytest.CaptureFixture[str]
) -> None:
    url = job[0]
    assert cli.run(["quarantine", f"{url}@9", "--reason", "spike"]) == 0
    store = open_store(url)
    epoch = catalog.claim(store, world_size=1)
    catalog.write_base(store, epoch, Catalog(store).resolve(5))
    capsys.readouterr()
    assert cli.run(["quarantine", f"{url}@9", "--lift"]) == 0
    assert "off the line that counts" in capsys.readouterr().out
    assert replace(Catalog(store).resolve(), epoch=Epoch(0)).step == 5


def test_newest_valid_looks_again_where_its_step_is_retired(
    job: tuple[str, ckpt.Checkpoints, ckpt.State], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, store, state = job
    real, done = LocalStore.get, []

    def late(self: LocalStore, key: str, **options: int) -> bytes:
        if key.startswith(layout.COMMITS) and "0010-" in key and not done:  # a newer step comes, and this one goes
            done.append(key)
            store.save(11, state).wait()
            assert cli.run(["prune", url, "--keep", "latest:1", "--apply", "--grace", "0s"]) == 0
            capsys.readouterr()
        return real(self, key, **options)

    monkeypatch.setattr(LocalStore, "get", late)
    assert cli.run(["newest-valid", url]) == 0
    assert capsys.readouterr().out == "11\n"
    assert done


def test_abandoned_attempts_go_on_request_and_only_those_of_starts_that_are_over(
    job: tuple[str, ckpt.Checkpoints, ckpt.State], capsys: pytest.CaptureFixture[str]
) -> None:
    url, _, state = job
    over = half_a_save(Path(url), 11, 1)
    ckpt.open(url).resume(state)
    writing = half_a_save(Path(url), 12, 2)
    assert cli.run(["prune", url, "--keep", "every:1", "--apply"]) == 0
    assert (Path(url) / over.prefix).exists()
    assert cli.run(["prune", url, "--keep", "every:1", "--abandoned"]) == 0
    assert (Path(url) / over.prefix).exists(), "a dry run"
    capsys.readouterr()
    assert cli.run(["prune", url, "--keep", "every:1", "--abandoned", "--apply", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["done"] == {"retired": [], "deleted": [str(over)], "waiting": []}
    assert not (Path(url) / over.prefix).exists()
    assert (Path(url) / writing.prefix).exists()
    assert len(steps(url)) == 10
