"""What must hold for every input: order, limits, invariance, and shares that add up."""

import math
from dataclasses import astuple, replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from elastic.economics import Costs, Job, Rates, Tier, recommend
from elastic.economics.advice import flat_region, levers, rivals, total_time, what_reaches
from elastic.economics.interval import build_model
from elastic.economics.models import Setting, SingleTier
from elastic.economics.renewal import Renewal
from elastic.economics.roots import optimal_work_s

SLOW_MACHINE = [HealthCheck.too_slow]
positive = st.floats(-6, 8).map(lambda x: 10.0**x)
seconds = st.one_of(st.just(0.0), st.floats(-3, 4).map(lambda x: 10.0**x))
shares = st.floats(0, 0.95)
few = settings(max_examples=60, deadline=None, suppress_health_check=SLOW_MACHINE)


@st.composite
def single_tiers(draw):
    return SingleTier(
        mtbf_s=draw(st.floats(1, 6).map(lambda x: 10.0**x)),
        stall_s=draw(st.floats(-3, 4).map(lambda x: 10.0**x)),
        persist_s=draw(seconds),
        slowdown=draw(shares),
        detect_s=draw(seconds),
        reschedule_s=draw(seconds),
        recovery_s=draw(seconds),
        warned=draw(shares),
        notice_save_s=draw(seconds),
        lazy=draw(st.booleans()),
        overlapping=draw(st.booleans()),
        strike_save=draw(st.booleans()),
        strike_recovery=draw(st.booleans()),
    )


@few
@given(positive, positive)
def test_optimum_lies_between_zero_and_mtbf_and_grows_with_both(mtbf, save):
    at = optimal_work_s(mtbf, save)
    assert 0 < at <= mtbf
    assert optimal_work_s(mtbf, save * 1.01) >= at
    assert optimal_work_s(mtbf * 1.01, save) >= at


@few
@given(positive, positive, st.floats(1e-3, 1e3))
def test_scaling_all_times_scales_the_optimum(mtbf, save, factor):
    assert optimal_work_s(mtbf * factor, save * factor) == pytest.approx(factor * optimal_work_s(mtbf, save), rel=1e-11)


@settings(max_examples=200, deadline=None, suppress_health_check=SLOW_MACHINE)
@given(single_tiers(), st.floats(-3, 3))
def test_shares_are_shares_at_any_interval(model, away):
    best = model.best(0.0, math.inf)
    assert 0 < best.work_s < math.inf
    setting = Setting(best.work_s * 10**away)
    for at in (best, setting):
        split = model.split(at)
        assert all(0 <= share <= 1 + 1e-12 for share in astuple(split)), split
        assert sum(astuple(split)) == pytest.approx(1, abs=1e-9)
        assert split.useful == pytest.approx(model.goodput(at), abs=1e-12)
        assert model.lost_per_failure_s(at) >= 0
        assert model.lost_per_failure_s(at, 0.95) >= 0


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW_MACHINE)
@given(single_tiers(), st.floats(-2, 2))
def test_nothing_beats_the_optimum(model, away):
    best = model.best(0.0, math.inf)
    other = Setting(max(best.work_s * 10**away, model.floor_s))
    assert model.goodput(other) <= model.goodput(best) * (1 + 1e-9) + 1e-15


@few
@given(single_tiers(), st.floats(0.001, 0.99))
def test_waiting_for_the_last_upload_is_never_better_below_the_mtbf(model, share):
    model = replace(model, overlapping=False, warned=0.0, persist_s=share * model.mtbf_s)
    floor = Setting(model.floor_s)
    assert model.goodput(Setting(model.floor_s * 0.7)) <= model.goodput(floor) * (1 + 1e-12)


@few
@given(positive, positive, seconds, seconds, seconds)
def test_dead_time_recovery_and_latency_leave_the_optimum(mtbf, stall, dead, recovery, persist):
    bare = SingleTier(mtbf_s=mtbf, stall_s=stall).best(0, math.inf)
    full = SingleTier(
        mtbf_s=mtbf, stall_s=stall, reschedule_s=dead, recovery_s=recovery, persist_s=persist, overlapping=True
    )
    assert full.best(0, math.inf).work_s == bare.work_s


