"""What a run has learned survives its death, and is read off its ledger: real torchrun jobs, really killed."""

from __future__ import annotations

import json
import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

import ckpt
from ckpt.store import open_store
from elastic.cli import cli
from elastic.ledger.events import Error, IntervalChanged, Resumed, Steps
from elastic.ledger.history import lives
from elastic.ledger.reader import read
from tests.dist.launch import Job, torchrun
from tests.s3server import S3

pytestmark = pytest.mark.dist
STEPS, SAVE_AT, RANKS = 90, 20, 2


def killed_at(job: Job, step: int) -> set[int]:
    """Wait until rank 1 is in ``step``, kill it; the process ids there were."""
    before = {x["pid"] for x in job.lines()}
    lines = job.until(lambda ls: any(x["step"] == step and x["rank"] == 1 and x["pid"] not in before for x in ls))
    time.sleep(0.05)
    os.kill(next(x["pid"] for x in reversed(lines) if x["rank"] == 1), signal.SIGKILL)
    return {x["pid"] for x in lines}


@pytest.fixture(scope="module")
def killed_twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learning")
    log = folder / "log"
    script = Path(__file__).with_name("auto.py")
    args = (str(folder / "run"), str(STEPS), str(SAVE_AT), str(log))
    with torchrun(script, *args, nproc=RANKS, log=log, max_restarts=3) as job:
        killed_at(job, 33)
        killed_at(job, 52)
        assert job.wait() == 0, job.tail("the job failed")
    return folder


def pacers(folder: Path) -> list[list[dict[str, float]]]:
    """Rank 0's pacer after each step, a list a life."""
    out: dict[int, list[dict[str, float]]] = {}
    for line in Job.read(folder / "log"):
        if line["rank"] == 0:
            out.setdefault(line["pid"], []).append(line["pacer"])
    return list(out.values())


def test_a_restart_goes_on_from_what_was_learned(killed_twice: Path) -> None:
    first, second, third = pacers(killed_twice)
    assert [life[0]["failures"] for life in (first, second, third)] == [0, 1, 2]
    saved = first[SAVE_AT - 1]  # before the save of step 20, which is the one that was restored
    assert (saved["saves"], second[0]["saves"], third[0]["saves"]) == (0, 1, 2)
    assert second[0]["stall_s"] < 1.0 < first[0]["stall_s"]  # what that save took is in the ledger alone
    lived = saved["exposure_s"]
    assert second[0]["exposure_s"] > lived + 0.3  # what was lost between save and death was up-time, too
    assert second[0]["exposure_s"] < first[-1]["exposure_s"] + 2.0
    assert first[0]["interval_s"] == 120.0
    assert third[0]["interval_s"] < second[0]["interval_s"] != 120.0


def test_each_change_of_the_interval_is_told_with_its_inputs(killed_twice: Path) -> None:
    events = read(open_store(str(killed_twice / "run"))).events
    epochs = sorted({e.epoch for e in events})
    assert len(epochs) == 3
    changes = [[e.data for e in events if e.epoch == x and isinstance(e.data, IntervalChanged)] for x in epochs]
    restarted = [next(c for c in change if c.inputs["failures"] == n) for n, change in enumerate(changes)]
    assert [c.was_s is None for c in restarted] == [True, False, False]
    for change in changes:
        for earlier, later in pairwise(change):
            assert later.was_s == earlier.interval_s
        for c in change:
            assert {"mtbf_s", "failures", "exposure_s", "stall_s", "persist_s", "slowdown_s"} <= c.inputs.keys()
    assert changes[1][0].was_s in {c.interval_s for c in changes[0]}
    assert restarted[2].interval_s < restarted[1].interval_s
    assert {e.rank for e in events if isinstance(e.data, IntervalChanged)} == {0}


def test_the_step_fits_a_state_that_keeps_nothing_beside(killed_twice: Path) -> None:
    import torch
    from torch import nn

    model = nn.Linear(256, 256)
    optim = torch.optim.AdamW(model.parameters())
    resumed = ckpt.open(killed_twice / "run").load(ckpt.State(model=model, optim=optim))
    assert resumed.step == STEPS


