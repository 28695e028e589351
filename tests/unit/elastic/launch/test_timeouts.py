"""The order of time-outs: each rule alone, its fix, and what is not known."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from elastic.cli import cli
from elastic.launch.timeouts import GOOD, UNKNOWN, WARNING, WRONG, Times, check, worst

WELL = Times(nodes=2, step_s=2.0, save_s=8.0, load_s=30.0, collective_s=60.0, scheduler_s=60.0)


def test_a_well_ordered_job_passes_every_rule() -> None:
    assert {f.verdict for f in check(WELL)} == {GOOD}


@pytest.mark.parametrize(
    ("change", "rule", "verdict"),
    [
        ({"hang_s": 5.0}, "3 x step <= hang time-out", WRONG),
        ({"hang_s": 61.0}, "hang time-out < process-group time-out", WRONG),
        ({"step_s": 20.1, "shutdown_s": 50.0, "hang_s": 60.0}, "3 x step <= process-group time-out", WRONG),
        ({"save_s": 61.0, "shutdown_s": 90.0, "scheduler_s": 99.0}, "save <= process-group time-out", WRONG),
        ({"load_s": 61.0}, "load <= process-group time-out", WRONG),
        ({"load_s": 700.0, "collective_s": 600.0}, "save, load <= quiet time-out", WRONG),
        ({"save_s": 27.0}, "2 steps + save <= shutdown time-out", WRONG),
        ({"scheduler_s": 30.0}, "shutdown time-out + 5s <= scheduler's grace", WRONG),
        ({"keep_alive_attempts": 2, "keep_alive_s": 3.0}, "3 <= keep-alive attempts", WRONG),
        ({"keep_alive_attempts": 3}, "4s <= keep-alive x attempts", WRONG),
        ({"last_call_s": 1.0}, "3s <= last call", WRONG),
        ({"last_call_s": 30.0}, "last call <= 15s", WARNING),
        ({"blind_s": 20.0}, "store connection given up <= keep-alive + last call", WARNING),
        ({"collective_s": 1800.0}, "process-group time-out <= 10min", WARNING),
    ],
)
def test_each_rule_finds_its_own_mistake(change: dict[str, float], rule: str, verdict: str) -> None:
    found = {f.rule: f for f in check(replace(WELL, **change))}  # type: ignore[arg-type]
    assert found[rule].verdict == verdict
    assert found[rule].fix


def test_what_is_not_known_is_not_called_good() -> None:
    findings = check(Times())
    assert worst(findings) == UNKNOWN
    assert all("?" in f.found for f in findings if f.verdict == UNKNOWN)


def test_one_host_has_no_rules_for_several() -> None:
    assert not any("keep-alive" in f.rule for f in check(replace(WELL, nodes=1)))


@given(st.floats(0.01, 1e5), st.floats(0.01, 1e5), st.floats(0.01, 1e5), st.floats(0.01, 1e5))
def test_longer_graces_never_make_it_worse(step: float, save: float, grace: float, more: float) -> None:
    times = Times(step_s=step, save_s=save, load_s=1.0, shutdown_s=grace, scheduler_s=grace + 5, collective_s=1e9,
                  quiet_s=1e9)  # fmt: skip
    longer = replace(times, shutdown_s=grace + more, scheduler_s=grace + more + 6)
    wrong = {f.rule for f in check(times) if f.verdict == WRONG}
    assert {f.rule for f in check(longer) if f.verdict == WRONG} <= wrong


def test_the_command_says_what_is_wrong_why_and_what_to_do() -> None:
    line = "doctor --nodes 2 --keep-alive 1s --attempts 2 --last-call 1s"
    result = CliRunner().invoke(cli, line.split(), prog_name="elastic")
    assert result.exit_code == 1
    assert "WRONG 3 <= keep-alive attempts" in result.stdout
    assert "two worlds train at once" in result.stdout.replace("\n        ", " ")
    assert "next  --rdzv-conf keep_alive_interval=1,keep_alive_max_attempt=5" in result.stdout


def test_json_and_statuses() -> None:
    good = "doctor --json --step 2s --save 8s --load 30s --collective 60s --scheduler-grace 60s"
    result = CliRunner().invoke(cli, good.split())
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert record["schema"] == "elastic.doctor/1"
    assert record["verdict"] == "good"
    assert CliRunner().invoke(cli, ["doctor"]).exit_code == 3
    assert CliRunner().invoke(cli, ["doctor", "--step", "4"]).exit_code == 2