@few
@given(positive, positive)
def test_no_notice_is_the_blocking_model(mtbf, stall):
    assume(1e-6 < stall / mtbf < 5)
    model = SingleTier(mtbf_s=mtbf, stall_s=stall, warned=1e-12)
    assert model.best(0, math.inf).work_s == pytest.approx(optimal_work_s(mtbf, stall), rel=1e-3)
    assert model.goodput(Setting(stall)) == pytest.approx(
        SingleTier(mtbf_s=mtbf, stall_s=stall).goodput(Setting(stall)), rel=1e-9
    )


@settings(max_examples=20, deadline=None, suppress_health_check=SLOW_MACHINE)
@given(st.floats(2, 6).map(lambda x: 10.0**x), st.floats(0.001, 0.3))
def test_shape_one_is_exponential(mtbf, eps):
    weibull = Renewal(mtbf_s=mtbf, stall_s=mtbf * eps, recovery_s=5.0, shape=1.0)
    plain = SingleTier(mtbf_s=mtbf, stall_s=mtbf * eps, recovery_s=5.0, strike_recovery=False)
    best = plain.best(0, math.inf)
    assert weibull.goodput(best) == pytest.approx(plain.goodput(best), abs=1e-10)
    assert weibull.best(0, math.inf).work_s == pytest.approx(best.work_s, rel=1e-3)


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW_MACHINE)
@given(st.floats(3, 5).map(lambda x: 10.0**x), st.floats(0.1, 20), st.floats(1, 300), seconds)
def test_tiers_at_both_ends_of_survival(mtbf, fast, slow, recovery):
    def plan(survives):
        tier = Tier(name="fast", stall_s=fast, survives=survives)
        return recommend(Rates(mtbf_s=mtbf), Costs(stall_s=slow, load_s=recovery, tiers=(tier,)))

    never = plan(0.0)
    single = recommend(Rates(mtbf_s=mtbf), Costs(stall_s=slow + fast, load_s=recovery))
    assert never.parts == (1,)
    assert never.goodput == pytest.approx(single.goodput, abs=1e-9)
    assert never.interval_s == pytest.approx(single.interval_s, rel=1e-3)
    always = plan(1.0)
    alone = recommend(Rates(mtbf_s=mtbf), Costs(stall_s=fast, load_s=recovery))
    assert always.goodput == pytest.approx(alone.goodput, abs=1e-4)
    between = plan(0.8)
    assert never.goodput - 1e-9 <= between.goodput <= always.goodput + 1e-9


@settings(max_examples=20, deadline=None, suppress_health_check=SLOW_MACHINE)
@given(st.lists(st.floats(0.05, 0.5), min_size=3, max_size=3), st.floats(3, 5).map(lambda x: 10.0**x))
def test_no_neighbour_of_three_tiers_is_better_and_shares_add_up(weights, mtbf):
    total = sum(weights)
    tiers = (
        Tier(name="memory", stall_s=0.5, survives=weights[0] / total, load_s=20),
        Tier(name="disk", stall_s=4.0, survives=(weights[0] + weights[1]) / total, load_s=60),
    )
    plan = recommend(Rates(mtbf_s=mtbf), Costs(stall_s=60.0, load_s=300, detect_s=30, reschedule_s=60, tiers=tiers))
    assert sum(astuple(plan.split)) == pytest.approx(1, abs=1e-9)
    assert min(astuple(plan.split)) >= -1e-12
    for at in range(2):
        for step in (-1, 1):
            parts = list(plan.parts)
            parts[at] = max(1, parts[at] + step)
            assert plan.model.goodput(Setting(plan.interval_s, tuple(parts))) <= plan.goodput + 1e-12


@few
@given(st.floats(2, 6).map(lambda x: 10.0**x), st.floats(-3, 0), st.floats(0.1, 3000), st.integers(1, 60))
def test_whole_steps_never_beat_the_real_optimum(mtbf, eps, step, align):
    costs = Costs(stall_s=mtbf * 10**eps, load_s=10)
    free = recommend(Rates(mtbf_s=mtbf), costs)
    plan = recommend(Rates(mtbf_s=mtbf), costs, Job(step_s=step, align_steps=align))
    assert plan.steps % align == 0
    assert plan.interval_s == pytest.approx(plan.steps * step)
    assert plan.goodput <= free.goodput * (1 + 1e-12)
    for other in (plan.steps - align, plan.steps + align):
        assert other < 1 or plan.goodput >= plan.goodput_at(other * step) * (1 - 1e-12)