def test_the_ledger_knows_the_lives(killed_twice: Path) -> None:
    story = lives(read(open_store(str(killed_twice / "run")), rank=0).events)
    assert [life.how for life in story] == ["failure", "failure", "planned"]
    assert [life.attempt is not None for life in story] == [False, True, True]
    assert all(life.steps > 0 and life.uptime_s > 0.5 for life in story)
    assert story[1].born >= story[0].ended


def asked(*line: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, [*line], prog_name="elastic", terminal_width=80)
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def test_interval_from_the_ledger(killed_twice: Path) -> None:
    url = str(killed_twice / "run")
    status, out, _ = asked("interval", "--from", url, "--json")
    assert status == 0
    answer = json.loads(out)
    told = read(open_store(url), rank=0).events
    errors = sum(isinstance(e.data, Error) for e in told)
    rates, costs = answer["inputs"]["rates"], answer["inputs"]["costs"]
    assert (rates["failures"], errors <= 2) == (2, True)
    seen = [e for e in told if isinstance(e.data, Resumed)]
    assert 2.0 < rates["exposure_s"] < told[-1].unix_s - seen[0].unix_s
    assert answer["provenance"]["failures"] == "measured (n=3)"
    assert answer["provenance"]["stall_s"].startswith("measured (n=")
    assert 0 < costs["stall_s"] < 1
    assert 0 < costs["persist_s"] < 5
    assert 0.5 < costs["load_s"] < 60
    assert costs.get("reschedule_s", 0.0) < 60  # torchrun may be faster than the end of a life is known
    assert answer["inputs"]["job"]["step_s"] == pytest.approx(0.025, abs=0.02)
    assert answer["inputs"]["job"]["devices_per_node"] == RANKS
    steps = sum(e.data.n for e in told if isinstance(e.data, Steps))
    assert STEPS <= steps < STEPS + 60
    assert answer["checkpoint_bytes"] > 3 * 256 * 256 * 4


def test_flags_go_before_the_ledger(killed_twice: Path) -> None:
    url = str(killed_twice / "run")
    status, out, _ = asked("interval", "--from", url, "--json", "--mtbf", "3h", "--stall", "5s", "--load", "10min")
    assert status == 0
    answer = json.loads(out)
    assert answer["mtbf_s"] == 3 * 3600
    assert (answer["inputs"]["costs"]["stall_s"], answer["inputs"]["costs"]["load_s"]) == (5.0, 600.0)
    assert answer["provenance"]["stall_s"] == answer["provenance"]["mtbf_s"] == "given"
    assert "failures" not in answer["inputs"]["rates"]
    status, text, _ = asked("interval", "--from", url)
    assert status == 0
    assert "measured (2 failures in" in " ".join(text.split())
    assert 'every="' in text.splitlines()[-1]


def test_plan_from_the_ledger(killed_twice: Path) -> None:
    status, out, err = asked("plan", "--from", str(killed_twice / "run"), "--sizes", "2:2048")
    assert (status, err) == (0, "")
    assert "Rests on: MTBF" in out
    assert "measured (2 failures in" in " ".join(out.split())


@pytest.mark.s3
def test_interval_from_a_ledger_on_s3(killed_twice: Path, s3: S3) -> None:
    url = f"{s3.url(s3.new_bucket())}/runs/learning"
    store = open_store(url, **s3.options)
    for file in (killed_twice / "run" / "ledger").iterdir():
        store.put(f"ledger/{file.name}", [file.read_bytes()])
    flags = []
    for name, value in s3.options.items():
        flags += ["-o", f"{name}={json.dumps(value) if isinstance(value, dict) else value}"]
    there = asked("interval", "--from", url, *flags, "--json")
    assert there[0] == 0, there[2]
    assert json.loads(there[1]) == json.loads(asked("interval", "--from", str(killed_twice / "run"), "--json")[1])


def test_a_torn_last_line_is_left_out_and_said(killed_twice: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(killed_twice / "run" / "ledger", tmp_path / "ledger")
    last = max((tmp_path / "ledger").glob("*-r00000-*.jsonl"))
    text = last.read_text()
    last.write_text(text[:-40])
    status, out, _ = asked("interval", "--from", str(tmp_path))
    assert status == 0
    assert "! 1 unreadable line of the ledger left out, the first: ledger/" in " ".join(out.split())
