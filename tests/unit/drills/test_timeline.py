from __future__ import annotations

import json
import math

import pytest

from drills.timeline import Log, Proc, measure, parse_log, sequence_errors
from tests.unit.drills.records import KILLED, drilled


def text(step: int, rank: int = 0, pid: int = 1, **more: object) -> str:
    return json.dumps({"step": step, "rank": rank, "pid": pid, "loss": 0.1, "t": 10.0 + step, **more})


def test_a_loss_keeps_every_bit_on_its_way_through_the_log() -> None:
    values = [0.1 + 0.2, 5e-324, 1.7976931348623157e308, math.nan, math.inf]
    lines = parse_log([text(n, loss=v) for n, v in enumerate(values, 1)]).lines
    assert [repr(n.loss) for n in lines] == [repr(v) for v in values]


def test_events_are_no_steps_and_what_cannot_be_read_is_named() -> None:
    log = parse_log(
        ['{"event": "start", "rank": 0}', text(1), '{"step": 2, "ra', "[]", '{"step": "3", "rank": 0}', "", text(4)]
    )
    assert [n.step for n in log.lines] == [1, 4]
    assert [p.split(":")[0] for p in log.problems] == ["line 3", "line 4", "line 5"]


@pytest.mark.parametrize(
    "bad", ['{"step": 1, "rank": 0, "loss": "x"}', '{"step": 1, "rank": 0, "samples": 3}', "9" * 5000]
)
def test_a_line_of_another_form_is_a_problem(bad: str) -> None:
    assert parse_log([bad]).problems


def test_a_digest_may_stand_for_the_samples() -> None:
    assert parse_log([text(1, samples="9f2c")]).lines[0].samples == ("9f2c",)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([(1, 1), (2, 1), (3, 1)], None),
        ([(1, 1), (2, 1), (2, 2), (3, 2)], None),  # a restart may train a step again
        ([(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)], None),
        ([(1, 1), (3, 1)], "step 2 is missing"),
        ([(1, 1), (2, 1), (2, 1)], "without a restart"),
        ([(1, 1), (2, 1), (4, 2)], "step 3 was never trained"),
        ([(3, 1)], "step 1-2 was never trained"),
    ],
)
def test_holes_and_repeats_are_found(steps: list[tuple[int, int]], said: str | None) -> None:
    errors = sequence_errors(parse_log([text(s, pid=p) for s, p in steps]))
    assert (said is None and errors == []) or (said is not None and said in errors[0])


def test_a_rank_that_stops_early_is_found() -> None:
    log = parse_log([text(1), text(1, rank=1), text(2)])
    assert sequence_errors(log) == ["rank 1: ends at step 1, others at 2"]


def test_phases_of_a_recovery() -> None:
    run = drilled()
    seen = measure(KILLED, {100}, run.procs, run.log)
    after = {
        name: seen.after(getattr(seen, name))
        for name in ("noticed", "restarted", "complete", "first_step", "caught_up")
    }
    assert after == pytest.approx(
        {"noticed": 0.1, "restarted": 1.0, "complete": 2.0, "first_step": 8.5, "caught_up": 10.5}
    )
    assert (seen.last_before, seen.resumed_from, seen.again) == (12, 10, (11, 12))
    assert seen.lost_s == pytest.approx(2.5)


def test_phases_when_nobody_comes_back() -> None:
    run = drilled()
    log = Log(tuple(n for n in run.log.lines if (n.pid or 0) < 200))
    seen = measure(KILLED, {100}, run.procs[:2], log)
    assert (seen.restarted, seen.first_step, seen.resumed_from) == (None, None, None)
    assert seen.noticed == pytest.approx(KILLED + 0.1)


def test_a_step_of_a_survivor_right_after_the_fault_is_not_a_recovery() -> None:
    run = drilled()
    late = parse_log([text(13, rank=1, pid=101, t=KILLED + 0.05)]).lines
    seen = measure(KILLED, {100}, run.procs, Log((*run.log.lines, *late)))
    assert seen.after(seen.first_step) == pytest.approx(8.5)


def test_a_lone_process_is_noticed_by_its_successor() -> None:
    procs = [Proc(pid=1, rank=0, born=1, started=1.0, ended=5.0), Proc(pid=2, rank=0, born=2, started=6.0)]
    seen = measure(5.0, {1}, procs, parse_log([text(1, t=4.0), text(2, pid=2, t=9.0)]))
    assert (seen.noticed, seen.complete, seen.after(seen.first_step)) == (6.0, 6.0, 4.0)
