"""``elastic goodput``, ``failures``, ``status`` and ``compare`` as typed: golden texts, JSON, files, statuses.

Golden files hold what is printed; rewrite them with ``GOLDEN=write pytest tests/cli`` and read the difference.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner, Result

from elastic.cli import cli
from elastic.ledger.events import Error, encode, utc
from tests.bench.ledger_report import write
from tests.unit.elastic.ledgers import T0, Job, Written
from tests.unit.elastic.test_compare import decay, told

GOLDEN = Path(__file__).parent / "golden"
KILLED = Job(world=2, cpu=(0.3, 0.42), kills=((33, 1), (61, 0), (77, 1)), jitter=0.1)
COST = "--price 2.5 --flops-per-token 6e9 --peak-flops 989T"
CASES = {
    "goodput_help": "goodput --help",
    "goodput_killed": f"goodput run {COST}",
    "failures_help": "failures --help",
    "failures_killed": "failures run --budget detect=300ms --last 2",
    "status_help": "status --help",
    "compare_help": "compare --help",
    "compare_sizes": "compare one two four --to 1.2",
    "compare_down": "compare calm=one killed=run",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write(folder / "run", Written(KILLED).events)
    for name, world, body, steps in (("one", 1, 1.0, 50), ("two", 2, 1.1, 28), ("four", 4, 1.2, 60)):
        job = Job(world=world, steps=200, body=body)
        write(folder / name, told(Written(job).events, "val_loss", decay(steps)))
    return folder


@pytest.fixture
def inside(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(home)
    before = {p: p.stat().st_mtime_ns for p in home.glob("*/**/*")}
    yield home
    assert {p: p.stat().st_mtime_ns for p in home.glob("*/**/*")} == before  # readers never write there


def run(line: str) -> Result:
    return CliRunner().invoke(cli, line.split(), prog_name="elastic", terminal_width=80)


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, inside: Path) -> None:
    result = run(CASES[name])
    assert result.exit_code == 0, result.output
    text = f"$ elastic {CASES[name]}\n{result.stdout}"
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")
    assert max(map(len, result.stdout.splitlines())) <= 100


@pytest.mark.parametrize(
    ("line", "status", "sentence"),
    [
        ("goodput", 2, "Missing argument 'URL'"),
        ("goodput none", 4, "does not exist: nothing there was written by elastic.Run"),
        ("failures none", 4, "ckpt ls none"),
        ("status none", 4, "does not exist"),
        ("compare run none", 4, "does not exist"),
        ("goodput run --peak-flops 1T", 2, "MFU needs both"),
        ("goodput run --flops-per-step 1e12", 2, "MFU needs both"),
        ("goodput run --flops-per-step 1e12 --flops-per-token 1e9 --peak-flops 1T", 2, "give one"),
        ("goodput run --html /nonexistent/x.html", 2, "cannot be written: No such file"),
        ("goodput run --prom /nonexistent/x.prom", 2, "cannot be written: No such file"),
        ("goodput run -o endpoint", 2, "a storage option is NAME=VALUE"),
        ("failures run --budget detect", 2, "write PHASE=TIME with one of detect, stop, respawn"),
        ("failures run --budget lunch=1h", 2, "write PHASE=TIME"),
        ("failures run --budget load=5", 2, "--budget load: '5' is not a duration"),
        ("failures run --last 0", 2, "0 is not in the range"),
        ("status run --every 5", 2, "is not a duration"),
        ("compare", 2, "Missing argument 'RUN...'"),
        ("compare one two --metric bleu", 2, "no run has a metric 'bleu'; there are: val_loss"),
        ("compare run --svg x.svg", 2, "nothing to draw"),
    ],
)
def test_what_cannot_be_is_answered_by_a_sentence(line: str, status: int, sentence: str, inside: Path) -> None:
    result = run(line)
    assert result.exit_code == status, result.output
    assert sentence in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert result.stdout == ""


def parsed(line: str) -> dict[str, Any]:
    result = run(line)
    answer: dict[str, Any] = json.loads(result.stdout, parse_constant=pytest.fail)
    return answer


def test_goodput_json_adds_up_in_all_and_by_start(inside: Path) -> None:
    answer = parsed(f"goodput run {COST} --json")
    assert answer["schema"] == "elastic.goodput/1"
    assert sum(answer["seconds"].values()) == pytest.approx(answer["wall_s"], rel=1e-9)
    assert sum(s["lasted_s"] for s in answer["starts"]) == pytest.approx(answer["wall_s"], rel=1e-9)
    assert {s: sum(x["seconds"][s] for x in answer["starts"]) for s in answer["seconds"]} == pytest.approx(
        answer["seconds"]
    )
    assert answer["counted"]["tokens"]["useful"] == 200_000
    assert answer["slowest"]["rank"] == 1
    assert [r["rank"] for r in answer["ranks"]] == [0, 1]
    for r in answer["ranks"]:
        parts = r["per_step_s"]
        assert parts["compute"] + parts["off_cpu"] + parts["data"] + parts["between"] == pytest.approx(
            r["step_s"]["mean"]
        )
    assert answer["energy_j"] is None
    assert any(w.startswith("energy: ") for w in answer["not_verified"])
    assert answer["mfu"]["training"] == pytest.approx(6e9 * answer["counted"]["tokens"]["speed_per_s"] / 2 / 989e12)


def test_failures_json(inside: Path) -> None:
    answer = parsed("failures run --json --budget total=1s")
    assert answer["schema"] == "elastic.failures/1"
    told = [(r["rank"], r["steps_lost"], r["went_on_from"]) for r in answer["recoveries"]]
    assert told == [(1, 13, 20), (0, 21, 40), (1, 17, 60)]
    assert [r["over_budget"][0]["phase"] for r in answer["recoveries"]] == ["total"] * 3
    assert answer["recoveries"][0]["phases_s"]["import"] is None
    assert answer["last"]["how"] == "finished"


def test_status_once_and_watched(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = parsed("status run --json")
    assert (answer["schema"], answer["state"], answer["step"], answer["durable_step"]) == (
        *("elastic.status/1", "finished", 100, 100),
    )
    assert run("status run").exit_code == 0
    lines = run("status run --watch").stdout.splitlines()
    assert len(lines) == 1
    assert "finished  step 100" in lines[0]


def test_status_follows_a_ledger_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that are there already are not read again; the end of the run ends the watch."""
    import elastic.commands.ledger.status as home
    from ckpt.store import open_store

    events = Written(KILLED).events
    cuts = [T0 + 12, T0 + 27, events[-1].unix_s]
    now = [T0 + 13]

    def more(_: float) -> None:
        n = len(list((tmp_path / "run" / "ledger").iterdir()))
        since = cuts[n - 1]
        lines = [encode(e) + "\n" for e in events if since < e.unix_s <= cuts[n]]
        (tmp_path / "run" / "ledger" / f"e00000001-r00000-{n:06d}.jsonl").write_text("".join(lines))
        now[0] = cuts[n] + 1

    (tmp_path / "run" / "ledger").mkdir(parents=True)
    lines = [encode(e) + "\n" for e in events if e.unix_s <= cuts[0]]
    (tmp_path / "run" / "ledger" / "e00000001-r00000-000000.jsonl").write_text("".join(lines))
    monkeypatch.setattr(home.time, "sleep", more)
    monkeypatch.setattr(home.time, "time", lambda: now[0])
    fetched: list[str] = []
    store = type(open_store(str(tmp_path / "run")))
    get = store.get
    monkeypatch.setattr(store, "get", lambda self, key, **more: fetched.append(key) or get(self, key, **more))
    result = run(f"status {tmp_path / 'run'} --watch --json")
    states = [json.loads(x)["state"] for x in result.stdout.splitlines()]
    assert states == ["running", "restarting", "finished"]
    assert len(fetched) == 3


