from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drills.schedule import When, draw, draw_again


@given(seed=st.integers(0, 2**40), last=st.integers(10, 5000), world=st.integers(1, 64), data=st.data())
def test_what_is_drawn_lies_in_the_run_and_after_the_first_commit(
    seed: int, last: int, world: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(1, max(1, last - max(2, -(-last // 10)) - 1)))
    moment = draw(seed, When(), last_step=last, world=world, first_commit=first)
    assert first < moment.step < last
    assert moment.lowest <= moment.step <= moment.highest
    assert 0 <= moment.rank < world
    assert 0 <= moment.fraction < 1
    assert moment == draw(seed, When(), last_step=last, world=world, first_commit=first)


def test_a_seed_means_the_same_moment_everywhere_and_always() -> None:
    moment = draw(7, When(), last_step=60, world=2, first_commit=10)
    assert (moment.step, moment.rank, moment.fraction) == (32, 1, 0.027)


def test_seeds_reach_every_rank_and_many_steps() -> None:
    moments = [draw(s, When(), last_step=60, world=4, first_commit=10) for s in range(200)]
    assert {m.rank for m in moments} == {0, 1, 2, 3}
    assert len({m.step for m in moments}) > 35


def test_pinning_one_answer_leaves_the_others() -> None:
    free = draw(7, When(), last_step=60, world=4, first_commit=10)
    pinned = draw(7, When(at_step=20), last_step=60, world=4, first_commit=10)
    assert (pinned.step, pinned.rank, pinned.fraction) == (20, free.rank, free.fraction)
    assert draw(7, When(rank=3), last_step=60, world=4, first_commit=10).step == free.step


def test_from_the_start_needs_no_commit() -> None:
    moment = draw(1, When(after="start"), last_step=60, world=2, first_commit=50)
    assert moment.lowest == 1
    assert not moment.needs_commit
    assert not draw(1, When(), last_step=60, world=2, first_commit=None).needs_commit


def test_a_drill_of_several_commits_strikes_between_them_and_the_next() -> None:
    every = (10, 20, 30, 40, 50, 60)
    for seed in range(40):
        moment = draw(seed, When(commits=3), last_step=60, world=2, first_commit=10, committed=every)
        assert 30 < moment.step < 40
    with pytest.raises(ValueError, match="more than 6 committed steps"):
        draw(1, When(commits=6), last_step=60, world=2, first_commit=10, committed=every)


def test_a_strike_inside_a_save_leaves_a_save_to_come() -> None:
    for seed in range(40):
        moment = draw(seed, When(phase="save"), last_step=60, world=2, first_commit=10, committed=(10, 20, 30))
        assert 10 < moment.step < 30


def test_later_strikes_have_dice_of_their_own() -> None:
    drawn = {draw_again(seed, number, When(), world=4) for seed in range(5) for number in (1, 2)}
    assert len(drawn) == 10
    assert draw_again(7, 1, When(), world=4) == draw_again(7, 1, When(), world=4)
    assert draw_again(7, 1, When(rank=3), world=4)[0] == 3


@pytest.mark.parametrize("wrong", [{"after": "lunch"}, {"phase": "nap"}, {"commits": 0}, {"wait_s": -1.0}])
def test_words_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"one of|begin at"):
        When(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("when", "last", "first", "said"),
    [
        (When(), 20, 19, "no room"), (When(rank=2), 60, 10, "no rank 2"), (When(at_step=60), 60, 10, "not inside"),
        (When(), 2, None, "no room"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_says_why(when: When, last: int, first: int | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        draw(1, when, last_step=last, world=2, first_commit=first)
