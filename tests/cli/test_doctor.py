"""``doctor``: what it finds wrong, with real folders, interpreters and stores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ckpt import cli
from ckpt.errors import AccessDenied, StorageError
from ckpt.store import open_store
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from ckpt.tools.doctor import bucket, requests, storage

CKPT = [sys.executable, "-m", "ckpt"]
OURS = Path(cli.__file__).resolve().parents[1]


def doctor(folder: Path, **environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    code = "import sys; import ckpt.cli; sys.path; sys.exit(ckpt.cli.run(['doctor', '--json']))"
    # the command is a script: unlike ``python -c`` it does not have the current folder on its path
    script = folder / "run-ckpt-doctor"
    script.write_text(f"#!{sys.executable}\n{code}\n")
    done = subprocess.run([sys.executable, "-P", str(script)], cwd=folder, capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": "", **environment}, timeout=60)  # fmt: skip
    return done.returncode, {c["name"]: c for c in json.loads(done.stdout)["checks"]}


def test_a_good_installation(tmp_path: Path) -> None:
    status, checks = doctor(tmp_path)
    assert status == 0
    assert checks["import ckpt"]["what"] == str(OURS / "ckpt/__init__.py")
    assert checks["torch"]["verdict"] == "good"


def test_a_package_that_shadows_this_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt/__init__.py").write_text("raise SystemExit('never run')\n")
    status, checks = doctor(tmp_path)
    assert status == 1
    assert checks["import ckpt"]["verdict"] == "bad"
    assert str(tmp_path / "ckpt/__init__.py") in checks["import ckpt"]["what"]
    assert "rename" in checks["import ckpt"]["fix"]
    assert checks["import elastic"]["verdict"] == "good"


def test_a_module_of_the_same_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "elastic.py").write_text("")
    status, checks = doctor(tmp_path)
    assert (status, checks["import elastic"]["verdict"]) == (1, "bad")
    assert checks["import elastic"]["fix"].endswith("elastic.py")


def test_a_folder_of_data_is_said_to_be_harmless(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt/weights.bin").write_bytes(b"x")
    status, checks = doctor(tmp_path)
    assert status == 0
    assert "does not shadow it" in checks["import ckpt"]["what"]


def test_a_second_owner_of_the_name_is_named(tmp_path: Path) -> None:
    other = tmp_path / "site"
    for name, version in (("other-ckpt", "1.0"), ("torchrelay", "0.0.1")):
        info = other / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("ckpt/__init__.py,,\n")
    status, checks = doctor(tmp_path, PYTHONPATH=str(other))
    assert status == 1
    assert "other-ckpt" in checks["owner of ckpt"]["what"]
    assert "pip uninstall other-ckpt" in checks["owner of ckpt"]["fix"]
    assert str(other) in checks["installed once"]["what"]


# --- stores ---------------------------------------------------------------------------------------------------


def look(url: str, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, dict[str, str]]]:
    capsys.readouterr()
    status = cli.run(["doctor", url, "--json", *words])
    return status, {c["name"]: c for c in json.loads(capsys.readouterr().out)["checks"]}


def test_a_store_is_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert look(str(tmp_path / "not/made/yet"), capsys)[0] == 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine").write_text("x")
    assert look(str(tmp_path / "run"), capsys)[0] == 0
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["mine"]


@pytest.mark.parametrize("operation", ["put", "get", "list", "delete", "get_ranges", "put_if_absent"])
def test_an_operation_that_is_not_allowed_is_named(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **options: object) -> object:
        raise AccessDenied(f"cannot {operation}", facts=[("answer", "403")])

    monkeypatch.setattr(LocalStore, operation, refuse)
    status, checks = look(str(tmp_path), capsys)
    assert status == 5
    name = {"get_ranges": "get ranges", "put_if_absent": "conditional put"}.get(operation, operation)
    assert checks[name]["verdict"] == "bad"
    assert "403" in checks[name]["what"]
    if operation != "list":
        assert checks["list"]["verdict"] == "good"


def test_a_store_that_shows_stale_bytes_breaks_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, bytes] = {}
    real = LocalStore.get
    monkeypatch.setattr(LocalStore, "get", lambda self, key, **o: seen.setdefault(key, real(self, key, **o)))
    status, checks = look(str(tmp_path), capsys)
    assert status == 5
    assert "not seen at once" in checks["overwrite"]["what"]
    assert "not safe" in checks["overwrite"]["fix"]


@pytest.mark.parametrize(("conditional", "word"), [(True, "kept"), (False, "ignored silently")])
def test_what_the_condition_of_a_put_is_worth(conditional: bool, word: str) -> None:
    store = MemoryStore("memory://doctor", conditional_put=conditional)
    checks = {c.name: c for c in storage.try_operations(store)}
    assert word in checks["conditional put"].what
    store.conditional_put = False  # as a store says that was answered 501
    assert "refused" in {c.name: c for c in storage.try_operations(store)}["conditional put"].what
    assert store.list() == []


def test_what_cannot_be_cleaned_up_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: object) -> None:
        raise StorageError("no deletions here")

    store = open_store(str(tmp_path))
    monkeypatch.setattr(LocalStore, "delete", refuse)
    cleaned = list(storage.try_operations(store))[-1]
    assert (cleaned.name, cleaned.verdict) == ("cleaned up", "bad")
    assert "doctor-" in cleaned.what


MOUNTS = """30 21 0:5 / {root}/nfs rw shared:2 - nfs4 server:/export rw
31 21 0:6 / {root}/mem rw - tmpfs tmpfs rw
32 30 0:7 / {root}/nfs/with\\040space rw - fuse.sshfs host: rw
33 21 0:8 / {root}/nf rw - xfs /dev/sdb rw
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "words"),
    [
        ("other", "ext4", "on this host"),
        ("nfs", "nfs4", "network file system"),
        ("nfs/run", "nfs4", "network file system"),
        ("nfs/with space", "fuse.sshfs", "network file system"),
        ("nf", "xfs", "on this host"),
        ("mem/run", "tmpfs", "in memory"),
    ],
)
def test_file_systems_are_named(path: str, kind: str, words: str, tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.format(root=tmp_path))
    (tmp_path / path).mkdir(parents=True)
    assert storage.filesystem_of(tmp_path / path, str(mounts)) == kind
    store = LocalStore(str(tmp_path / path / "not yet"))
    first, free, *_ = storage.look_at_disk(store, str(mounts))
    assert words in first.what
    assert "GiB free" in free.what
    assert storage.filesystem_of(tmp_path, str(tmp_path / "none")) is None