def test_a_terminal_is_redrawn_until_the_run_ends(tmp_path: Path) -> None:
    """On a real (pseudo) terminal, a run that is still going at first; its ledger grows meanwhile."""
    events = Written(KILLED).events
    home = tmp_path / "run" / "ledger"
    home.mkdir(parents=True)
    now = time.time()
    lines = [encode(replace(e, time=utc(e.unix_s - events[-1].unix_s + now))) + "\n" for e in events]
    some = len(lines) * 9 // 10
    (home / "e00000001-r00000-000000.jsonl").write_text("".join(lines[:some]))
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    command = [sys.executable, "-m", "elastic.cli", "status", str(tmp_path / "run"), "--watch", "--every", "200ms"]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}) as process:
        os.close(theirs)
        shown = b""
        while b"running" not in shown:
            shown += os.read(ours, 4096)
        (home / "e00000001-r00000-000001.jsonl").write_text("".join(lines[some:]))
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while part := os.read(ours, 4096):
                shown += part
        assert process.wait(60) == 0, shown
    os.close(ours)
    text = shown.decode()
    assert "\x1b[1A" in text or "\x1b[2K" in text  # drawn over
    assert "finished" in text.rpartition("running")[2]
    assert "step 100" in text or "100 on 2 ranks" in text


def test_a_run_that_failed_or_fell_silent_is_told_by_the_status(tmp_path: Path) -> None:
    first = [e for e in Written(KILLED).events if e.epoch == "e00000001"]
    write(tmp_path / "failed", first)
    write(tmp_path / "silent", [e for e in first if not isinstance(e.data, Error)])
    assert (run(f"status {tmp_path / 'failed'}").exit_code, run(f"status {tmp_path / 'silent'}").exit_code) == (1, 3)


