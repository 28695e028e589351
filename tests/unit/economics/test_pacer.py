"""The pacer learns the right interval, follows a rate that changes, survives restarts and explains itself."""

import json
import math
from itertools import pairwise

import pytest

from elastic.economics import BadInput, Costs, Pacer, Rates, recommend
from tests.bench.pacer_regret import drift, regret


def train(pacer, steps, step_s=5.0, stall_s=3.0, persist_s=0.0):
    saves = []
    for n in range(steps):
        pacer.step(step_s)
        if pacer.due():
            pacer.saved(stall_s=stall_s, persist_s=persist_s)
            saves.append(n)
    return saves


def test_interval_becomes_that_of_the_measured_cost():
    pacer = Pacer(nodes=16, rates=Rates(mtbf_s=10_000.0, prior_failures=1e6), half_life_failures=1e9)
    saves = train(pacer, 2000)
    want = recommend(Rates(mtbf_s=10_000.0), Costs(stall_s=3.0)).interval_s
    assert pacer.interval_s == pytest.approx(want, rel=1e-3)
    assert (saves[-1] - saves[-2]) * 5.0 == pytest.approx(want, abs=2.5)


def test_first_save_comes_early_and_measures():
    pacer = Pacer(nodes=1)
    assert pacer.interval_s == 120.0
    first = pacer.pop_events()[0]
    assert first["event"] == "interval"
    assert first["assumed"] == ["stall_s", "mtbf_s"]
    assert first["mtbf_s"] == pytest.approx(86_400e3 / 7)
    train(pacer, 120)
    told = pacer.pop_events()
    assert [event["because"] for event in told] == ["save measured"]
    assert told[0]["interval_s"] > 3600
    assert told[0]["was_s"] == 120.0
    assert told[0]["assumed"] == ["mtbf_s"]
    json.dumps(told)


def test_never_due_while_an_upload_is_under_way():
    pacer = Pacer(nodes=512, costs=Costs(stall_s=1.0))
    while not pacer.due():
        pacer.step(5.0)
    pacer.began(stall_s=1.0)
    for _ in range(1000):
        pacer.step(5.0)
        assert not pacer.due()
    pacer.saved(stall_s=1.0, persist_s=5000.0)
    assert pacer.due()
    assert pacer.interval_s >= 5000.0 * 0.2
    pacer.began(stall_s=1.0)
    pacer.abandoned()
    pacer.step(1e6)
    assert pacer.due()


def test_uploads_bound_the_interval_and_their_slowdown_is_a_cost():
    quiet, slowed = Pacer(nodes=64), Pacer(nodes=64)
    for pacer, step in ((quiet, 5.0), (slowed, 6.0)):
        for _ in range(30):
            for _ in range(50):
                pacer.step(5.0)
            pacer.began(stall_s=1.0)
            for _ in range(20):
                pacer.step(step)
            pacer.saved(stall_s=1.0, persist_s=20 * step)
    assert quiet.excess_s == pytest.approx(0, abs=1e-9)
    assert slowed.excess_s == pytest.approx(20.0, rel=0.01)
    assert slowed.interval_s > 3 * quiet.interval_s


def test_failures_shorten_and_are_told_with_their_inputs():
    pacer = Pacer(nodes=16)
    train(pacer, 400)
    before = pacer.interval_s
    pacer.pop_events()
    pacer.resumed(failures=3, lost_s=600.0)
    assert pacer.interval_s < before / 1.5
    (told,) = pacer.pop_events()
    assert (told["because"], told["failures"], told["was_s"]) == ("3 failures", 3, before)
    assert pacer.work_s == 0.0
    pacer.resumed(failures=0)
    assert pacer.failures == 3


def test_crash_loop_teaches_no_rate():
    pacer = Pacer(nodes=16)
    a = pacer.a
    pacer.resumed(failures=0, early=1)
    pacer.resumed(failures=0, early=2)
    assert pacer.a == a
    assert [event["event"] for event in pacer.pop_events()][-1] == "crash_loop"


