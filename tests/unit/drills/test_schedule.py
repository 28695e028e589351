from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drills.schedule import When, draw


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
