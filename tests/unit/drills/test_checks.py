from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from drills.book import BOOK
from drills.checks import CHECKS, EXIT_STATUS, Check, Verdict, judge, overall
from drills.checks.recovery import last_words
from drills.history import Record
from drills.timeline import Log
from tests.unit.drills.records import (
    KILLED,
    KILLED_AFTER,
    compared,
    control,
    drilled,
    element,
    good,
    line,
    pair,
    plan,
    storage,
    with_lines,
)

ASKED_ELSEWHERE = ("no restart", "nothing again", "old start gave up")
KILL, FLIP = BOOK["kill-any-rank"], BOOK["flip-restored-byte"]


def verdicts(record: Record) -> dict[str, Check]:
    return {c.name: c for c in judge(record, KILL)}


def not_passed(record: Record) -> set[str]:
    return {c.name for c in judge(record, KILL) if c.verdict is not Verdict.PASS}


def test_a_good_drill_passes_every_check() -> None:
    found = judge(good(), KILL)
    assert [c.name for c in found if c.verdict is not Verdict.PASS] == []
    assert {c.name for c in found} == CHECKS.keys() - {"deterministic", "oracle sees", *ASKED_ELSEWHERE}
    assert overall(found, good()) is Verdict.PASS
    assert EXIT_STATUS[Verdict.PASS] == 0


def test_values_say_what_was_seen() -> None:
    found = verdicts(good())
    assert found["first new step"].value == "8.50 s"
    assert found["noticed"].value == "0.10 s"  # the other rank ended
    assert found["restarted"].value == "2.00 s"  # the second of two new processes
    assert found["work lost"].value == "2 steps trained twice, 2.5 s"
    assert found["losses"].value == "44 lines, 4 of them trained again"
    assert found["samples"].value == "80 samples, 0 lost, 0 repeated"


def after(step: int, change: Callable[[object], object]) -> Callable[..., object]:
    return lambda n: change(n) if n.step == step and n.pid >= 200 else n


def with_diff(key: str, step: int = 15) -> Record:
    pairs = [pair(5), pair(10), pair(15, epoch=2), pair(20, epoch=2)]
    pairs = [pair(step, element(key), epoch=2) if p["step"] >= step else p for p in pairs]
    return good(compared={("control", "drilled"): compared(*pairs)})