def test_a_ledger_cut_in_mid_line_is_read_for_what_it_says(tmp_path: Path) -> None:
    write(tmp_path / "run", Written(KILLED).events)
    files = sorted((tmp_path / "run" / "ledger").iterdir())
    for file in files[::3]:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) * 2 // 3] + b"\xff\x00")
    for name in ("goodput", "failures", "status"):
        result = run(f"{name} {tmp_path / 'run'}")
        assert result.exit_code == 0, result.output
        assert "unreadable line" in result.stdout
    (tmp_path / "spoilt" / "ledger").mkdir(parents=True)
    (tmp_path / "spoilt" / "ledger" / files[0].name).write_text("{")
    result = run(f"goodput {tmp_path / 'spoilt'}")
    assert result.exit_code == 4
    assert "holds no event; 1 unreadable line left out" in result.stderr


def test_what_an_error_says_moves_no_cursor_and_is_no_markup(tmp_path: Path) -> None:
    events = Written(Job(kills=((33, 1),), world=3)).events
    bad = Error(error="ValueError", message="<script>alert(1)</script> \x1b[2J\x07 & more")
    write(tmp_path / "run", [replace(e, data=bad) if isinstance(e.data, Error) else e for e in events])
    for name in ("goodput", "failures"):
        assert not set(run(f"{name} {tmp_path / 'run'}").stdout) & {"\x1b", "\x07"}
    run(f"goodput {tmp_path / 'run'} --html {tmp_path / 'p.html'}")
    page = (tmp_path / "p.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_the_prometheus_file_is_one_that_it_reads(inside: Path, tmp_path: Path) -> None:
    assert run(f"goodput run --prom {tmp_path / 'x.prom'}").exit_code == 0
    values = {}
    named: set[str] = set()
    for text in (tmp_path / "x.prom").read_text().splitlines():
        if found := re.fullmatch(r"# TYPE (\w+) (gauge|counter)", text):
            assert found[1].endswith("_total") == (found[2] == "counter")
            named.add(found[1])
        elif not text.startswith("# HELP "):
            sample = re.fullmatch(r'(\w+)\{((?:\w+="(?:[^"\\\n]|\\.)*",?)+)\} (\S+)', text)
            assert sample is not None, text
            assert sample[1] in named
            values[sample[1], sample[2]] = float(sample[3])
    answer = parsed("goodput run --json")
    assert values["elastic_goodput_ratio", 'run="run"'] == pytest.approx(answer["goodput"])
    assert values["elastic_lost_seconds_total", 'run="run",cause="lost"'] == pytest.approx(answer["seconds"]["lost"])
    assert values["ckpt_last_durable_step", 'run="run"'] == 100
    assert values["elastic_restarts_total", 'run="run",reason="failure"'] == 3
    assert not [name for name, _ in values if "energy" in name]
    assert list(tmp_path.iterdir()) == [tmp_path / "x.prom"]


def test_a_label_of_the_prometheus_file_may_hold_anything(home: Path) -> None:
    from ckpt.store import open_store
    from elastic.commands.ledger.prom import exposition
    from elastic.commands.ledger.show_goodput import Told
    from elastic.ledger.goodput import account
    from elastic.ledger.rates import rates
    from elastic.ledger.reader import read

    whole = account(read(open_store(str(home / "run"))).events)
    text = exposition(Told(url='a"b\\c\nd', account=whole, rates=rates(whole)))
    assert 'elastic_steps_total{run="a\\"b\\\\c\\nd"} 100.0' in text.splitlines()


def test_pictures_stand_by_themselves(inside: Path, tmp_path: Path) -> None:
    result = run(f"compare one two four --to 1.2 --svg {tmp_path / 'c.svg'} --html {tmp_path / 'c.html'}")
    assert result.exit_code == 0, result.output
    for name in ("c.svg", "c-quality.svg"):
        root = ET.fromstring((tmp_path / name).read_text())
        texts = ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("}text")]
        assert texts
    assert any(t.startswith("four: ") for t in texts) or "val_loss over time, down time included" in texts
    page = (tmp_path / "c.html").read_text()
    run(f"goodput run --html {tmp_path / 'g.html'}")
    for text in (page, (tmp_path / "g.html").read_text()):
        assert not re.search(r"https?:|src=|<script|<link|@import|url\(", text)
        assert "prefers-color-scheme: dark" in text


def test_compare_json_says_which_is_faster(inside: Path) -> None:
    answer = parsed("compare one two four --to 1.2 --json")
    assert answer["schema"] == "elastic.compare/1"
    assert answer["fastest_to_quality"] == "two"
    assert (answer["order_by_speed"], answer["order_by_quality"]) == (["four", "two", "one"], ["two", "one", "four"])


def test_commands_import_no_torch_and_rich_only_to_watch(inside: Path) -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom elastic.cli import cli\n"
        "for line in ('goodput run', 'failures run', 'status run', 'compare one two'):\n"
        "    assert CliRunner().invoke(cli, line.split()).exit_code == 0\n"
        "bad = {'torch', 'numpy', 'rich', 'jinja2', 'matplotlib'} & set(sys.modules)\nassert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
