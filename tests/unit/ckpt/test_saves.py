"""Saves that fail, and what is left of attempts that nobody finished: the real code on a local disk."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.catalog import Catalog
from ckpt.engine.writer import ObjectWriter
from ckpt.errors import Refused, StorageError, Superseded
from ckpt.format.layout import Attempt, parse_attempt, parse_epoch_key
from ckpt.retention import collect_unfinished, unfinished
from ckpt.store import open_store
from ckpt.store.keys import TEMP_PREFIX


def a_state() -> ckpt.State:
    return ckpt.State(model=torch.nn.Linear(3, 2))


def break_writes(run: Path) -> Path:
    """From now on no data object can be written, whoever asks."""
    blocker = run / "steps"
    if blocker.exists():
        blocker.rename(run / "steps.aside")
    blocker.touch()
    return blocker


def mend_writes(run: Path) -> None:
    (run / "steps").unlink()
    if (run / "steps.aside").exists():
        (run / "steps.aside").rename(run / "steps")


def test_an_error_that_was_heard_is_not_raised_again(tmp_path: Path) -> None:
    state, store = a_state(), ckpt.open(tmp_path / "run")
    store.resume(state)
    break_writes(tmp_path / "run")
    pending = store.save(1, state)
    with pytest.raises(StorageError):
        pending.wait()
    mend_writes(tmp_path / "run")
    assert store.save(2, state).wait().step == 2


def test_an_error_that_nobody_heard_comes_out_of_the_next_save(tmp_path: Path) -> None:
    state, store = a_state(), ckpt.open(tmp_path / "run")
    store.resume(state)
    break_writes(tmp_path / "run")
    store.save(1, state)
    with pytest.raises(StorageError):
        store.save(2, state)
    mend_writes(tmp_path / "run")
    assert store.save(2, state).wait().step == 2, "the step whose save was never begun can be saved"


def half_a_save(run: Path, step: int, epoch: int, *, temporary: bool = False) -> Attempt:
    """What a start that was killed in mid-save leaves: data and no commit record, or only a torn temporary file."""
    attempt = parse_attempt(f"{step:012d}-e{epoch:08d}-0")
    assert attempt is not None
    folder = run / attempt.prefix
    folder.mkdir(parents=True)
    (folder / (f"{TEMP_PREFIX}0123" if temporary else "__0_0.distcp")).write_bytes(b"x" * 1000)
    if temporary:
        os.utime(folder / f"{TEMP_PREFIX}0123", (time.time() - 7200,) * 2)
    return attempt


def test_the_next_start_deletes_what_a_killed_one_left(tmp_path: Path) -> None:
    run = tmp_path / "run"
    state = a_state()
    with ckpt.open(run) as store:
        store.resume(state)
        store.save(10, state)
    torn, lost = half_a_save(run, 20, 1), half_a_save(run, 30, 1, temporary=True)
    with ckpt.open(run, keep=ckpt.Latest(3)) as store:
        assert store.resume(state).step == 10
        assert (run / torn.prefix).exists(), "nothing is deleted before the new start has a step of its own"
        store.save(11, state)
    assert not (run / torn.prefix).exists()
    assert not (run / lost.prefix).exists()
    mark = json.loads((run / torn.quarantine_key).read_text())
    assert mark["reason"].startswith("abandoned")
    assert mark["epoch"] == "e00000002"
    # its commit record arrives late, all the same: it names an attempt that is not to be used
    shutil.copy(next((run / "commits").glob("000000000010-*")), run / torn.commit_key)
    assert ckpt.open(run).newest_valid() == "000000000011-e00000002-0"


def test_without_a_keep_policy_nothing_is_deleted(tmp_path: Path) -> None:
    run, state = tmp_path / "run", a_state()
    with ckpt.open(run) as store:
        store.resume(state)
        torn = half_a_save(run, 5, 1)
        store.save(10, state)
    assert (run / torn.prefix).exists()


def test_a_failed_save_of_this_start_is_collected_after_the_next_good_one(tmp_path: Path) -> None:
    run, state = tmp_path / "run", a_state()
    store = ckpt.open(run, keep=ckpt.Latest(3))
    store.resume(state)
    store.save(1, state).wait()
    (run / "commits").rename(run / "aside")
    (run / "commits").touch()  # the data can be written, the commit record cannot
    with pytest.raises(StorageError):
        store.save(2, state).wait()
    torn = run / "steps/000000000002/e00000001-0"
    assert (torn / "manifest.json").exists()
    (run / "commits").unlink()
    (run / "aside").rename(run / "commits")
    store.save(3, state).wait()
    assert not torn.exists()
    assert (run / "steps/000000000001").exists()


def test_what_is_being_written_or_retired_is_not_unfinished(tmp_path: Path) -> None:
    run, state = tmp_path / "run", a_state()
    with ckpt.open(run, keep=ckpt.Latest(1), grace_s=3600.0) as store:
        store.resume(state)
        for step in (1, 2):
            store.save(step, state).wait()
    assert (run / "steps/000000000001").exists(), "retired, and in its time of grace"
    writing = half_a_save(run, 3, 1)
    catalog = Catalog(open_store(run))
    (own,) = {p[0] for e in catalog.store.list("epochs/") if (p := parse_epoch_key(e.key))}
    assert unfinished(catalog, own, own=False) == []
    assert unfinished(catalog, own, own=True) == [writing]


def test_a_start_that_was_overtaken_deletes_nothing(tmp_path: Path) -> None:
    run, state = tmp_path / "run", a_state()
    old = ckpt.open(run)
    old.resume(state)
    torn = half_a_save(run, 1, 1)
    epoch = parse_epoch_key("epochs/00000001.json")
    assert epoch is not None
    ckpt.open(run).resume(state)
    with pytest.raises(ckpt.CkptError) as caught:
        collect_unfinished(Catalog(open_store(run)), epoch[0], own=True)
    assert caught.value.exit_status == 6
    assert (run / torn.prefix).exists()


def test_a_writer_whose_data_a_newer_start_has_deleted_is_told_that_it_was_overtaken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, state = tmp_path / "run", a_state()
    old = ckpt.open(run)
    old.resume(state)
    publish = ObjectWriter.publish

    def overtaken(writer: ObjectWriter, *args: Any, **how: Any) -> None:
        monkeypatch.setattr(ObjectWriter, "publish", publish)
        with ckpt.open(run, keep=ckpt.Latest(1)) as new:
            new.resume(a_state())
            new.save(9, a_state()).wait()
        assert not (run / "steps/000000000001").exists(), "collected: its start was over, as far as anybody could tell"
        publish(writer, *args, **how)

    monkeypatch.setattr(ObjectWriter, "publish", overtaken)
    with pytest.raises(Superseded):
        old.save(1, state).wait()
    assert ckpt.open(run).newest_valid() == "000000000009-e00000002-0"


def test_a_run_whose_only_commit_came_too_late_starts_from_zero_and_says_so(tmp_path: Path) -> None:
    """Start 1 commits after start 2 has begun with nothing, and start 2 dies: start 3 is not at a dead end."""
    run, state = tmp_path / "run", a_state()
    first = ckpt.open(run)
    first.resume(state)
    first.save(5, state).wait()
    (record,) = (run / "commits").iterdir()
    aside = record.rename(tmp_path / record.name)
    ckpt.open(run).resume(state)  # start 2 sees nothing, records that it builds on nothing, and dies
    aside.rename(record)
    got = ckpt.open(run).resume(state)
    assert got.attempt is None
    ((name, why),) = got.skipped
    assert name == "000000000005-e00000001-0"
    assert "overtaken" in why


def test_a_fresh_start_that_saved_nothing_needs_a_decision(tmp_path: Path) -> None:
    run, state = tmp_path / "run", a_state()
    with ckpt.open(run) as store:
        store.resume(state)
        store.save(5, state)
    ckpt.open(run, fresh=True).resume(state)
    with pytest.raises(ckpt.CkptError, match="not starting from zero"):
        ckpt.open(run).resume(state)
    assert ckpt.open(run, fresh=True).resume(state).attempt is None


def test_saving_before_a_resume_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="was not resumed"):
        ckpt.open(tmp_path / "run").save(1, a_state())
