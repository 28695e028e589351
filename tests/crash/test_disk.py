"""A power cut after every operation of a LocalStore: what was reported is there, and nothing that counts is torn."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt
import ckpt.store.local
from ckpt.errors import CkptError
from tests.crash.disk import Disk, after_power_cut
from tests.crash.jobs import Content

SAVES = 3


def record(root: Path) -> Disk:
    """A run of three saves that keeps one step; ``note`` is the newest step that was reported."""
    disk = Disk(root)
    content = Content()
    with disk.followed(), ckpt.open(root / "run", keep=ckpt.Latest(1), grace_s=0.0) as store:
        store.resume(content.state)
        for step in range(1, SAVES + 1):
            content.fill(step)
            store.save(step, content.state).wait()
            disk.note = step
    return disk


def violations(disk: Disk, scratch: Path, *, variants: int = 3) -> list[str]:
    """Cut the power after each operation, look at several disks that may be left, and start again on each."""
    found = []
    for n, (tree, reported) in enumerate(disk.moments):
        for variant in range(variants):
            rng = random.Random(f"{n} {variant}") if variant else None
            shutil.rmtree(scratch, ignore_errors=True)
            after_power_cut(tree, scratch, rng)
            content = Content()
            content.fill(99)
            try:
                got = ckpt.open(scratch / "run").resume(content.state)
            except CkptError as e:
                found.append(f"operation {n}, disk {variant}, {reported} reported: {e}")
                continue
            restored = content.numbers() if got.attempt else {got.step}
            if got.step < reported or restored != {got.step} or (got.skipped and got.step < reported):
                found.append(f"operation {n}, disk {variant}, {reported} reported: step {got.step} holds {restored}")
    return found


def test_a_power_cut_at_any_moment(tmp_path: Path) -> None:
    disk = record(tmp_path / "disk")
    assert len(disk.moments) > 100
    assert not violations(disk, tmp_path / "left")


def no_flush_of_folders(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ckpt.store.local, "_flush_folder", lambda _: None)


def no_flush_of_new_folders(patch: pytest.MonkeyPatch) -> None:
    def make(self: Any, folder: Path) -> None:
        if not folder.is_dir():
            make(self, folder.parent)
            folder.mkdir()

    patch.setattr(ckpt.store.local.LocalStore, "_make", make)


def no_flush_of_files(patch: pytest.MonkeyPatch) -> None:
    real = Disk._fsync

    def only_folders(self: Disk, result: None, fd: int) -> None:
        if not hasattr(self._fds[fd], "now") or isinstance(self._fds[fd].now, dict):
            real(self, result, fd)

    patch.setattr(Disk, "_fsync", only_folders)


@pytest.mark.parametrize("broken", [no_flush_of_folders, no_flush_of_new_folders, no_flush_of_files])
def test_a_weaker_store_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None]
) -> None:
    broken(monkeypatch)
    disk = record(tmp_path / "disk")
    monkeypatch.undo()
    found = violations(disk, tmp_path / "left", variants=2)
    assert found
    print(f"\n{broken.__name__}: {len(found)} violations, the first: {found[0].splitlines()[0]}")
