"""Drills of the book on a plain script that only uses ``ckpt.open``: a sample; ``make soak`` holds them all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from drills.toml import EXAMPLE
from tests.s3server import S3

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
TARGET = str(ROOT / "tests/targets/plain_ckpt_target.py")
ALONE = (TARGET, "{url}", "--verify-snapshot", "--log-file", "{log}")


@pytest.fixture(scope="module")
def controls() -> Iterator[Path]:
    """Control runs that the drills of this file share."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def words(name: str, folder: Path, controls: Path, *options: str, target: tuple[str, ...] = ALONE) -> list[str]:
    return [
        sys.executable, "-m", "drills", "run", name, "--seed", "3", "--resubmit", "3", "--budget", "4m",
        "--out", str(folder), "--controls", str(controls), *options, "--", *target,
    ]  # fmt: skip


def hold(name: str, folder: Path, controls: Path, *options: str) -> dict[str, Any]:
    done = subprocess.run(words(name, folder, controls, *options), capture_output=True, text=True, timeout=300,
                          cwd=ROOT, check=False)  # fmt: skip
    report = folder / "report.json"
    assert report.exists(), done.stdout + done.stderr
    doc: dict[str, Any] = json.loads(report.read_text())
    assert done.returncode == doc["exit_status"]
    doc["printed"] = done.stdout + done.stderr
    return doc


@pytest.mark.parametrize("name", ["kill-in-save", "kill-in-load", "crash-loop", "bit-rot-newest", "disk-full"])
def test_a_plain_script_passes(name: str, tmp_path: Path, controls: Path) -> None:
    doc = hold(name, tmp_path / "run", controls)
    if doc["verdict"] == "not verified" and "could not be filled" in doc["printed"]:
        pytest.skip(doc["ended_early"])
    assert doc["verdict"] == "pass", doc["printed"]
    if name.startswith("kill-in"):
        assert doc["held"][0]["phase"] == name.removeprefix("kill-in-")


def test_drills_of_one_command_share_its_control_run(tmp_path: Path, controls: Path) -> None:
    for seed in ("one", "two"):
        doc = hold("kill-any-rank", tmp_path / seed, controls)
        assert doc["verdict"] == "pass", doc["printed"]
    assert doc["cached_control"]
    assert len(list(controls.iterdir())) == 1


def test_a_drill_from_a_file(tmp_path: Path, controls: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(EXAMPLE)
    doc = hold(str(mine), tmp_path / "run", controls)
    assert doc["verdict"] == "pass", doc["printed"]
    assert (doc["drill"], list(doc["evidence"])) == ("kill-in-commit-twice", ["kill", "kill#2"])
    again = subprocess.run([sys.executable, "-m", "drills", "report", str(tmp_path / "run"), "--json", "-"],
                           capture_output=True, text=True, check=False, cwd=ROOT)  # fmt: skip
    assert json.loads(again.stdout)["checks"] == doc["checks"]


def test_what_cannot_be_done_here_is_not_verified_and_says_what_it_needs(tmp_path: Path, controls: Path) -> None:
    doc = hold("storage-503-storm", tmp_path / "run", controls)
    assert doc["verdict"] == "not verified"
    assert "no S3 endpoint" in doc["ended_early"]
    doc = hold("shrink-and-grow", tmp_path / "run", controls)
    assert "{nproc}" in doc["ended_early"]


@pytest.mark.s3
@pytest.mark.parametrize("name", ["kill-in-commit", "storage-truncates"])
def test_a_plain_script_passes_on_s3(name: str, tmp_path: Path, s3: S3) -> None:
    given = {"endpoint_url": s3.endpoint, "key": s3.server.key, "secret": s3.server.secret}
    options = [w for k, v in given.items() for w in ("--storage-option", f"{k}={v}")]
    doc = hold(name, tmp_path / "run", tmp_path / "controls", "--url-base", s3.url(s3.new_bucket(), "d"), *options)
    assert doc["verdict"] == "pass", doc["printed"]
    assert s3.server.secret not in (tmp_path / "run/history.jsonl").read_text()
    assert s3.server.secret not in (tmp_path / "run/report.html").read_text()


def test_what_a_drill_left_that_was_killed_is_healed_by_the_next(
    tmp_path: Path, controls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    slow = (*ALONE, "--pause", "0.5")
    drill = subprocess.Popen(words("kill-any-rank", tmp_path / "run", controls, "--fresh-control", target=slow),
                             cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    log = tmp_path / "run/control/log.jsonl"
    end = time.monotonic() + 60
    while time.monotonic() < end and not (log.exists() and log.read_text().count("\n")):
        time.sleep(0.05)
    drill.send_signal(signal.SIGKILL)
    drill.wait()
    pid = json.loads(log.read_text().splitlines()[0])["pid"]
    os.kill(pid, 0)  # the target trains on, and nobody looks after it
    healed = subprocess.run([sys.executable, "-m", "drills", "heal"], capture_output=True, text=True, check=False,
                            cwd=ROOT)  # fmt: skip
    assert "1 processes ended" in healed.stdout
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # nobody may reap it
