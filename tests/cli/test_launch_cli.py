"""``elastic launch``, ``elastic doctor`` and ``elastic store`` as typed: golden texts, refusals, lazy imports.

Rewrite the golden files with ``GOLDEN=write pytest tests/cli/test_launch_cli.py`` and read the difference.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from elastic.cli import cli
from elastic.commands import launch
from elastic.launch import options
from elastic.launch.task import MODULE, PROGRAM, SCRIPT

GOLDEN = Path(__file__).parent / "golden"
CASES = {
    "launch_help": ("launch --help", 0),
    "store_help": ("store --help", 0),
    "doctor_timeouts_help": ("doctor --help", 0),
    "doctor_timeouts_wrong": (
        "doctor --nodes 4 --step 4s --save 40s --load 2min --scheduler-grace 30s --attempts 2",
        1,
    ),
    "doctor_timeouts_good": ("doctor --step 2s --save 8s --load 30s --collective 60s --scheduler-grace 60s", 0),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    line, status = CASES[name]
    result = CliRunner().invoke(cli, line.split(), prog_name="elastic", terminal_width=80)
    assert result.exit_code == status, result.output
    file, text = GOLDEN / f"{name}.txt", f"$ elastic {line}\n{result.stdout}"
    if os.environ.get("GOLDEN") == "write":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("launch --nnodes 2 x.py", "several hosts need --rdzv-endpoint HOST:PORT"),
        ("launch --nnodes 3:1 --rdzv-endpoint h:1 x.py", "at least one host"),
        ("launch --nnodes two --rdzv-endpoint h:1 x.py", "neither a number nor MIN:MAX"),
        ("launch --tee 3 x.py", "--redirects and --tee need --log-dir"),
        ("launch -m --no-python x", "exclude each other"),
        ("launch --hang-timeout soon x.py", "is not a duration"),
        ("launch --nproc-per-node many x.py", "many"),
        ("launch --start-method fork x.py", "forkserver"),
        ("launch", "Missing argument 'SCRIPT'"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(line: str, words: str) -> None:
    result = CliRunner().invoke(cli, line.split(), prog_name="elastic")
    assert result.exit_code == 2
    assert words in result.stderr


def parsed(line: str, monkeypatch: pytest.MonkeyPatch) -> options.Options:
    seen: list[options.Options] = []
    monkeypatch.setattr(launch, "_launch", lambda o: seen.append(launch._options(o)) or 0)
    result = CliRunner().invoke(cli, ["launch", *line.split()])
    assert result.exit_code == 0, result.output
    return seen[0]


def test_torchruns_own_words_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "--nproc_per_node=4 --nnodes=2:3 --rdzv_backend=c10d --rdzv_endpoint=h:1 --rdzv_id=j --rdzv_conf "
    o = parsed(line + "last_call_timeout=9,read_timeout=5 --max_restarts=7 -m pkg.train --lr 1 --nproc-per-node 9",
               monkeypatch)  # fmt: skip
    assert (o.nproc, o.nodes, o.endpoint, o.run_id, o.max_restarts, o.kind) == (4, (2, 3), "h:1", "j", 7, MODULE)
    assert o.argv == ("pkg.train", "--lr", "1", "--nproc-per-node", "9")  # what follows the script is the script's
    assert o.conf == {"keep_alive_interval": "1", "keep_alive_max_attempt": "5", "last_call_timeout": "9",
                      "read_timeout": "5"}  # fmt: skip


def test_one_host_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    o = parsed("train.py", monkeypatch)
    assert (o.nproc, o.nodes, o.endpoint, o.kind, o.local_addr) == (1, (1, 1), "localhost:0", SCRIPT, "127.0.0.1")
    assert o.hang_s is None
    assert parsed("--hang-timeout off x.py", monkeypatch).hang_s == float("inf")
    assert parsed("--hang-timeout 30 x.py", monkeypatch).hang_s == 30.0
    assert parsed("--shutdown-timeout 2min x.py", monkeypatch).shutdown_s == 120.0
    assert parsed("--no-python ls -l", monkeypatch).kind == PROGRAM
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    assert parsed("x.py", monkeypatch).nproc == 3


def test_help_and_doctor_import_no_torch() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from elastic.cli import cli\n"
        "for line in ('launch --help', 'doctor', 'store --help'): CliRunner().invoke(cli, line.split())\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
