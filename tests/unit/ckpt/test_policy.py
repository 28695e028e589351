"""Policies of retention: properties that hold for every list of steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import Refused
from ckpt.policy import Best, EveryN, Keep, Latest, Tail, Union, parse, reasons

STEPS = st.sets(st.integers(0, 1_000_000) | st.integers(0, 50), min_size=1, max_size=40).map(
    lambda s: sorted(s, reverse=True)
)
VALUES = {s: ((s * 7919) % 97) / 10 for s in range(0, 1_000_001, 3)} | {6: math.nan}
SINGLE = st.one_of(
    st.integers(1, 9).map(Latest),
    st.integers(1, 2000).map(EveryN),
    st.integers(2, 5).map(Tail),
    st.tuples(st.integers(1, 4), st.sampled_from(["min", "max"])).map(lambda a: Best(lambda: VALUES, *a)),
)
ANY = SINGLE | st.lists(SINGLE, min_size=2, max_size=3).map(lambda p: Union(tuple(p)))


@given(ANY, STEPS)
def test_the_newest_is_kept_and_nothing_is_invented(keep: Keep, steps: list[int]) -> None:
    kept = keep.choose(steps)
    assert kept[0] == steps[0]
    assert list(kept) == [s for s in steps if s in set(kept)]


@given(ANY, STEPS)
def test_choosing_again_changes_nothing(keep: Keep, steps: list[int]) -> None:
    kept = keep.choose(steps)
    assert list(keep.choose(kept)) == list(kept)


@given(ANY, STEPS, st.data())
def test_what_is_kept_of_many_is_kept_of_a_part(keep: Keep, steps: list[int], data: st.DataObject) -> None:
    part = [s for s in steps if data.draw(st.booleans()) or s == steps[0]]
    assert set(keep.choose(steps)) & set(part) <= set(keep.choose(part))


@given(ANY, STEPS, st.integers(0, 40))
def test_a_step_once_dropped_is_never_needed_again(keep: Keep, steps: list[int], cut: int) -> None:
    older = steps[min(cut, len(steps) - 1) :]
    dropped = set(older) - set(keep.choose(older))
    assert not dropped & set(keep.choose(steps))


@given(st.integers(2, 5), st.integers(1, 4000), st.integers(1, 3000))
@settings(max_examples=50)
def test_a_tail_keeps_few_however_it_is_pruned(base: int, n: int, every: int) -> None:
    kept: list[int] = []
    for step in range(0, n * every, max(every, n * every // 300)):  # pruned after each save, as a run does
        kept = list(Tail(base).choose([step, *kept]))
        assert len(kept) <= base * (1 + math.log(max(step, 1), base) + 1e-9) + 1
    assert kept[-1] == 0


def test_a_tail_thins_out() -> None:
    assert Tail(2).choose(list(range(100, -1, -1))) == [100, 99, 98, 96, 88, 80, 64, 0]


def test_best_is_by_value_and_takes_the_older_of_equals() -> None:
    values = {1: 0.5, 2: 0.3, 3: 0.3, 4: math.nan}
    assert Best(lambda: values).choose([9, 4, 3, 2, 1]) == [9, 2]
    assert Best(lambda: values, 2, "max").choose([9, 4, 3, 2, 1]) == [9, 2, 1]
    values[9] = 0.1  # known later
    assert Best(lambda: values).choose([9, 4, 3, 2, 1]) == [9]


def test_unions_are_flat_and_say_why() -> None:
    keep = Latest(2) | EveryN(10) | Tail()
    assert keep == Union((Latest(2), EveryN(10), Tail(2)))
    assert str(keep) == "latest:2,every:10,tail:2"
    assert parse(str(keep)) == keep
    why = reasons(keep, [25, 24, 20, 19, 10])
    assert why == {25: ("newest", "latest:2", "every:10", "tail:2"), 24: ("latest:2", "tail:2"),
                   20: ("every:10", "tail:2"), 19: ("tail:2",), 10: ("every:10", "tail:2")}  # fmt: skip


@pytest.mark.parametrize("text", ["", "latest", "latest:", "latest:0", "latest:-1", "tail:1", "best:3", "every:1e3"])
def test_text_that_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="cannot be read"):
        parse(text)


@pytest.mark.parametrize("make", [lambda: Latest(0), lambda: EveryN(0), lambda: Tail(1), lambda: Best(dict, 0)])
def test_policies_that_keep_nothing_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"at least|from 2"):
        make()
