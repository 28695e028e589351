"""What lives a ledger tells of: ends, notices, starts that came to nothing; and sentences where it tells too little.

Ledgers written by real jobs that were really killed are in tests/dist/test_learning.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elastic.cli import cli
from elastic.ledger.events import (
    Error,
    Event,
    Finished,
    Payload,
    Resumed,
    RunStarted,
    SaveCommitted,
    SaveStarted,
    Steps,
    Stopped,
    StopRequested,
    encode,
    utc,
)
from elastic.ledger.history import Since, dead_s, lives, pulse_s, since_save, slowdown, step_s

SIGTERM = StopRequested(source="SIGTERM")


def life(epoch: int, at: float, *more: tuple[float, int, Payload], attempt: str | None = None) -> Iterator[Event]:
    """A start at ``at``: 10 s until it trains; ``more`` are (seconds after ``at``, step, event)."""
    first = [
        (0.0, 0, RunStarted(url="u", every="auto")),
        (4.0, 0, Resumed(attempt=attempt, rng="fresh", seconds={"start": 6.0, "resume": 4.0})),
    ]
    for late, step, data in [*first, *more]:
        base: dict[str, Any] = {"epoch": f"e{epoch:08d}", "generation": None, "start": "s", "rank": 0, "world": 16}
        yield Event(**base, step=step, time=utc(at + late), mono_s=late, host="h", pid=1, data=data)


def steps(n: int, each_s: float = 2.0) -> Steps:
    return Steps(n=n, seconds=n * each_s, min_s=each_s, max_s=each_s)


def saved(step: int, epoch: int, stall_s: float = 0.5) -> SaveCommitted:
    return SaveCommitted(attempt=f"{step:012d}-e{epoch:08d}-0", bytes=100, stall_s=stall_s, persist_s=4.0)


def trained(epoch: int) -> list[tuple[float, int, Payload]]:
    """A first step of 5 s, nine of 2 s, a save which slows two steps to 2.5 s."""
    return [
        (9.0, 1, steps(1, 5.0)),
        (27.0, 10, steps(9)),
        (27.0, 10, SaveStarted(reason="clock")),
        (32.5, 10, saved(10, epoch)),
        (32.5, 12, steps(2, 2.5)),
    ]


def test_a_killed_life_ends_in_the_middle_of_its_silence() -> None:
    first, second = lives([*life(1, 1000.0, *trained(1)), *life(2, 1100.0, *trained(2), attempt=saved(10, 1).attempt)])
    assert pulse_s(28.5) == pytest.approx(7.125)
    assert (first.how, second.how) == ("failure", "running")
    assert first.uptime_s == pytest.approx(28.5 + 7.125 / 2)
    assert list(dead_s([first, second])) == pytest.approx([1100 - 6 - (1032.5 + 7.125 / 2)])
    assert (second.load_s, second.warmup_s, step_s([first, second])) == (10.0, pytest.approx(3.0), pytest.approx(2.0))
    assert slowdown([first]) == pytest.approx(0.2)


def test_the_silence_ends_with_the_next_process() -> None:
    first, _ = lives([*life(1, 1000.0, *trained(1)), *life(2, 1040.0)])
    assert first.ended == 1034.0  # when the next one was born


@pytest.mark.parametrize(
    ("end", "how", "notice"),
    [
        ([(33.0, 12, Finished(until=12))], "planned", None),
        ([(33.0, 12, StopRequested(source="run.stop")), (34.0, 13, Stopped(status=0))], "planned", None),
        (
            [(33.0, 12, SIGTERM), (34.0, 13, SaveStarted(reason="stop")), (36.0, 13, Stopped(status=75))],
            "failure",
            True,
        ),
        ([(33.0, 12, SIGTERM), (34.0, 13, SaveStarted(reason="stop"))], "failure", False),
        ([(33.0, 12, SIGTERM)], "failure", False),
        (
            [(33.0, 12, SaveStarted(reason="stop")), (34.0, 13, Error(error="C-E", message="full"))],
            "failure",
            None,
        ),
        (
            [
                (33.0, 12, SIGTERM),
                (34.0, 13, SaveStarted(reason="stop")),
                (34.5, 13, Error(error="C-E", message="full")),
            ],
            "failure",
            False,
        ),
        ([(33.0, 12, SIGTERM), (33.1, 12, Error(error="RuntimeError", message="gloo"))], "failure", None),
        ([(33.0, 12, Error(error="ZeroDivisionError", message="x"))], "failure", None),
        ([(33.0, 12, SIGTERM), (34.0, 13, Finished(until=12))], "planned", None),
    ],
    ids=[
        *("finished", "run.stop", "saved on notice", "too late", "killed at once", "no signal seen", "not saved"),
        *("a rank died", "a bug", "last step"),
    ],
)
def test_how_a_life_ends(end: list[tuple[float, int, Payload]], how: str, notice: bool | None) -> None:
    first, _ = lives([*life(1, 1000.0, *trained(1), *end), *life(2, 1100.0)])
    assert (first.how, first.notice_saved) == (how, notice)
    assert first.ended >= 1033.0


def test_what_happened_since_the_save() -> None:
    attempt = saved(10, 2).attempt
    story = [
        *life(1, 0.0, *trained(1)),  # before the life that saved: none of it counts
        *life(2, 1000.0, *trained(2), (33.0, 12, Error(error="E", message="x"))),
        *life(3, 1100.0, (9.0, 11, steps(1)), (10.0, 11, SIGTERM), (10.5, 12, SaveStarted(reason="stop"))),
        *life(4, 1200.0),
        *life(5, 1300.0),
    ]
    since = since_save(story, attempt=attempt, epoch="e00000006")
    assert since == Since(
        failures=1, notices_saved=0, notices_missed=1, early=2, lost_s=since.lost_s, saves=((0.5, 4.0),)
    )
    assert since.lost_s == pytest.approx(6.0 + 6.5 + pulse_s(6.5) / 2)
    nothing = since_save(story[:2], attempt=None, epoch="e00000002")
    assert (nothing.failures, nothing.early, nothing.lost_s) == (0, 1, 0.0)


def test_a_stop_with_everything_saved_is_no_failure() -> None:
    story = [*life(1, 0.0, *trained(1), (33.0, 12, SaveStarted(reason="end")), (34.0, 12, saved(12, 1)),
                   (34.0, 12, Finished(until=12)))]  # fmt: skip
    since = since_save(story, attempt=saved(12, 1).attempt, epoch="e00000002")
    assert (since.failures, since.early, since.lost_s, since.saves) == (0, 0, 1.0, ((0.5, 4.0),))


# --- from the command line ----------------------------------------------------------------------------------------


def write(folder: Path, *events: Event, tail: str = "") -> str:
    (folder / "ledger").mkdir()
    text = "".join(encode(e) + "\n" for e in events) + tail
    (folder / "ledger" / "e00000001-r00000-000000.jsonl").write_text(text)
    return str(folder)


def ask(*line: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, ["interval", *line], prog_name="elastic", terminal_width=80)
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def test_where_there_is_no_ledger(tmp_path: Path) -> None:
    status, out, err = ask("--from", str(tmp_path / "nothing"))
    assert (status, out) == (4, "")
    assert "no ledger at file://" in err
    assert "nothing there was written by elastic.Run" in err


def test_where_the_ledger_is_empty(tmp_path: Path) -> None:
    status, out, err = ask("--from", write(tmp_path))
    assert (status, out) == (4, "")
    assert "holds no event" in err
    (tmp_path / "torn").mkdir()
    assert (
        "holds no event; 1 unreadable line of the ledger left out"
        in ask("--from", write(tmp_path / "torn", tail='{"sch'))[2]
    )


def test_where_it_says_too_little(tmp_path: Path) -> None:
    for name, events, sentence in (
        ("early", life(1, 0.0), "1 start in the ledger at"),
        ("unsaved", life(1, 0.0, (9.0, 1, steps(1))), "no save in the ledger at"),
    ):
        (tmp_path / name).mkdir()
        status, out, err = ask("--from", write(tmp_path / name, *events))
        assert (status, out) == (2, "")
        assert sentence in err
    assert ask("--from", str(tmp_path / "unsaved"), "--stall", "5s")[0] == 0
    assert ask("--from", str(tmp_path / "early"), "--mtbf", "5h", "--save", "5s")[0] == 0


def test_what_is_read_off(tmp_path: Path) -> None:
    url = write(tmp_path, *life(1, 0.0, *trained(1)), *life(2, 100.0, *trained(2), attempt=saved(10, 1).attempt))
    status, out, err = ask("--from", url, "--json")
    assert (status, err) == (0, "")
    answer = json.loads(out)
    assert answer["inputs"]["rates"] == {"failures": 1, "exposure_s": pytest.approx(64.125, abs=0.01)}
    assert answer["inputs"]["costs"] == {
        "stall_s": 0.5,
        "persist_s": 4.0,
        "slowdown": pytest.approx(0.2),
        "reschedule_s": pytest.approx(57.9375),
        "load_s": 10.0,
        "warmup_s": pytest.approx(3.0),
    }
    assert answer["inputs"]["job"] == {"nodes": 2, "step_s": pytest.approx(2.0)}
    assert answer["provenance"]["stall_s"] == "measured (n=2)"
    assert answer["provenance"]["step_s"] == "measured (n=18)"
    assert answer["checkpoint_bytes"] == 100
    given = json.loads(ask("--from", url, "--json", "--stall", "5s", "--step", "3s")[1])
    assert (given["inputs"]["costs"]["stall_s"], given["inputs"]["job"]["step_s"]) == (5.0, 3.0)
    assert (given["provenance"]["stall_s"], given["provenance"]["step_s"]) == ("given", "given")
    detected = json.loads(ask("--from", url, "--json", "--detect", "30s")[1])
    assert "reschedule_s" not in detected["inputs"]["costs"]  # the ledger knows no more than their sum


def test_a_restart_from_nothing_has_its_price_too(tmp_path: Path) -> None:
    url = write(tmp_path, *life(1, 0.0, *trained(1)), *life(2, 100.0, *trained(2)))
    answer = json.loads(ask("--from", url, "--json")[1])
    assert answer["inputs"]["costs"]["load_s"] == 10.0
    assert answer["provenance"]["load_s"] == "measured (n=1)"


def test_parallel_efficiency_from_the_ledgers_of_two_runs(tmp_path: Path) -> None:
    urls = []
    for world, each_s in ((16, 2.0), (64, 0.8)):
        (tmp_path / str(world)).mkdir()
        events = [replace(e, world=world) for e in life(1, 0.0, (9.0, 1, steps(1, 5.0)), (27.0, 10, steps(9, each_s)))]
        urls.append(write(tmp_path / str(world), *events))
    line = ["plan", "--gpus", "64", "--save", "4s", "--json"]
    read_off = [word for url in urls for word in ("--measured", url)]
    answers = [
        CliRunner().invoke(cli, [*line, *more], prog_name="elastic")
        for more in (read_off, ["--measured", "16:2s", "--measured", "64:800ms"])
    ]
    assert [a.exit_code for a in answers] == [0, 0]
    assert answers[0].stdout == answers[1].stdout
    efficiency = {row["devices"]: row["efficiency"] for row in json.loads(answers[0].stdout)["sizes"]}
    assert efficiency[64] == pytest.approx(2.0 / 0.8 / 4)
    (tmp_path / "early").mkdir()
    bad = CliRunner().invoke(cli, [*line, "--measured", write(tmp_path / "early", *life(1, 0.0))], prog_name="elastic")
    assert (bad.exit_code, "has no step on 16 devices" in bad.stderr) == (2, True)


def test_nothing_failed_yet(tmp_path: Path) -> None:
    text = ask("--from", write(tmp_path, *life(1, 0.0, *trained(1))))[1]
    assert "assumed, corrected by the failures seen (0 failures in" in " ".join(text.split())


def test_a_crash_loop_is_said(tmp_path: Path) -> None:
    events = [e for n in range(2, 5) for e in life(n, 100.0 * n)]
    text = ask("--from", write(tmp_path, *life(1, 0.0, *trained(1)), *events, *life(5, 600.0, (9.0, 1, steps(1)))))[1]
    assert "! Three starts in a row ended before their first step" in text


def test_storage_options_belong_to_a_url(tmp_path: Path) -> None:
    status, _, err = ask("--mtbf", "6h", "--save", "40s", "-o", "anon=true")
    assert status == 2
    assert "give --from URL" in err
    assert "NAME=VALUE" in ask("--from", str(tmp_path), "-o", "anon")[2]
