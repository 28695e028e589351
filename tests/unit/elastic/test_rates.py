"""Rates, step times and the slowest rank, of jobs whose numbers are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.ledger.events import Steps
from elastic.ledger.goodput import Account, account
from elastic.ledger.rates import Rates, mfu, rates, slowest, steps_kept
from tests.unit.elastic.ledgers import Job, Written


def both(**changes: Any) -> tuple[Account, Rates, Written]:
    written = Written(Job(**changes))
    found = account(written.events)
    return found, rates(found), written


@pytest.mark.parametrize("kills", [(), ((33, 1), (61, 0), (77, 1))])
def test_tokens_are_summed_over_ranks_and_those_trained_twice_count_once(kills: Any) -> None:
    found, got, written = both(kills=kills)
    tokens = got.counted["tokens"]
    assert tokens.per_step == 2000
    assert tokens.useful == 200_000
    assert steps_kept(found) == 100
    assert tokens.per_s == pytest.approx(200_000 / written.wall, rel=1e-3)
    assert "samples" not in got.counted


def test_the_speed_is_what_a_stopwatch_says() -> None:
    """Of steps as they follow each other: the first one's warm-up is in the mean, not in the median."""
    _, got, written = both(steps=400, jitter=0.3)
    times = sorted(written.step_times)
    for share in (0.5, 0.95, 0.99):
        assert got.times.at(share) == pytest.approx(times[int(share * len(times)) - 1], rel=0.01)
    assert got.step_s == pytest.approx(sum(times) / len(times), rel=0.01)
    assert got.counted["tokens"].speed == pytest.approx(2000 / (sum(times) / len(times)), rel=0.01)


def test_mfu_is_flops_over_time_and_peak() -> None:
    found, got, written = both()
    assert got.step_s is not None
    answer = mfu(found, got, flops_per_step=1e12, flops_per_token=None, peak_flops=1e13)
    assert answer == (
        pytest.approx(1e12 / got.step_s / 2e13),
        pytest.approx(100 * 1e12 / written.wall / 2e13, rel=1e-3),
    )
    per_token = mfu(found, got, flops_per_step=None, flops_per_token=5e8, peak_flops=1e13)
    assert per_token == pytest.approx(answer)
    assert mfu(found, both(tokens=0.0)[1], flops_per_step=None, flops_per_token=5e8, peak_flops=1e13) is None


def test_a_rank_that_computes_longer_is_found_by_its_own_time() -> None:
    """Step times are the same on all: the one that does not wait is the one that is waited for."""
    _, got, _ = both(world=4, cpu=(0.3, 0.31, 0.45, 0.3))
    assert got.slowest is not None
    assert (got.slowest.rank, got.slowest.cause, got.slowest.waits_least) == (2, "compute", True)
    assert got.slowest.excess_s == pytest.approx(0.15, abs=0.01)
    assert [r.times.at(0.5) for r in got.ranks] == [got.ranks[0].times.at(0.5)] * 4


def test_a_rank_that_waits_for_its_data_is_found_too() -> None:
    _, got, _ = both(world=4, cpu=(0.3, 0.3, 0.3, 0.3), slow_data={1: 0.2})
    assert got.slowest is not None
    assert (got.slowest.rank, got.slowest.cause) == (1, "data")


def test_among_equals_none_is_the_slowest() -> None:
    assert both(world=4, cpu=(0.3, 0.31, 0.29, 0.3))[1].slowest is None
    assert both(world=4)[1].slowest is None  # nobody told of its CPU time: not known
    assert slowest(both(world=1, cpu=(0.3,))[1].ranks) is None


def test_energy_and_memory_are_told_where_they_were_read() -> None:
    written = Written(Job())
    got = rates(account(written.events))
    assert got.energy_j is None
    assert got.ranks[1].peak_rss_bytes == 10**9 + 1
    assert got.ranks[1].peak_bytes is None
    assert not got.device
    read = [replace(e, data=replace(e.data, energy_j=5.0)) if isinstance(e.data, Steps) and e.rank == 0 else e
            for e in written.events]  # fmt: skip
    rows = sum(isinstance(e.data, Steps) and e.rank == 0 for e in read)
    assert rates(account(read)).energy_j == pytest.approx(5.0 * rows)


def test_a_distribution_that_cannot_be_read_is_left_out() -> None:
    events = Written(Job()).events
    spoilt = [replace(e, data=replace(e.data, times="?")) if isinstance(e.data, Steps) else e for e in events]
    got = rates(account(spoilt))
    assert got.times.n == 0
    assert got.step_s is not None
