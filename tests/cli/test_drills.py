"""The command line of drills: what it refuses, with which status, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drills import cli

GOOD = ("--", "python", "-c", "pass", "{url}", "{log}")


def drills(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run the command in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["drills", *words])
    try:
        cli.main()
    except SystemExit as left:
        return int(left.code or 0)
    return 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "kill-any-rank", "--", "torchrun", "train.py"), "{url} and {log}"),
        (("run", "kill-any-rank", "--", "python", "train.py", "{url}"), "placeholder {log}"),
        (("run", "kill-any-rank"), "placeholder"),
        (("run", "kill-no-rank", *GOOD), "kill-any-rank, kill-rank-0"),
        (("run", "kill-any-rank", "--skip", "sample", *GOOD), "samples"),
        (("run", "kill-any-rank", "--budget", "soon", *GOOD), "write 90s, 5m or 1h"),
        (("run", "kill-any-rank", "--storage-option", "key", *GOOD), "KEY=VALUE"),
        (("run", "kill-any-rank", "--nproc", "2", *GOOD), "{nproc}"),
        (("run", "kill-any-rank", "--", "no-such-program", "{url}", "{log}"), "no program 'no-such-program'"),
        (("run", "kill-any-rank", "--", "torchrun", "--nproc-per-node", "{nproc}", "{url}", "{log}"), "--nproc 2"),
        (("describe", "nothing"), "there is no drill"),
        (("report", "/no/such/folder"), "does not exist"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert drills(monkeypatch, *words) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_shows_an_example_to_paste(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drills(monkeypatch, "run", "kill-any-rank", "--", "torchrun", "train.py") == 2
    assert "drills run kill-any-rank -- torchrun" in capsys.readouterr().err


def test_a_folder_that_is_not_a_drills_is_never_emptied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert drills(monkeypatch, "run", "kill-any-rank", "--out", str(tmp_path), *GOOD) == 2
    assert (tmp_path / "thesis.txt").exists()
    assert drills(monkeypatch, "report", str(tmp_path)) == 2
    assert "not the folder of a drill" in capsys.readouterr().err


def test_a_program_that_cannot_run_is_the_harness_and_not_the_target(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "torn"
    script.write_bytes(b"\x7fELF")
    script.chmod(0o755)
    folder = tmp_path / "out"
    assert drills(monkeypatch, "run", "kill-any-rank", "--out", str(folder), "--", str(script), "{url}", "{log}") == 70
    assert "could not be started" in capsys.readouterr().out
    assert json.loads((folder / "report.json").read_text())["verdict"] == "harness broke"


def test_a_target_that_logs_nothing_is_not_verified(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    assert drills(monkeypatch, "run", "kill-any-rank", "--out", str(folder), "--json", "-", "--quiet", *GOOD) == 3
    out, err = capsys.readouterr()
    assert err == ""
    doc = json.loads(out)
    assert doc["verdict"] == "not verified"
    assert "wrote no step to its log" in doc["ended_early"]


def test_an_earlier_drills_folder_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for _ in range(2):
        assert drills(monkeypatch, "run", "kill-any-rank", "--out", str(folder), "--quiet", *GOOD) == 3
    assert len([n for n in (folder / "history.jsonl").read_text().splitlines() if '"event": "drill"' in n]) == 1


def test_many_seeds_are_held_once_each_and_the_worst_verdict_is_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    words = ("run", "kill-any-rank", "--seeds", "2", "--out", str(folder), "--quiet", "--json", "-", *GOOD)
    for _ in range(2):  # the second time there is nothing left to hold
        assert drills(monkeypatch, *words) == 3
        doc = json.loads(capsys.readouterr().out)
        assert doc["schema"] == "drills.book/1"
        assert [(r["drill"], r["seed"], r["verdict"]) for r in doc["results"]] == [
            ("kill-any-rank", 1, "not verified"), ("kill-any-rank", 2, "not verified"),
        ]  # fmt: skip
        assert "wrote no step" in doc["results"][0]["why"]
    assert len((folder / "results.jsonl").read_text().splitlines()) == 2
    assert drills(monkeypatch, *(w for w in words if w not in ("--json", "-"))) == 3
    assert "2 not verified" in capsys.readouterr().out


def test_a_drill_can_be_had_as_toml_and_run_from_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert drills(monkeypatch, "describe", "kill-in-commit", "--toml") == 0
    mine = tmp_path / "mine.toml"
    mine.write_text(capsys.readouterr().out)
    assert drills(monkeypatch, "run", str(mine), "--out", str(tmp_path / "out"), "--quiet", *GOOD) == 3
    assert drills(monkeypatch, "report", str(tmp_path / "out")) == 3
    mine.write_text(mine.read_text().replace('"kill"', '"kil"'))
    assert drills(monkeypatch, "run", str(mine), "--out", str(tmp_path / "two"), *GOOD) == 2
    assert "one of kill, kill-job" in capsys.readouterr().err
    assert not (tmp_path / "two").exists()


def test_a_bug_of_the_tool_is_not_reported_as_a_failed_drill(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("drills.book.find", lambda name: 1 / 0)
    assert drills(monkeypatch, "describe", "kill-any-rank") == 70
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_lists_are_for_people_and_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert drills(monkeypatch, "list") == 0
    assert "kill-any-rank  " in capsys.readouterr().out
    assert drills(monkeypatch, "list", "--json") == 0
    doc = json.loads(capsys.readouterr().out)
    assert doc["schema"] == "drills.list/1"
    assert {"name": "flip-restored-byte", "meant_to_fail": True}.items() <= doc["drills"][-1].items()
    assert {d["name"] for d in doc["drills"] if d["needs"] == "s3"} >= {"storage-503-storm", "storage-truncates"}


def test_describe_names_every_check_and_what_it_looks_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drills(monkeypatch, "describe", "flip-restored-byte") == 0
    out = capsys.readouterr().out
    assert "meant to fail" in out
    assert "  samples               Each step saw the samples" in out
    assert "oracle sees" in out


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["list"], ["describe", "kill-in-load"]])
def test_talking_about_drills_imports_no_torch(words: list[str]) -> None:
    code = f"""
import sys
sys.argv = {["drills", *words]!r}
from drills.cli import main
try:
    main()
except SystemExit as e:
    assert not e.code, e.code
assert not {{"torch", "fsspec", "jinja2", "rich"}} & sys.modules.keys(), sorted(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"]])
def test_help_has_an_example_and_the_exit_statuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert drills(monkeypatch, *words) == 0
    out = capsys.readouterr().out
    assert "Example:" in out
    for status in ("0 ", "1 ", "2 ", "3 ", "70", "130"):
        assert f"  {status}" in out