# --- buckets --------------------------------------------------------------------------------------------------


def test_a_lifecycle_rule_that_eats_steps_is_bad() -> None:
    rule = {"ID": "clean", "Status": "Enabled", "Filter": {"Prefix": "runs/"}, "Expiration": {"Days": 30}}
    assert bucket.lifecycle([rule], "runs/a").verdict == "bad"
    assert "'clean'" in bucket.lifecycle([rule], "runs/a").what
    assert bucket.lifecycle([{**rule, "Filter": {"Prefix": ""}}], "x").verdict == "bad"
    assert bucket.lifecycle([{**rule, "Filter": {"And": {"Prefix": "runs/a/b"}}}], "runs/a").verdict == "bad"
    assert bucket.lifecycle([rule], "models").verdict == "good"
    assert bucket.lifecycle([{**rule, "Status": "Disabled"}], "runs/a").verdict == "good"
    abort = {"Status": "Enabled", "Prefix": "", "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}}
    assert "are removed" in bucket.lifecycle([abort], "runs").what
    assert bucket.lifecycle([{**abort, "Expiration": {"ExpiredObjectDeleteMarker": True}}], "runs").verdict == "good"


@pytest.mark.parametrize(("second", "verdict", "words"), [(1, "good", "as the server's"), (31, "good", "30 s ahead"),
                                                          (200, "bad", "ahead")])  # fmt: skip
def test_a_clock_is_compared_with_the_server(second: int, verdict: str, words: str) -> None:
    answer = {"ResponseMetadata": {"HTTPHeaders": {"date": "Mon, 30 Nov 2026 12:00:01 GMT"}}}
    now = datetime.fromtimestamp(datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp() + second, UTC)
    checked = bucket.clock(answer, now)
    assert (checked.verdict, words in checked.what) == (verdict, True)


def test_the_formula_counts_parts() -> None:
    part = requests.PART_BYTES
    cost = requests.of_save(2, [100, part, part + 1, 4 * part, 50, 50])
    assert cost.writes == 1 + 1 + (2 + 2) + (2 + 4) + 1 + 1 + requests.RECORDS
    from ckpt.store import objects

    assert part == objects._PART_BYTES
