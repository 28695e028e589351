"""What has to be endured, given notice of, or done on another number of ranks is judged by checks of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drills.book import BOOK
from drills.checks import Check, Verdict, asked, judge, overall
from drills.history import Record, overtaken_dropped
from drills.timeline import Line, Log, Proc
from tests.unit.drills.records import KILLED, STEPS, commits, compared, control, drilled, element, good, line, pair

FROZEN, NOTICE, SHRINK, ROT = (BOOK[n] for n in ("frozen-rank", "sigterm-short-notice", "shrink-and-grow",
                                                 "bit-rot-newest"))  # fmt: skip
FREEZE = {"t": KILLED, "rank": 1, "pid": 101, "said": "SIGSTOP to rank 1 (pid 101)"}


def frozen() -> Record:
    """Stopped for three seconds after step 12, and nothing else."""
    lines = [line(s, r, t=1000.0 + s + (3 if s > 12 else 0)) for s in range(1, STEPS + 1) for r in range(2)]
    run = replace(drilled(), procs=[Proc(pid=100 + r, rank=r, born=1, started=1000.0, ended=1031.0) for r in range(2)],
                  log=Log(tuple(lines)), commits=commits(1000.0, (5, 10, 15, 20)))  # fmt: skip
    pairs = [pair(s) for s in (5, 10, 15, 20)]
    return good(evidence={"freeze": FREEZE}, healed={"freeze": "SIGCONT to 101"}, healed_t={"freeze": KILLED + 3},
                runs={"control": control(), "drilled": run}, compared={("control", "drilled"): compared(*pairs)},
                )  # fmt: skip


def check(record: Record, scenario: Any, name: str) -> Check:
    return next(c for c in judge(record, scenario) if c.name == name)


def test_what_was_endured_passes_without_a_restart() -> None:
    found = judge(frozen(), FROZEN)
    assert [c for c in found if c.verdict is not Verdict.PASS] == []
    assert {"no restart"} <= {c.name for c in found}
    assert not {"noticed", "restarted"} & {c.name for c in found}
    assert check(frozen(), FROZEN, "first new step").value == "0.50 s"  # from the end of the fault
    assert check(frozen(), FROZEN, "work lost").value.startswith("0 steps")


def test_a_restart_where_there_should_be_none_fails() -> None:
    record = frozen()
    record.runs["drilled"].procs.append(Proc(pid=300, rank=1, born=9, started=KILLED + 1))
    assert check(record, FROZEN, "no restart").verdict is Verdict.FAIL
    assert "rank 1 was started again 1.0 s after" in check(record, FROZEN, "no restart").detail


def test_a_fault_that_nothing_says_was_healed_breaks_the_harness() -> None:
    record = frozen()
    record.healed = {}
    assert check(record, FROZEN, "fault undone").verdict is Verdict.BROKE
    assert overall(judge(record, FROZEN), record) is Verdict.BROKE


def test_a_step_trained_twice_after_a_notice_fails() -> None:
    found = check(good(), NOTICE, "nothing again")
    assert found.verdict is Verdict.FAIL
    assert found.value == "2 steps trained twice"
    assert "nothing again" not in asked(BOOK["kill-any-rank"])


def test_work_is_lost_back_to_the_step_that_the_drill_left_whole() -> None:
    assert check(good(), ROT, "work lost").verdict is Verdict.PASS
    record = good()
    record.evidence["kill"]["good_step"] = 5  # it went on from 10, which the drill says it had damaged
    assert check(record, ROT, "work lost").verdict is Verdict.PASS
    assert "back to 5 or later, the newest good one" in check(record, ROT, "work lost").target
    record.runs["drilled"].commits += commits(1000.0, (11,))
    record.evidence["kill"]["good_step"] = 11
    assert check(record, ROT, "work lost").verdict is Verdict.FAIL


def test_each_strike_is_judged_for_the_work_it_cost() -> None:
    record = good()
    early = {**record.evidence["kill"], "t": 1007.5, "gone_t": 1007.6, "pid": 555, "pids": [555]}
    record.evidence = {"kill": early, "kill#2": record.evidence["kill"]}
    assert check(record, BOOK["kill-in-load"], "work lost").verdict is Verdict.PASS
    record.runs["drilled"].commits += commits(1000.0, (12,))  # seen at 1012.2, and it went on from 10
    assert check(record, BOOK["kill-in-load"], "work lost").verdict is Verdict.FAIL


def shrunk() -> Record:
    """After step 12, the steps from 11 on are trained by one rank that takes both shares."""
    run = drilled()
    before = [n for n in run.log.lines if n.pid in (100, 101)]

    def alone(step: int) -> Line:
        both = [line(step, r, t=0) for r in range(2)]
        return replace(both[0], world=1, pid=200, t=1010.0 + step, loss=(both[0].loss or 0) * 1.01,
                       samples=tuple(sorted(x for n in both for x in n.samples or ())))  # fmt: skip

    run.log = Log((*before, *(alone(s) for s in range(11, STEPS + 1))))
    pairs = [pair(5), pair(10), pair(15, element("model.w"), epoch=2), pair(20, element("model.w"), epoch=2)]
    return good(runs={"control": control(), "drilled": run}, compared={("control", "drilled"): compared(*pairs)})


def test_another_number_of_ranks_is_compared_as_a_whole() -> None:
    found = judge(shrunk(), SHRINK)
    assert [(c.name, c.detail) for c in found if c.verdict is not Verdict.PASS] == []
    assert "rng" not in {c.name for c in found}
    assert "up to the first change" in check(shrunk(), SHRINK, "state bitwise").detail


def test_a_step_that_was_cut_off_is_not_taken_for_one_with_fewer_samples() -> None:
    record = shrunk()
    log = record.runs["drilled"].log
    record.runs["drilled"].log = Log(tuple(n for n in log.lines if (n.step, n.rank, n.pid) != (12, 1, 101)))
    assert [c.name for c in judge(record, SHRINK) if c.verdict is not Verdict.PASS] == []


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        (lambda n: replace(n, samples=n.samples[1:]) if n.step == 14 else n, "samples", "first at step 14"),
        (lambda n: replace(n, samples=line(n.step - 1, 0, t=0).samples) if n.pid == 200 else n, "samples", "step 11"),
        (lambda n: replace(n, loss=9.0) if n.step == 17 else n, "losses", "first at step 17: 9"),
    ],
)
def test_a_mistake_on_another_number_of_ranks_is_found(change: Any, name: str, said: str) -> None:
    record = shrunk()
    log = record.runs["drilled"].log
    record.runs["drilled"].log = Log(tuple(change(n) for n in log.lines))
    found = check(record, SHRINK, name)
    assert found.verdict is Verdict.FAIL
    assert said in found.detail


def test_the_lines_of_a_job_that_was_overtaken_end_where_the_other_begins() -> None:
    old = [line(s, 0, t=float(s)) for s in range(1, 6)]
    new = [line(s, 0, t=10.0 + s, pid=200) for s in range(4, 8)]
    late = [line(s, 0, t=11.0 + s) for s in (6, 7)]
    log = Log((*old, new[0], late[0], *new[1:], late[1]))
    kept, late_ones = overtaken_dropped(log, {100})
    assert kept.lines == (*old, *new)
    assert [n.step for n in late_ones] == [6, 7]
    assert overtaken_dropped(log, set()) == (log, ())
    assert overtaken_dropped(log, {999}) == (log, ())


def test_an_old_start_that_trains_to_its_end_fails() -> None:
    stale = BOOK["stale-writer"]
    record = good()
    record.runs["drilled"].overtaken = {100, 101}
    assert check(record, stale, "old start gave up").verdict is Verdict.PASS
    record.runs["drilled"].late = (line(13, 0, t=1030.0), line(STEPS, 0, t=1030.0))
    found = check(record, stale, "old start gave up")
    assert found.verdict is Verdict.FAIL
    assert "did step 20 after the new one had begun" in found.detail
    assert "old start gave up" not in asked(BOOK["kill-any-rank"])


def test_a_run_without_a_new_process_is_told_as_one_that_never_stopped() -> None:
    from drills.report.story import tell

    story = tell(frozen(), FROZEN, judge(frozen(), FROZEN))
    assert story.done == "SIGSTOP to rank 1 (pid 101)."
    assert story.back.startswith("It never stopped")
