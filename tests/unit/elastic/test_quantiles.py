"""Quantiles that add up: within their error of the exact ones, whatever is merged in whatever order, and small."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.ledger.quantiles import BUCKETS, ERROR, Quantiles

times = st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=200)
shares = st.floats(0.01, 1.0)


def exact(values: list[float], share: float) -> float:
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1]


@given(times, shares)
def test_a_quantile_is_within_its_stated_error(values: list[float], share: float) -> None:
    summary = Quantiles(values)
    assert summary.n == len(values)
    found = summary.at(share)
    assert found == pytest.approx(exact(values, share), rel=summary.error * 1.001 + 1e-9)


@given(times, times, shares)
def test_merging_is_counting_together(a: list[float], b: list[float], share: float) -> None:
    both, other = Quantiles(a), Quantiles(b)
    other.merge(Quantiles(a))
    both.merge(Quantiles(b))
    assert str(both) == str(other)
    assert both.n == len(a) + len(b)
    assert both.at(share) == pytest.approx(exact(a + b, share), rel=both.error * 1.001 + 1e-9)


@given(times)
def test_its_text_brings_it_back_and_stays_small(values: list[float]) -> None:
    summary = Quantiles(values)
    text = str(summary)
    assert len(text) <= 8 * BUCKETS
    assert str(Quantiles.parse(text)) == text
    assert Quantiles.parse(text).counts() == summary.counts()


def test_usual_step_times_are_told_to_half_a_percent() -> None:
    summary = Quantiles(1.0 + 0.2 * math.sin(n) for n in range(5000))
    assert summary.error == pytest.approx(ERROR, rel=1e-6)
    assert len(str(summary)) < 400


def test_a_narrow_one_and_a_wide_one_become_what_counting_all_gives() -> None:
    narrow = [1.0 + 0.001 * n for n in range(50)]
    wide = [1e-4 * 1.3**n for n in range(80)]
    together = Quantiles([*wide, *narrow])
    for first, second in ((narrow, wide), (wide, narrow)):
        merged = Quantiles(first)
        merged.merge(Quantiles(second))
        assert str(merged) == str(together)
    assert together.error > 2 * ERROR


def test_nothing_is_an_answer_too() -> None:
    assert Quantiles().at(0.5) is None
    assert Quantiles.parse(str(Quantiles())).n == 0
    assert Quantiles([0.0, -1.0]).n == 2


@pytest.mark.parametrize("text", ["", "x;1", "0;1:0", "0;a", "99;1", "0;9999999999"])
def test_what_is_no_distribution_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Quantiles.parse(text)