def test_a_crash_loop_ends_with_a_step():
    pacer = Pacer(nodes=16)
    pacer.resumed(failures=0, early=2)
    pacer.step(1.0)
    pacer.pop_events()
    pacer.resumed(failures=0, early=1)
    assert [event["event"] for event in pacer.pop_events()] == []


def test_an_assumed_rate_gives_way_to_what_is_seen():
    """A node on spot machines that fails every 6 h, where one in 143 days is assumed."""
    pacer = Pacer(nodes=1)
    best = recommend(Rates(mtbf_s=6 * 3600), Costs(stall_s=20.0)).interval_s
    off = []
    for _ in range(8):
        train(pacer, 720, step_s=30.0, stall_s=20.0)
        pacer.resumed(failures=1)
        off.append(pacer.interval_s / best)
    assert off[0] > 10
    assert 0.8 < off[-1] < 1.5
    assert off == sorted(off, reverse=True)


def test_uptime_after_the_save_counts_without_a_failure():
    pacer = Pacer(nodes=16)
    pacer.resumed(failures=0, lost_s=100.0)
    assert (pacer.exposure_s, pacer.failures) == (100.0, 0)


def test_notice_counts():
    warned, unwarned = Pacer(nodes=512), Pacer(nodes=512)
    for pacer, saved in ((warned, True), (unwarned, False)):
        train(pacer, 300)
        for _ in range(10):
            pacer.noticed(saved=saved)
    assert warned.interval_s > 2 * unwarned.interval_s
    assert warned.fits(30.0)
    assert not warned.fits(1.0)


def test_state_survives_as_plain_json():
    pacer = Pacer(nodes=16)
    train(pacer, 3000, persist_s=30.0)
    pacer.resumed(failures=2)
    state = json.loads(json.dumps(pacer.state_dict()))
    other = Pacer(nodes=16)
    other.load_state_dict(state)
    assert other.state_dict() == pacer.state_dict()
    assert train(other, 500) == train(pacer, 500)
    for bad in (
        {},
        {**state, "version": 2},
        {**state, "a": -1.0},
        {**state, "b_s": None},
        {**state, "stall_s": float("nan")},
    ):
        with pytest.raises(BadInput):
            Pacer().load_state_dict(bad)


def test_limits_and_freeze_hold():
    pacer = Pacer(nodes=16, min_interval_s=50.0, max_interval_s=70.0)
    saves = train(pacer, 1000)
    assert {b - a for a, b in pairwise(saves)} <= {10, 11, 12, 13, 14}
    frozen = Pacer(nodes=16)
    frozen.freeze()
    train(frozen, 500)
    frozen.resumed(failures=9)
    assert frozen.interval_s == 120.0
    again = Pacer(nodes=16)
    again.load_state_dict(frozen.state_dict())
    again.resumed(failures=9)
    assert again.interval_s == 120.0


def test_impossible_values_are_refused():
    for call in (
        lambda p: p.step(-1.0),
        lambda p: p.saved(stall_s=float("nan")),
        lambda p: p.resumed(failures=-1),
        lambda p: p.began(float("inf")),
    ):
        with pytest.raises(BadInput):
            call(Pacer())


@pytest.mark.parametrize("wrong", [0.25, 4.0])
def test_regret_against_the_oracle(wrong):
    """A prior wrong by 4 either way, worth one failure, costs little after a day, next to nothing after two weeks."""
    day, three, fortnight = regret(wrong, days=(1, 3, 14), seeds=16)
    assert 0 <= day <= 1.0
    assert 0 <= three <= 0.5
    assert 0 <= fortnight <= 0.15


def test_a_rate_that_jumps_is_followed():
    assert drift(half_life=1e9, days=28, seeds=3) - drift(half_life=15.0, days=28, seeds=3) >= 0.5


def test_a_clock_that_jumps_far_leaves_an_answer():
    pacer = Pacer(nodes=4)
    for seconds in (1.0, 1e12, 0.0, 3.0):
        pacer.step(seconds)
    pacer.saved(stall_s=5.0)
    assert pacer.a > 0
    assert 0 < pacer.interval_s < math.inf