@few
@given(
    st.floats(3, 6).map(lambda x: 10.0**x),
    st.floats(0.1, 100),
    st.floats(0.1, 200),
    st.floats(0, 0.5),
    seconds,
    seconds,
)
def test_small_levers_follow_the_envelope_theorem(mtbf, stall, persist, slowdown, dead, recovery):
    """d ln G at the optimum: -1/w per s of stall, -s/w - (1-s)/M of latency, -1/M of recovery, -1/(M+D) dead."""
    costs = Costs(
        stall_s=stall, persist_s=persist, slowdown=slowdown, reschedule_s=dead, load_s=recovery, in_flight="many"
    )
    model = build_model(Rates(mtbf_s=mtbf), costs, mtbf)
    base, w, h = model.goodput(model.best(0, math.inf)), model.best(0, math.inf).work_s, 1e-5
    assume(base > 1e-3)

    def slope(**change):
        name, value = next(iter(change.items()))
        up = build_model(Rates(mtbf_s=mtbf), replace(costs, **{name: value + h}), mtbf)
        down = build_model(Rates(mtbf_s=mtbf), replace(costs, **{name: max(value - h, 0.0)}), mtbf)
        width = h + min(h, value)
        return math.log(up.goodput(up.best(0, math.inf)) / down.goodput(down.best(0, math.inf))) / width

    assert slope(stall_s=stall) == pytest.approx(-1 / w, rel=2e-3, abs=1e-9)
    assert slope(persist_s=persist) == pytest.approx(-slowdown / w - (1 - slowdown) / mtbf, rel=2e-3, abs=1e-9)
    assert slope(load_s=recovery) == pytest.approx(-1 / mtbf, rel=2e-3, abs=1e-9)
    assert slope(reschedule_s=dead) == pytest.approx(-1 / (mtbf + dead), rel=2e-3, abs=1e-9)


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW_MACHINE)
@given(st.floats(3, 6).map(lambda x: 10.0**x), st.floats(0.1, 100), seconds, seconds)
def test_advice_is_consistent_with_the_plan(mtbf, stall, persist, recovery):
    plan = recommend(
        Rates(mtbf_s=mtbf),
        Costs(stall_s=stall, persist_s=persist, load_s=recovery),
        Job(current_s=mtbf / 3, work_s=mtbf * 50),
    )
    low, high = flat_region(plan)
    assert low <= plan.interval_s <= high
    assert plan.goodput_at(high) >= plan.goodput - 0.00101
    assert all(rival.points >= -0.02 for rival in rivals(plan))
    gains = [lever.points for lever in levers(plan) if lever.name != "blocking"]
    assert gains == sorted(gains, reverse=True)
    target = min(0.999, plan.goodput + 0.3 * (1 - plan.goodput))
    for reach in what_reaches(plan, target):
        if reach.needed_s is not None and reach.field == "stall_s":
            better = recommend(Rates(mtbf_s=mtbf), replace(plan.costs, stall_s=reach.needed_s))
            assert better.goodput == pytest.approx(target, abs=1e-6)
    total = total_time(plan)
    assert total.p50_s <= total.p95_s
    assert total.mean_s >= plan.job.work_s


@settings(max_examples=40, deadline=None, suppress_health_check=SLOW_MACHINE)
@given(
    single_tiers(),
    st.sampled_from(["mtbf_s", "stall_s", "persist_s", "recovery_s", "detect_s"]),
    st.sampled_from([1e-30, 1e-9, 1e9, 1e30]),
)
def test_extreme_inputs_give_numbers(model, field, value):
    model = replace(model, **{field: value})
    best = model.best(0.0, math.inf)
    for at in (best, Setting(1.0), Setting(1e12)):
        assert 0 <= model.goodput(at) <= 1
        assert all(-1e-9 <= share <= 1 + 1e-9 for share in astuple(model.split(at)))
