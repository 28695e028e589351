"""The formulas against the simulator, which knows the rules and no formula. Fixed seeds; a longer run is in bench."""

import math

import pytest

from elastic.economics import BadInput, Costs, Job, Rates, recommend
from elastic.economics.advice import total_time
from elastic.economics.models import Setting
from elastic.economics.simulate import play, simulate, simulate_totals
from elastic.economics.tiers import Level, Tiered
from tests.bench.interval_simulation import MODELS, agreement, argmax_over_optimum


def test_every_model_agrees_at_half_best_and_double():
    zs = [z for name in MODELS for _, z in agreement(name, failures=10_000, seed=5)]
    assert len(zs) == 3 * len(MODELS) >= 66
    assert max(map(abs, zs)) < 4
    assert 0.8 < math.sqrt(sum(z * z for z in zs) / len(zs)) < 1.2


@pytest.mark.parametrize("name", ["blocking", "save cannot be struck", "asynchronous", "lazy commit", "weibull 0.7"])
def test_simulated_optimum_is_where_the_formula_says(name):
    assert argmax_over_optimum(name, failures=150_000, seed=3) == pytest.approx(1, abs=0.05)


def test_the_simulator_sees_a_wrong_formula():
    model = MODELS["asynchronous"]
    best = model.best(0.0, math.inf)
    wrong = Setting(best.work_s * 1.0)
    assert abs(play(model, best, 200_000, 1).z(model.goodput(wrong) - 0.002)) > 4


def test_background_tier_skips_saves_that_would_overlap():
    fast, slow = Level(stall_s=2, share=0.8, recovery_s=60), Level(stall_s=0, share=0.2, recovery_s=600, persist_s=600)
    model = Tiered(mtbf_s=11_135.0, levels=(fast, slow), reschedule_s=120)
    hasty, kept_up = Setting(100.0, (2,)), Setting(100.0, (6,))
    assert model.goodput(hasty) == model.goodput(kept_up)
    assert model.split(hasty) == model.split(kept_up)
    assert play(model, hasty, 30_000, 4).goodput == pytest.approx(model.goodput(hasty), abs=1.5e-3)


@pytest.mark.parametrize(("mtbf", "stall"), [(7200.0, 20.0), (1800.0, 200.0)])
def test_total_time_of_a_job(mtbf, stall):
    costs = Costs(stall_s=stall, reschedule_s=60.0, load_s=200.0)
    plan = recommend(Rates(mtbf_s=mtbf), costs, Job(work_s=40 * 3600.0))
    total = total_time(plan)
    runs = simulate_totals(plan, plan.job.work_s, runs=4000, seed=2)
    assert total.mean_s == pytest.approx(runs.mean(), rel=0.005)
    assert total.p50_s == pytest.approx(sorted(runs)[2000], rel=0.01)
    assert total.p95_s - total.p50_s == pytest.approx(sorted(runs)[3800] - sorted(runs)[2000], rel=0.08)


def test_too_little_to_learn_from_is_refused():
    plan = recommend(Rates(mtbf_s=7200.0), Costs(stall_s=1e-6))
    with pytest.raises(BadInput, match="at least 100"):
        simulate(plan, failures=3)
    with pytest.raises(BadInput, match="thousands of saves"):
        simulate(plan, interval_s=1e-3, failures=1000)
