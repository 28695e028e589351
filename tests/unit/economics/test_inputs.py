"""Bad input is answered by a sentence that says what to give; combinations are modelled or refused."""

import math
from dataclasses import replace

import pytest

from elastic.economics import BadInput, Costs, Job, Rates, Tier, recommend
from elastic.economics.fitting import Attempt, fit
from elastic.economics.interval import _expected_total
from elastic.economics.scale import Efficiency, Scaling

GOOD = (Rates(mtbf_s=3600.0), Costs(stall_s=10.0), Job())


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.nan, math.inf, -math.inf, True, "6h", None])
@pytest.mark.parametrize(
    ("make", "field"),
    [
        (Rates, "mtbf_s"),
        (Rates, "shape"),
        (Rates, "silent_mtbf_s"),
        (Costs, "stall_s"),
        (Job, "step_s"),
        (Job, "work_s"),
    ],
)
def test_numbers_that_cannot_be(make, field, value):
    if (value is None and make is not Costs) or (field == "stall_s" and value in (0, 0.0) and value is not False):
        return
    if field == "stall_s" and value is None:
        value = math.nan
    with pytest.raises(BadInput, match=r"give .*") as caught:
        make(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


@pytest.mark.parametrize(
    ("say", "make"),
    [
        ("belong together", lambda: Rates(failures=3)),
        ("belong together", lambda: Rates(exposure_s=3.0)),
        ("give one of them", lambda: Rates(mtbf_s=1.0, per_1000_node_days=1.0)),
        ("give one of them", lambda: Rates(shape=1.0, lognormal_sigma=1.0)),
        ("from 0 to below 1", lambda: Rates(notice_share=1.0)),
        ("counts alone", lambda: Rates(notice_share=0.5, notice_saved=3)),
        ("whole number", lambda: Rates(failures=1.5, exposure_s=3.0)),
        ("whole number", lambda: Job(nodes=0)),
        ("needs step_s", lambda: Job(align_steps=5)),
        ("swap them", lambda: Job(min_interval_s=5.0, max_interval_s=3.0)),
        ("slows nothing", lambda: Costs(stall_s=1.0, slowdown=0.1)),
        ("'eager' or 'next-save'", lambda: Costs(stall_s=1.0, commit="later")),
        (
            "sort them",
            lambda: Costs(
                stall_s=1.0, tiers=(Tier(name="a", stall_s=1, survives=0.9), Tier(name="b", stall_s=1, survives=0.8))
            ),
        ),
        ("from 0 to 1", lambda: Tier(name="a", stall_s=1.0, survives=1.1)),
        ("give mtbf_s, or failures and exposure_s", lambda: recommend(Rates(), Costs(stall_s=1.0))),
        ("number of nodes", lambda: recommend(Rates(per_1000_node_days=3.0), Costs(stall_s=1.0))),
        ("no best interval", lambda: recommend(GOOD[0], Costs(stall_s=0.0))),
        ("price of the machines", lambda: recommend(GOOD[0], Costs(stall_s=1.0, per_save_usd=2.0))),
        ("both silent_mtbf_s and verify_s", lambda: recommend(Rates(mtbf_s=9.0, silent_mtbf_s=9.0), GOOD[1])),
        ("not modelled", lambda: recommend(Rates(mtbf_s=9.0, shape=0.7, notice_share=0.3), GOOD[1])),
        (
            "not modelled",
            lambda: recommend(
                replace(GOOD[0], shape=0.7), Costs(stall_s=1.0, tiers=(Tier(name="a", stall_s=1.0, survives=0.5),))
            ),
        ),
        ("above zero", lambda: recommend(*GOOD).goodput_at(0.0)),
        ("starts from a size", lambda: Scaling(rates=GOOD[0], costs=GOOD[1], job=GOOD[2])),
        ("two sizes", lambda: Efficiency.measured({4: 1.0})),
        ("reached its first step", lambda: fit([Attempt(uptime_s=0.0, ended="failure")], stalls_s=[1.0])),
        ("no save was measured", lambda: fit([Attempt(uptime_s=9.0, ended="failure")])),
    ],
)
def test_sentences(say, make):
    with pytest.raises(BadInput, match=say):
        make()


def test_hopeless_jobs_are_answered_and_warned():
    plan = recommend(Rates(mtbf_s=600.0), Costs(stall_s=3000.0, load_s=3600.0))
    assert 0 < plan.goodput < 0.01
    assert 0 < plan.interval_s < 600.0
    assert any("save takes longer" in w for w in plan.warnings)
    assert any("restart takes longer" in w for w in plan.warnings)


def test_bounds_are_named():
    rates = Rates(mtbf_s=11_135.0)
    slow = Costs(stall_s=0.2, persist_s=900.0)
    assert recommend(rates, slow).bound == "persist"
    assert any("Persist-bound" in w for w in recommend(rates, slow).warnings)
    assert recommend(rates, slow, Job(step_s=70.0)).steps == 13
    assert recommend(rates, replace(slow, in_flight="many")).bound == "none"
    fast = Costs(stall_s=5.0)
    assert recommend(rates, fast, Job(min_interval_s=3600.0)).bound == "minimum"
    assert recommend(rates, fast, Job(max_interval_s=60.0)).interval_s == 60.0
    assert recommend(rates, fast, Job(max_interval_s=60.0)).bound == "maximum"
    assert recommend(rates, fast, Job(step_s=2000.0)).bound == "step"
    assert recommend(rates, fast, Job(step_s=300.0)).steps == 1
    assert recommend(rates, fast, Job(step_s=300.0)).bound == "none"
    assert recommend(rates, fast, Job(work_s=100.0)).bound == "work"


def test_a_finite_job_has_the_best_number_of_segments():
    for work in range(500, 20_000, 450):
        for final in (True, False):
            job = Job(work_s=float(work), final_save=final)
            plan = recommend(Rates(mtbf_s=3600.0), Costs(stall_s=150.0, load_s=60.0), job)
            totals = [_expected_total(plan.model, job, k) for k in range(1, 60)]
            assert plan.expected_total_s == min(totals)
            assert plan.segments == totals.index(min(totals)) + 1


def test_money_per_save_lengthens_the_interval():
    job = Job(nodes=100, usd_per_device_hour=2.5)
    free, paid = (recommend(GOOD[0], Costs(stall_s=10.0, per_save_usd=usd), job) for usd in (0.0, 5.0))
    as_time = recommend(GOOD[0], Costs(stall_s=10.0 + 5.0 / (800 * 2.5 / 3600)), job)
    assert paid.interval_s == pytest.approx(as_time.interval_s, rel=1e-12)
    assert paid.interval_s > free.interval_s


def test_posterior_sources():
    costs = Costs(stall_s=60.0)
    assumed = recommend(Rates(), costs, Job(nodes=2048))
    assert assumed.rate.source == "assumed"
    assert assumed.mtbf_s == pytest.approx(86_400e3 / (7 * 2048))
    assert any("assumed" in w for w in assumed.warnings)
    low, high = assumed.interval_range_s
    assert low < assumed.interval_s < high
    seen = recommend(Rates(failures=3, exposure_s=86_400.0), costs)
    assert seen.mtbf_s == pytest.approx(86_400 / 3.5)
    assert seen.goodput_range[0] < seen.goodput < seen.goodput_range[1]
    assert seen.rate.value_of_knowing == pytest.approx(0.035, abs=0.001)
    both = recommend(Rates(mtbf_s=11_135.0, failures=3, exposure_s=86_400.0, prior_failures=4.0), costs)
    assert both.mtbf_s == pytest.approx((4 * 11_135.0 + 86_400) / 7)
    sure = recommend(Rates(mtbf_s=11_135.0), costs)
    assert sure.goodput_range == (sure.goodput, sure.goodput)


def test_fit_counts_exposure_of_lives_that_did_not_fail():
    lives = [
        Attempt(uptime_s=3600.0, ended="failure"),
        Attempt(uptime_s=0.0, ended="failure"),
        Attempt(uptime_s=7200.0, ended="planned", notice_saved=True),
        Attempt(uptime_s=1800.0, ended="failure", notice_saved=True),
        Attempt(uptime_s=600.0, ended="failure", notice_saved=False),
        Attempt(uptime_s=900.0, ended="running"),
    ]
    found = fit(lives, stalls_s=[1.0, 3.0], loads_s=[50.0])
    assert (found.rates.failures, found.rates.exposure_s) == (3, 14_100.0)
    assert (found.rates.notice_saved, found.rates.notice_missed) == (1, 2)
    assert (found.costs.stall_s, found.costs.load_s) == (2.0, 50.0)
    assert not found.crash_loop
    assert fit([lives[0], *[lives[1]] * 3], stalls_s=[1.0]).crash_loop


def test_shape_of_measured_speed():
    speed = Efficiency.measured({8: 20.0, 16: 11.0, 32: 7.0})
    assert speed(4) == speed(8) == 1.0
    assert speed(16) == pytest.approx(10 / 11)
    assert speed(32) == pytest.approx(5 / 7)
    assert speed(64) == pytest.approx((5 / 7) / (10 / 11) * (5 / 7))
    assert Efficiency()(1e6) == 1.0
