"""The command ``ckpt``: what it prints, its exit statuses, its manners on terminals and in pipes."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt import cli
from ckpt.errors import Damaged, StorageError
from ckpt.format.manifest import Claim, dump, load_claim
from ckpt.store import open_store
from ckpt.store.local import LocalStore
from ckpt.tools import render, stream
from ckpt.tools.target import Address
from ckpt.tools.validate import validate
from tests.cli.ckpt_cases import CASES, GOLDEN, Case, transcript
from tests.corpus.golden import GOLDEN_V1
from tests.corpus.recipes import FOLDER, Step

CKPT = [sys.executable, "-m", "ckpt"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_golden_text(case: Case) -> None:
    assert transcript(case) == (GOLDEN / f"{case.name}.txt").read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {p.stem for p in GOLDEN.glob("*.txt")} >= {c.name for c in CASES}


def test_every_json_answer_is_one_document_with_a_schema() -> None:
    schemas = set()
    for case in CASES:
        for part in re.split(r"^\$ ckpt ", transcript(case), flags=re.MULTILINE):
            if "--json" in part.split("\n", 1)[0]:
                lines = part.split("\n")[1:]
                document = json.loads("\n".join(x for x in lines if not x.startswith("!")).rsplit("[", 1)[0])
                schemas.add(document["schema"])
    assert schemas >= {
        "ckpt.ls/1", "ckpt.inspect/1", "ckpt.validate/1", "ckpt.error/1", "ckpt.newest-valid/1", "ckpt.quarantine/1",
        "ckpt.prune/1", "ckpt.doctor/1",
    }  # fmt: skip


# --- torch stays out ------------------------------------------------------------------------------------------

LOOKING = [
    ["--help"],
    ["ls", "RUN"],
    ["ls", "RUN", "--all", "--json"],
    ["inspect", "RUN"],
    ["inspect", "RUN@1", "--tree"],
    ["inspect", "PLAIN", "--tensors"],
    ["validate", "RUN", "--level", "quick"],
    ["validate", "RUN", "--level", "full"],
    ["newest-valid", "RUN", "--level", "full"],
    ["prune", "RUN", "--keep", "latest:1"],
]


@pytest.mark.parametrize("args", LOOKING, ids=" ".join)
def test_looking_imports_no_torch(args: list[str], tmp_path: Path) -> None:
    plain = Path(shutil.copytree(GOLDEN_V1 / FOLDER, tmp_path / "plain"))
    (plain / "manifest.json").unlink()
    words = [a.replace("RUN", str(GOLDEN_V1)).replace("PLAIN", str(plain)) for a in args]
    code = (
        f"import sys, ckpt.cli\nstatus = ckpt.cli.run({words!r})\n"
        "heavy = {'torch', 'numpy', 'fsspec', 's3fs', 'obstore'} & sys.modules.keys()\n"
        "sys.exit(f'{status} {heavy}' if status or heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# --- addresses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "url", "step"),
    [
        ("s3://bucket/run42", "s3://bucket/run42", None),
        ("s3://bucket/run42@42000", "s3://bucket/run42", 42000),
        ("s3://bucket@7", "s3://bucket", 7),
        ("/data/a@b/run", "/data/a@b/run", None),
        ("/data/run@1/", "/data/run@1/", None),
        ("/data/run@1@2", "/data/run@1", 2),
        ("/data/run@x1", "/data/run@x1", None),
        ("/data/run@", "/data/run@", None),
        ("run@000042", "run", 42),
        ("sftp://user:pass@10/run", "sftp://user:pass@10/run", None),
        ("sftp://user:pass@10", "sftp://user:pass@10", None),
        ("sftp://user:pass@host/run@3", "sftp://user:pass@host/run", 3),
        ("abfs://c@account.dfs.core.windows.net/run", "abfs://c@account.dfs.core.windows.net/run", None),
        ("run@1234567890123", "run@1234567890123", None),
        ("run@-1", "run@-1", None),
        ("@7", "@7", None),
    ],
)
def test_only_digits_after_the_last_at_are_a_step(text: str, url: str, step: int | None) -> None:
    address = Address.parse(text)
    assert (address.url, address.step) == (url, step)


def test_lines_to_paste_are_quoted_and_keep_no_secrets() -> None:
    address = Address.parse(
        "/my runs/a@3", client="fsspec", options={"endpoint_url": "http://h", "secret": "S", "key": "K"}
    )
    line = address.paste("validate", 3, "--level full")
    assert line == "ckpt validate '/my runs/a@3' --level full --client fsspec -o endpoint_url=http://h"


# --- statuses -------------------------------------------------------------------------------------------------


def test_storage_options_reach_the_store(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = {}

    def spy(url: str, **options: object) -> object:
        seen.update(options, url=url)
        raise StorageError("seen", hint="nothing")

    monkeypatch.setattr("ckpt.tools.target.open_store", spy)
    args = ["ls", "s3://b/r", "--client", "fsspec", "-o", "anon=true", "-o", "endpoint_url=http://h?a=b",
            "-o", 'client_kwargs={"region_name": "x"}', "-o", "retry_budget_s=2", "-o", "key=123"]  # fmt: skip
    assert cli.run(args) == 5
    assert seen == {"url": "s3://b/r", "client": "fsspec", "anon": True, "endpoint_url": "http://h?a=b",
                    "client_kwargs": {"region_name": "x"}, "retry_budget_s": 2.0, "key": "123"}  # fmt: skip
    assert capsys.readouterr().err == "[C-E] seen\n  next  nothing\n"


def test_a_bug_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("ckpt.tools.commands.show.locate", lambda address: 1 / 0)
    assert cli.run(["ls", str(GOLDEN_V1)]) == 70
    said = capsys.readouterr()
    assert "ZeroDivisionError" in said.err
    assert "Traceback" not in said.err
    assert cli.run(["ls", str(GOLDEN_V1), "--debug", "--json"]) == 70
    said = capsys.readouterr()
    assert "Traceback" in said.err
    assert json.loads(said.out)["exit_status"] == 70


def test_a_store_that_fails_is_no_damage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*args: object) -> object:
        raise StorageError("the disk is on fire")

    monkeypatch.setattr("ckpt.store.local.LocalStore.get_ranges", fail)
    monkeypatch.setattr("ckpt.store.local.LocalStore.stream", fail)
    assert cli.run(["validate", str(GOLDEN_V1), "--level", "full"]) == 5
    said = capsys.readouterr()
    assert "the disk is on fire" in said.err
    assert "bad" not in said.out


@pytest.mark.parametrize("fails", [1, 30])
def test_the_first_failure_of_many_reads_ends_all(
    fails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(GOLDEN_V1, tmp_path / "run"))
    step = Step(run)
    names = [f"more/{n:03d}" for n in range(60)]
    (step.folder / "more").mkdir()
    for name in names:
        (step.folder / name).write_bytes(b"x")
    step.edit(
        "manifest.json",
        lambda m: m["objects"].extend({"name": n, "bytes": 1, "digest": "0" * 32, "rank": 0} for n in names),
    )
    step.reseal(*names)
    assert cli.run(["validate", f"{run}@2", "--level", "full"]) == 0
    real, calls = LocalStore.stream, []

    def failing(self: LocalStore, key: str, start: int, end: int) -> Iterator[memoryview]:
        calls.append(key)
        if len(calls) >= fails:
            raise StorageError("the disk is on fire")
        return real(self, key, start, end)

    monkeypatch.setattr(LocalStore, "stream", failing)
    assert cli.run(["validate", f"{run}@2", "--level", "full"]) == 5
    assert "the disk is on fire" in capsys.readouterr().err
    assert len(calls) < fails + 20


# --- memory and transit faults --------------------------------------------------------------------------------


def test_a_fault_on_the_way_is_a_hint_not_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(GOLDEN_V1))
    real, calls = LocalStore.stream, []

    def flaky(self: LocalStore, key: str, start: int, end: int) -> Iterator[memoryview]:
        first = key.endswith("__0_0.distcp") and not calls  # several objects are read side by side: one is struck
        calls.extend([key] * first)
        for n, piece in enumerate(real(self, key, start, end)):
            if n == 0 and first:
                piece[700] ^= 1
            yield piece

    monkeypatch.setattr(LocalStore, "stream", flaky)
    report = validate(store, FOLDER + "/", level="full")
    assert (report.verdict, report.findings) == ("good", ())
    assert "wrong once and right when read again" in report.hints[0]


def test_windows_cut_blocks_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are hashed in windows: their sizes have nothing to do with each other."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    for path in (GOLDEN_V1 / FOLDER).rglob("*"):
        if path.is_file():
            store.put(path.relative_to(GOLDEN_V1 / FOLDER).as_posix(), [path.read_bytes()])
    longest = 0

    def watched(key: str, ranges: list[tuple[int, int]]) -> list[bytes]:
        nonlocal longest
        longest = max(longest, sum(hi - lo for lo, hi in ranges))
        return type(store).get_ranges(store, key, ranges)

    monkeypatch.setattr(store, "get_ranges", watched)
    for window, piece in ((100, 7), (1577, 1577), (4096, 1000), (1 << 20, 1 << 20)):
        monkeypatch.setattr(stream, "WINDOW_BYTES", window)
        monkeypatch.setattr(stream, "PIECE_BYTES", piece)
        longest = 0
        report = validate(store, "", level="full")
        assert (report.verdict, report.blocks_hashed) == ("good", 11)
        assert longest <= window


@pytest.mark.parametrize("command", ["ls", "inspect", "validate"])
def test_a_step_that_is_retired_meanwhile_is_not_damaged(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(GOLDEN_V1, tmp_path / "run"))
    real = LocalStore.get

    def late(self: LocalStore, key: str, **options: int) -> bytes:
        if key == f"{FOLDER}/manifest.json":  # retention deletes the commit record, then the data
            Step(run).commit.unlink(missing_ok=True)
            shutil.rmtree(run / FOLDER, ignore_errors=True)
        return real(self, key, **options)

    monkeypatch.setattr(LocalStore, "get", late)
    status = cli.run([command, str(run)])
    said = capsys.readouterr()
    assert status == {"ls": 0, "inspect": 4, "validate": 3}[command]
    assert "damaged" not in said.out
    assert "bad" not in said.out
    if command == "ls":
        assert "newest valid 1" in said.out


# --- terminals and pipes --------------------------------------------------------------------------------------


def _on_a_terminal(args: list[str], **environment: str) -> str:
    ours, theirs = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [*CKPT, *args], stdout=theirs, stderr=subprocess.DEVNULL, env={**env, "TERM": "xterm", **environment}
    )
    os.close(theirs)
    out = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:
            break
        if not piece:
            break
        out += piece
    assert process.wait(30) == 0
    os.close(ours)
    return out.decode()


def test_colour_on_a_terminal_only_and_never_with_no_color() -> None:
    assert "\x1b[32mcommitted" in _on_a_terminal(["ls", str(GOLDEN_V1)])
    assert "\x1b[32m" not in _on_a_terminal(["ls", str(GOLDEN_V1)], NO_COLOR="1")
    done = subprocess.run([*CKPT, "ls", str(GOLDEN_V1)], check=True, capture_output=True, text=True, timeout=30)
    assert "\x1b" not in done.stdout


def test_columns_bound_the_table(tmp_path: Path) -> None:
    run = Path(shutil.copytree(GOLDEN_V1, tmp_path / "run"))
    (run / FOLDER / "__0_0.distcp").unlink()
    tables = {}
    for columns in (90, 120):
        env = {**os.environ, "COLUMNS": str(columns)}
        done = subprocess.run([*CKPT, "ls", str(run)], check=True, capture_output=True, text=True, timeout=30, env=env)
        tables[columns] = done.stdout.split("\n\n")[1].splitlines()
        assert max(map(len, tables[columns])) <= columns
        assert len(tables[columns]) > 3  # the note is folded
        assert "1 of 5" in " ".join(tables[columns])
    assert "saved" not in tables[90][0]
    assert "saved" in tables[120][0]


def test_a_closed_pipe_is_no_error() -> None:
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait(30)
    done = subprocess.run([*CKPT, "inspect", str(GOLDEN_V1), "--tensors"], check=False, stdout=reader.stdin,
                          stderr=subprocess.PIPE, text=True, timeout=30)  # fmt: skip
    reader.stdin.close()
    assert "Traceback" not in done.stderr
    assert "fault of its own" not in done.stderr


def test_progress_goes_to_stderr_a_line_at_a_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(render, "LINE_EVERY_S", 0.0)
    assert cli.run(["validate", str(GOLDEN_V1), "--level", "full", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["verdict"] == "good"
    assert said.err.splitlines()[-1] == "validate full: 47.76 KiB of 47.76 KiB"


def test_names_that_the_terminal_cannot_show_are_no_reason_to_fail(tmp_path: Path) -> None:
    run = Path(shutil.copytree(GOLDEN_V1, tmp_path / "run"))
    Step(run).edit("manifest.json", lambda m: m["tensors"].update({"gewicht.µ": m["tensors"]["model.fine"]}))
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    for args in (["inspect", str(run), "--tree"], ["inspect", str(run), "--tensors"]):
        done = subprocess.run([*CKPT, *args], check=True, capture_output=True, text=True, timeout=30, env=env)
        assert "gewicht" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("ls {run} > /dev/full", "No space left on device"),
        ("ls {run} --json > /dev/full", "No space left on device"),
        ("inspect {run}", None),
        ("ls {run} >&-", None),
        ("inspect {run} >&-", None),
        ("inspect {run}@{long}", "[C-"),
        ("ls /tmp/{long}", "File name too long"),
        ("export {run} /proc/nothing.pt --to torch", "cannot be written"),
    ],
)
def test_an_output_or_a_path_that_cannot_be_is_no_fault_of_the_tool(words: str, says: str | None) -> None:
    line = words.format(run=GOLDEN_V1, long="9" * 300)
    done = subprocess.run(["sh", "-c", f"{sys.executable} -m ckpt {line}"], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "fault of its own" not in done.stderr
    if says is None:
        assert done.returncode == 0, done.stderr
    else:
        assert says in done.stderr
        assert done.returncode in (2, 4, 5), done.stderr


def test_a_time_that_no_calendar_can_shift_is_damage() -> None:
    with pytest.raises(Damaged, match="created"):
        load_claim(dump("claim", Claim(epoch="e00000001", writer="w", host="h", pid=1, world_size=1,
                                       created="9999-12-31T23:59:59-23:59")), "x")  # fmt: skip