BROKEN: dict[str, tuple[Callable[[], Record], str, str]] = {
    "a tensor differs": (
        lambda: with_diff("optim.state.w.exp_avg"), "state bitwise", "step 15: optim.state.w.exp_avg[3, 1]",
    ),
    "rng differs": (lambda: with_diff("rng.rank00001"), "rng", "rng.rank00001"),
    "position differs": (lambda: with_diff("data"), "data position", "data[3, 1]"),
    "a loss differs by one bit": (
        lambda: with_lines(good(), "drilled", after(14, lambda n: replace(n, loss=math.nextafter(n.loss, 2)))),
        "losses", "step 14, rank 0",
    ),
    "a loss of a step trained again differs": (
        lambda: with_lines(good(), "drilled", after(11, lambda n: replace(n, loss=0.5))),
        "losses", "step 11, rank 0 (trained again)",
    ),
    "a loss is NaN": (
        lambda: with_lines(good(), "drilled", after(14, lambda n: replace(n, loss=math.nan))), "losses", "nan",
    ),
    "a batch is repeated": (
        lambda: with_lines(good(), "drilled", lambda n: replace(n, samples=line(n.step - 1, n.rank, t=0).samples)
                           if n.pid >= 200 else n),
        "samples", "step 11, rank 0 (trained again): [100, 105], the control has [110, 115]",
    ),
    "a step is missing": (
        lambda: with_lines(good(), "drilled", lambda n: None if n.step == 14 else n),
        "losses", "step 14 is missing",
    ),
    "a step comes twice without a restart": (lambda: twice(14), "samples", "step 14 after step 14 without a restart"),
    "it starts from zero": (
        lambda: with_lines(good(), "drilled", lambda n: replace(n, step=n.step - 10) if n.pid >= 200 else n),
        "work lost", "although step 10 was committed",
    ),
    "it ends with an error": (lambda: ended(status=1), "run finished", "--resubmit"),
    "it was stopped": (lambda: ended(status=-15, stopped="the budget of 60 s was used up"), "run finished", "budget"),
    "it never restarted": (lambda: never_back(), "first new step", "no step was done"),
    "a process is left": (lambda: drilled_with(left=["4242 sleep: sleep 600"]), "nothing left running", "4242 sleep"),
    "a commit without data": (
        lambda: drilled_with(storage=storage(hollow=["000000000020-e00000002-0.json"])), "left on storage", "0020-e",
    ),
    "the last step is another": (
        lambda: good(compared={("control", "drilled"): compared(pair(15), final=[20, 15])}), "state bitwise", "is 15",
    ),
    "a checkpoint cannot be read": (
        lambda: good(compared={("control", "drilled"): compared(
            {**pair(20), "error": {"side": "right", "text": "zip is torn", "lacks": False}})}),
        "state bitwise", "zip is torn",
    ),
    "noticed too late": (lambda: slow(detect_s=0.05), "noticed", ""),
    "restarted too late": (lambda: slow(restart_s=1.5), "restarted", ""),
    "back too late": (lambda: slow(first_step_s=5.0), "first new step", ""),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_each_damage_fails_its_check_and_the_drill(what: str) -> None:
    make, name, text = BROKEN[what]
    record = make()
    check = verdicts(record)[name]
    assert check.verdict is Verdict.FAIL
    assert text in f"{check.value} {check.detail}"
    assert overall(judge(record, KILL), record) is Verdict.FAIL


def twice(step: int) -> Record:
    record = good()
    log = record.runs["drilled"].log
    at = next(i for i, n in enumerate(log.lines) if n.step == step and n.rank == 0)
    record.runs["drilled"].log = Log((*log.lines[: at + 1], *log.lines[at:]))
    return record


def drilled_with(**changes: object) -> Record:
    record = good()
    for name, value in changes.items():
        setattr(record.runs["drilled"], name, value)
    return record


def slow(**limits: float) -> Record:
    return good(plan=plan(targets=replace(plan().targets, **limits)))


def ended(**changes: object) -> Record:
    return drilled_with(**changes)


def never_back() -> Record:
    record = with_lines(drilled_with(status=-9), "drilled", lambda n: n if n.pid < 200 else None)
    record.runs["drilled"].procs = record.runs["drilled"].procs[:2]
    record.compared["control", "drilled"] = compared(pair(5), pair(10), final=[20, 10])
    return record


def test_a_run_that_did_not_come_back_is_one_failure_not_six() -> None:
    found = verdicts(never_back())
    for name in ("state bitwise", "losses", "samples", "rng", "data position"):
        assert found[name].verdict is Verdict.UNKNOWN, name
        assert "did not get to its end (step 12 of 20)" in found[name].detail


def test_a_difference_from_before_the_fault_is_the_targets_own() -> None:
    pairs = [pair(5, element("rng.rank00000")), pair(20, element("rng.rank00000"), epoch=2)]
    found = verdicts(good(compared={("control", "drilled"): compared(*pairs)}))
    assert found["state bitwise"].verdict is found["rng"].verdict is Verdict.UNKNOWN
    assert "saved before the fault" in found["rng"].detail
    assert "--control-runs 2" in found["rng"].detail


def test_it_does_not_hide_another_difference_from_after_the_fault() -> None:
    pairs = [pair(5, element("rng.rank00000")), pair(20, element("model.w"), element("rng.rank00000"), epoch=2)]
    found = verdicts(good(compared={("control", "drilled"): compared(*pairs)}))
    assert found["state bitwise"].verdict is Verdict.FAIL
    assert "model.w" in found["state bitwise"].detail


def test_a_loss_that_differs_before_the_fault_is_the_targets_own() -> None:
    record = with_lines(good(), "drilled", lambda n: replace(n, loss=0.5) if n.step == 3 else n)
    check = verdicts(record)["losses"]
    assert check.verdict is Verdict.UNKNOWN
    assert "before the fault already" in check.detail


UNKNOWN: dict[str, tuple[Callable[[], Record], str, str]] = {
    "no samples": (lambda: with_lines(good(), "drilled", lambda n: replace(n, samples=None)), "samples", "no samples"),
    "no losses": (lambda: with_lines(good(), "control", lambda n: replace(n, loss=None)), "losses", "no loss"),
    "no log": (lambda: with_lines(good(), "drilled", lambda n: None), "losses", "wrote no log"),
    "no layout": (
        lambda: good(compared={("control", "drilled"): compared(reason="no commit records below commits/")}),
        "state bitwise", "no commit records",
    ),
    "no rng entries": (lambda: no_group("rng"), "rng", "no entry rng.*"),
    "no data entry": (lambda: no_group("data"), "data position", "no entry data.*"),
    "no reader": (
        lambda: good(compared={("control", "drilled"): compared(
            {**pair(20), "error": {"side": "left", "text": "No module named s3fs", "lacks": True}})}),
        "state bitwise", "s3fs",
    ),
    "a value that cannot be decoded": (
        lambda: good(compared={("control", "drilled"): compared(
            pair(20, {"key": "data", "what": "undecodable", "left": "9 bytes", "right": "9 bytes", "reason": "pickle"},
                 epoch=2))}),
        "data position", "cannot be decoded",
    ),
    "no commits seen": (lambda: drilled_with(commits=[]), "work lost", "no commit had been seen"),
    "the control's own log has a hole": (
        lambda: with_lines(good(), "control", lambda n: None if n.step == 7 else n), "control run", "step 7 is missing",
    ),
}  # fmt: skip


def no_group(group: str) -> Record:
    p = pair(20)
    del p["groups"][group]
    return good(compared={("control", "drilled"): compared(p)})


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_could_not_be_looked_at_is_not_verified(what: str) -> None:
    make, name, text = UNKNOWN[what]
    record = make()
    check = verdicts(record)[name]
    assert check.verdict is Verdict.UNKNOWN
    assert text in check.detail


def test_a_drill_that_was_not_verified_does_not_pass() -> None:
    record = with_lines(good(), "drilled", lambda n: replace(n, samples=None))
    assert overall(judge(record, KILL), record) is Verdict.UNKNOWN
    assert EXIT_STATUS[Verdict.UNKNOWN] == 3


def test_a_check_that_was_not_asked_for_is_left_out() -> None:
    record = with_lines(good(plan=plan(skip=("samples",))), "drilled", lambda n: replace(n, samples=None))
    assert "samples" not in verdicts(record)
    assert overall(judge(record, KILL), record) is Verdict.PASS


def test_a_broken_harness_is_never_the_targets_failure() -> None:
    record = with_diff("model.w")
    record.broke = ["rank 1 (pid 5) is still there 10 s after SIGKILL"]
    found = verdicts(record)
    assert found["fault fired"].verdict is Verdict.BROKE
    assert overall(found.values(), record) is Verdict.BROKE
    assert EXIT_STATUS[Verdict.BROKE] == 70


def test_a_target_that_dies_undisturbed_is_said_so_and_not_a_failure() -> None:
    run = control()
    run.status, run.said = 1, "Traceback\nValueError: no data\nhint: none"
    record = good(runs={"control": run}, evidence={}, compared={}, ended_early="the control run ended with status 1")
    found = verdicts(record)
    assert found["control run"].verdict is Verdict.UNKNOWN
    assert "ValueError: no data" in found["control run"].detail
    assert overall(found.values(), record) is Verdict.UNKNOWN
    assert found["state bitwise"].value == "not reached"


def test_two_control_runs_that_differ_make_a_failure_not_verified() -> None:
    record = with_diff("model.w")
    record.plan = plan(control_runs=2)
    record.runs["control-2"] = replace(control(), name="control-2")
    with_lines(record, "control-2", lambda n: replace(n, loss=9.0) if n.step == 4 else n)
    record.compared["control", "control-2"] = compared(pair(20))
    found = verdicts(record)
    assert found["deterministic"].verdict is Verdict.UNKNOWN
    assert "step 4, rank 0" in found["deterministic"].detail
    assert found["state bitwise"].verdict is Verdict.UNKNOWN
    assert "two undisturbed runs differ" in found["state bitwise"].detail


def test_two_control_runs_that_are_equal_leave_the_failure() -> None:
    record = with_diff("model.w")
    record.plan = plan(control_runs=2)
    record.runs["control-2"] = replace(control(), name="control-2")
    record.compared["control", "control-2"] = compared(pair(20))
    found = verdicts(record)
    assert found["deterministic"].verdict is Verdict.PASS
    assert found["state bitwise"].verdict is Verdict.FAIL


def test_control_runs_that_differ_in_one_tensor_are_found_without_a_log() -> None:
    record = good(plan=plan(control_runs=2))
    record.runs["control-2"] = replace(control(), name="control-2")
    record.compared["control", "control-2"] = compared(pair(20, element("model.w")))
    assert verdicts(record)["deterministic"].verdict is Verdict.UNKNOWN


SAID = """Traceback (most recent call last):
  File "train.py", line 4, in <module>
ckpt.errors.NotProven: [C-F] what was restored is not what was saved
  rng.rank00001  torch: differs
  next           do not train on this state
W1201 something of the launcher
Traceback (most recent call last):
  File "run.py", line 1, in main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============
train.py FAILED
"""


RANKS = """[rank0]: Traceback (most recent call last):
[rank1]: Traceback (most recent call last):
[rank0]:   File "train.py", line 4, in <module>
[rank1]:   File "train.py", line 4, in <module>
[rank0]: ckpt.errors.Refused: [C-U] 1 values are not the same on all ranks
[rank1]: ckpt.errors.Refused: [C-U] 1 values are not the same on all ranks
[rank0]:   loss  differs from rank 0 on rank 1
[rank1]:   loss  differs from rank 0 on rank 1
"""


def test_ranks_that_speak_at_once_are_told_apart() -> None:
    assert last_words(replace(drilled(), said=RANKS)) == (
        "ckpt.errors.Refused: [C-U] 1 values are not the same on all ranks; loss differs from rank 0 on rank 1"
    )


def test_last_words_are_those_of_a_worker_with_its_facts() -> None:
    assert last_words(replace(drilled(), said=SAID)) == (
        "ckpt.errors.NotProven: [C-F] what was restored is not what was saved; rng.rank00001 torch: differs"
    )
    assert last_words(replace(drilled(), said="x\nValueError: no data\nhint: none")) == "ValueError: no data"
    assert last_words(replace(drilled(), said="")) == "none"


PLANTED = {"tensor": "w", "index": [3, 1], "said": "bit 11 of w[3, 1] flipped", "t": KILLED + 2}


def test_a_planted_bit_that_is_found_is_a_failure_as_meant() -> None:
    record = with_diff("model.w")
    record.evidence["flip-restored-bit"] = PLANTED
    record.healed["flip-restored-bit"] = "nothing to undo"
    found = {c.name: c for c in judge(record, FLIP)}
    assert found["oracle sees"].verdict is Verdict.PASS
    assert overall(found.values(), record) is Verdict.FAIL


def test_a_planted_bit_that_is_not_found_breaks_the_harness() -> None:
    record = good()
    record.evidence["flip-restored-bit"] = PLANTED
    record.healed["flip-restored-bit"] = "nothing to undo"
    found = {c.name: c for c in judge(record, FLIP)}
    assert found["oracle sees"].verdict is Verdict.BROKE
    assert overall(found.values(), record) is Verdict.BROKE


def test_a_log_that_counts_from_zero_is_read_as_steps_done() -> None:
    lines = [replace(n, step=n.step - 1) for n in drilled().log.lines]
    log = Log(tuple(lines))
    assert log.offset == 1
    assert log.shifted(log.offset).last_step == 20
    assert drilled().log.offset == 0


def test_the_fault_came_after_the_step_that_the_log_shows() -> None:
    assert f"after step {KILLED_AFTER}" in verdicts(good())["work lost"].detail
