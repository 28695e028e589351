"""Whole drills on a plain PyTorch job, sound and with planted mistakes: what is judged is the drill itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
TARGET = str(ROOT / "tests/targets/plain_dcp_target.py")
TWO_RANKS = ("torchrun", "--nproc-per-node", "2", "--max-restarts", "2", TARGET, "{url}", "--log-file", "{log}")
ALONE = (TARGET, "{url}", "--log-file", "{log}")  # nobody starts it again but the drill, with --resubmit


@dataclass
class Result:
    status: int
    doc: dict[str, Any]
    out: str
    err: str
    folder: Path

    def check(self, name: str) -> dict[str, str]:
        return next(c for c in self.doc["checks"] if c["name"] == name)

    def not_passed(self) -> set[str]:
        return {c["name"] for c in self.doc["checks"] if c["verdict"] != "pass"}


def command(folder: Path, target: tuple[str, ...], *options: str, drill: str = "kill-any-rank") -> list[str]:
    words = [sys.executable, "-m", "drills", "run", drill, "--seed", "8", "--out", str(folder), "--budget", "4m"]
    return [*words, *options, "--", *target]


def hold(
    folder: Path, target: tuple[str, ...], *options: str, defect: str = "", drill: str = "kill-any-rank"
) -> Result:
    done = subprocess.run(
        command(folder, target, *options, drill=drill), capture_output=True, text=True, timeout=300, cwd=ROOT,
        env={**os.environ, "DEFECT": defect}, check=False,
    )  # fmt: skip
    report = folder / "report.json"
    return Result(
        done.returncode, json.loads(report.read_text()) if report.exists() else {}, done.stdout, done.stderr, folder
    )


def running(folder: Path) -> list[str]:
    """Processes that have anything to do with the folder of a drill."""
    found = []
    for p in psutil.process_iter(["cmdline"]):
        words = " ".join(p.info["cmdline"] or ())
        if str(folder) in words and "pytest" not in words:
            found.append(words)
    return found


def test_a_sound_job_passes_and_its_folder_can_be_judged_again(tmp_path: Path) -> None:
    r = hold(tmp_path / "run", TWO_RANKS)
    assert r.status == 0, r.out + r.err
    assert r.not_passed() == set()
    assert r.doc["lost"]["steps"]
    assert r.doc["evidence"]["kill"]["pid"] in {p["pid"] for p in processes(r.folder)}
    assert r.doc["phases_s"]["noticed"] <= r.doc["phases_s"]["all_ranks"] <= r.doc["phases_s"]["first_step"]
    assert "FAULT: SIGKILL to rank" in r.err
    assert running(r.folder) == []
    assert {"history.jsonl", "report.html", "report.json", "control", "drilled"} <= {p.name for p in r.folder.iterdir()}
    assert (r.folder / "drilled/stderr.txt").read_text()

    shutil.rmtree(r.folder / "store")  # judging again needs no checkpoint, only the history
    again = subprocess.run(
        [sys.executable, "-m", "drills", "report", str(r.folder), "--json", "-"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert again.returncode == 0
    assert json.loads(again.stdout)["checks"] == r.doc["checks"]


def processes(folder: Path) -> list[dict[str, Any]]:
    events = [json.loads(n) for n in (folder / "history.jsonl").read_text().splitlines()]
    return [e for e in events if e["event"] == "process.seen"]


def test_a_planted_bit_is_found_named_and_said_to_be_meant(tmp_path: Path) -> None:
    r = hold(tmp_path / "run", TWO_RANKS, drill="flip-restored-byte")
    assert r.status == 1, r.out + r.err
    assert r.doc["as_meant"] is True
    assert "This drill is meant to fail, and did as it should: model.0.weight differs." in r.out
    assert r.check("state bitwise")["verdict"] == "fail"
    assert r.not_passed() == {"state bitwise", "losses"}


def test_a_rank_that_gets_the_random_state_of_another_is_found(tmp_path: Path) -> None:
    r = hold(tmp_path / "run", TWO_RANKS, defect="rng-of-rank-0")
    assert r.status == 1, r.out + r.err
    assert "rng.rank00001.torch_cpu" in r.check("rng")["detail"]
    assert "rank 1 (trained again)" in r.check("losses")["detail"]
    assert r.check("samples")["verdict"] == "pass"


@pytest.mark.parametrize(
    ("defect", "check", "said"),
    [
        ("optimizer", "state bitwise", "optim.state"),
        ("repeat-batch", "samples", "first at step 7, rank 0 (trained again)"),
        ("zero", "work lost", "it went on from step 0"),
    ],
)
def test_a_mistake_in_the_restore_fails_the_drill(tmp_path: Path, defect: str, check: str, said: str) -> None:
    r = hold(tmp_path / "run", ALONE, "--resubmit", "1", defect=defect)
    assert r.status == 1, r.out + r.err
    found = r.check(check)
    assert found["verdict"] == "fail"
    assert said in f"{found['detail']} {' '.join(keys(r.doc))}"


def keys(doc: dict[str, Any]) -> list[str]:
    return [k for p in doc["compared"]["control with drilled"]["pairs"] for k in p["different_keys"]]


def test_a_job_that_does_not_come_back_fails_within_its_limit_and_is_ended(tmp_path: Path) -> None:
    r = hold(tmp_path / "run", TWO_RANKS, "--recover-within", "4s", defect="hang")
    assert r.status == 1, r.out + r.err
    assert "no new step within 4 s" in r.check("run finished")["detail"]
    assert r.check("first new step")["value"] == "never"
    assert r.check("state bitwise")["verdict"] == "not verified"
    assert running(r.folder) == []


def test_what_it_leaves_running_is_found_and_ended_and_what_it_does_not_log_is_not_verified(tmp_path: Path) -> None:
    r = hold(tmp_path / "run", ALONE, "--resubmit", "1", defect="leave-behind,no-samples")
    assert r.status == 1, r.out + r.err
    assert r.not_passed() == {"nothing left running", "samples"}
    assert "sleep 600" in r.check("nothing left running")["detail"]
    assert r.check("samples")["verdict"] == "not verified"
    left = [int(n.split(": ")[1].split()[0]) for n in r.check("nothing left running")["detail"].split("; ")]
    assert left
    assert not any(psutil.pid_exists(pid) for pid in left)


def test_a_job_that_is_not_deterministic_is_told_so_and_not_failed(tmp_path: Path) -> None:
    r = hold(tmp_path / "run", ALONE, "--resubmit", "1", "--control-runs", "2", defect="noise")
    assert r.status == 3, r.out + r.err
    assert "step 1, rank 0: loss" in r.check("deterministic")["detail"]
    assert {c["verdict"] for c in r.doc["checks"]} == {"pass", "not verified"}


def test_a_job_that_dies_undisturbed_is_no_failure_of_the_drill_nor_of_the_restore(tmp_path: Path) -> None:
    r = hold(tmp_path / "run", ALONE, defect="crash")
    assert r.status == 3, r.out + r.err
    assert "RuntimeError: planted" in r.check("control run")["detail"]
    assert "next" in r.out
    assert "fail" not in {c["verdict"] for c in r.doc["checks"]}


def test_a_budget_is_a_budget_and_nothing_stays_behind(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    began = time.monotonic()
    done = subprocess.run(
        command(folder, TWO_RANKS, "--budget", "3s"),
        capture_output=True, text=True, timeout=120, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stdout
    assert "did not end within the budget" in done.stdout
    assert time.monotonic() - began < 40
    assert running(folder) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_drill_ends_what_it_started(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "run"
    drill = subprocess.Popen(command(folder, TWO_RANKS), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while time.monotonic() < end and not ((folder / "history.jsonl").exists() and processes(folder)):
        time.sleep(0.1)
    assert processes(folder)
    drill.send_signal(number)
    assert drill.wait(60) == 128 + number
    assert running(folder) == []
