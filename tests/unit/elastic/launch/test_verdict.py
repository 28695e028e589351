"""Restarts: who gets one, when the budget is full again, what a crash loop is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.launch.report import failed
from elastic.launch.verdict import Budget, Failure, exit_status


def failure(step: int | None, *, error: str | None = "ValueError: x", rank: int = 0, **more: object) -> Failure:
    return Failure(rank=rank, local_rank=rank, pid=7, status=1, step=step, error=error, **more)  # type: ignore[arg-type]


def test_the_budget_is_full_again_when_training_got_further() -> None:
    budget = Budget(2)
    assert [budget.refusal(failure(step)) for step in (5, 10, 20, 30, 40)] == [None] * 5


def test_without_progress_the_budget_runs_out() -> None:
    budget = Budget(2)
    answers = [budget.refusal(failure(s, error=e)) for e, s in zip("abcd", (5, 5, 4, 5), strict=True)]
    assert answers[:2] == [None, None]
    assert answers[2] == answers[3] == "all 2 restarts are used up, and training got no further"


def test_no_restarts_means_none() -> None:
    assert Budget(0).refusal(failure(5)) == "no restarts were allowed"


def test_the_same_error_at_the_same_step_three_times_is_a_crash_loop() -> None:
    budget = Budget(10)
    assert [budget.refusal(failure(5)) for _ in range(2)] == [None, None]
    assert budget.refusal(failure(5)) == "crash loop: the same error at step 5, 3 times in a row"


def test_numbers_in_the_text_make_no_other_error() -> None:
    budget = Budget(10)
    errors = [f"RuntimeError: connection closed by peer [127.0.0.1]:{port}" for port in (41, 4242, 9)]
    answers = [budget.refusal(failure(5, error=e)) for e in errors]
    assert answers[:2] == [None, None]
    assert answers[2] is not None


def test_another_rank_error_or_step_is_no_crash_loop() -> None:
    budget = Budget(10)
    for f in (failure(5), failure(5), failure(5, error="other"), failure(5), failure(5, rank=1), failure(5)):
        assert budget.refusal(f) is None


def test_kills_at_unknown_steps_are_no_crash_loop_but_errors_soon_after_the_start_are() -> None:
    budget = Budget(10)
    assert [budget.refusal(failure(None, error=None)) for _ in range(5)] == [None] * 5
    assert [budget.refusal(failure(None, lived_s=3)) for _ in range(2)] == [None, None]
    assert budget.refusal(failure(None, lived_s=3)) == "crash loop: the same error, 3 times in a row"


@given(st.integers(0, 5), st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), max_size=40))
def test_a_job_that_gets_no_further_always_ends(limit: int, failures: list[tuple[int, str]]) -> None:
    """However the errors are mixed: beyond the first visit of each step there are at most ``limit`` restarts."""
    budget, highest, since = Budget(limit), -1, 0
    for step, error in failures:
        granted = budget.refusal(failure(step, error=error)) is None
        since = 0 if step > highest else since
        highest = max(highest, step)
        if not granted:
            return
        since += 1
        assert since <= limit


@pytest.mark.parametrize(("status", "shell"), [(0, 0), (1, 1), (75, 75), (-9, 137), (-15, 143)])
def test_exit_status_as_a_shell_has_it(status: int, shell: int) -> None:
    assert exit_status(status) == shell


def test_the_summary_names_rank_error_place_log_and_next_command(tmp_path: object) -> None:
    text = failed(
        failure(40, error="ValueError: boom\nmore", rank=3, where="train.py:31"), world=8, generation=2, host="h",
        why="crash loop: the same error at step 40, 3 times in a row", log=None, lines=["one", "two"],
    )  # fmt: skip
    assert text.splitlines() == [
        "elastic launch: rank 3 of 8 ended with exit status 1 (pid 7 on h, generation 2, step 40)",
        "  error     ValueError: boom",
        "  at        train.py:31",
        "  no start  crash loop: the same error at step 40, 3 times in a row",
        "  next      mend the error above; a restart cannot",
        "  last lines of its log:",
        "  | one",
        "  | two",
    ]
