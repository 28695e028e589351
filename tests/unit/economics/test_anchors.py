"""Figures that others published, reproduced; each with its source."""

import pytest

from elastic.economics import Costs, Job, Rates, goodput, recommend
from elastic.economics.advice import daly_s, young_s
from elastic.economics.posterior import node_rate, rate_of_job

HOUR, DAY = 3600.0, 86_400.0
LLAMA3_MTBF_S = 54 * DAY / 419


@pytest.mark.parametrize(("mtbf_s", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (900.0, 9.1)])
def test_daly_2006_figures_3_to_5(mtbf_s, minutes):
    """Daly, FGCS 22 (2006), captions of Figures 3-5: save 5 min, restart 10 min; higher-order rule."""
    assert daly_s(mtbf_s, 300.0) / 60 == pytest.approx(minutes, abs=0.5 if minutes > 10 else 0.05)
    plan = recommend(Rates(mtbf_s=mtbf_s), Costs(stall_s=300.0, load_s=600.0))
    assert plan.interval_s / 60 == pytest.approx(minutes, rel=0.02)


def test_young_1974_is_the_leading_term():
    """Young, CACM 17 (1974): sqrt(2 x save x MTBF); 4.9 % too long at a save of MTBF/100."""
    plan = recommend(Rates(mtbf_s=1e4), Costs(stall_s=100.0))
    assert young_s(1e4, 100.0) / plan.interval_s - 1 == pytest.approx(0.049, abs=0.001)
    assert daly_s(1e4, 100.0) / plan.interval_s - 1 == pytest.approx(0.0, abs=2e-5)
    assert (daly_s(600, 1200), daly_s(600, 1199.999)) == pytest.approx((600, 0.889 * 600), rel=1e-3)


@pytest.mark.parametrize(("gpus", "hours"), [(16_384, 1.8), (131_072, 0.23)])
def test_meta_2025_projected_mttf(gpus, hours):
    """Kokolis et al., HPCA 2025 (arXiv 2410.21680): RSC-1, 6.50 failures per 1,000 node-days."""
    known = rate_of_job(Rates(per_1000_node_days=6.5), gpus // 8)
    assert known.mtbf_s / HOUR == pytest.approx(hours, abs=0.05 if hours > 1 else 0.005)


@pytest.mark.parametrize(("minutes", "ettr"), [(60, 0.70), (5, 0.93)])
def test_meta_2025_ettr(minutes, ettr):
    """The same paper: 16,000 GPUs on RSC-1, restart 5 min, saves without stall: ETTR 0.70 hourly, 0.93 every 5 min."""
    rates = Rates(per_1000_node_days=6.5)
    assert goodput(rates, Costs(stall_s=0.0, load_s=300.0), Job(nodes=2000), minutes * 60.0) == pytest.approx(
        ettr, abs=0.0205
    )


def test_llama3_mtbf():
    """Llama 3 (arXiv 2407.21783), Table 5: 419 unexpected stops in 54 days on 16,384 GPUs: 3.09 h, 3.79/1000 nd."""
    assert pytest.approx(3.09, abs=0.005) == LLAMA3_MTBF_S / HOUR
    assert 1 / (2048 * node_rate(3.79)) / HOUR == pytest.approx(3.09, abs=0.005)
    seen = rate_of_job(Rates(failures=419, exposure_s=54 * DAY), 2048)
    assert seen.mtbf_s == pytest.approx(LLAMA3_MTBF_S, rel=2e-3)


def test_bloom_interval_was_good():
    """BLOOM-176B (bigscience chronicles): one GPU lost a week, 40 s a save, one every 3 h; 20 min restart assumed."""
    plan = recommend(Rates(mtbf_s=7 * DAY), Costs(stall_s=40.0, load_s=1200.0))
    assert plan.goodput - plan.goodput_at(3 * HOUR) < 0.0015
    assert plan.interval_s / HOUR == pytest.approx(1.92, abs=0.01)


def test_a_default_of_500_steps_hurts():
    """Saving every 500 steps of 10 s on 16k GPUs (MTBF 1.8 h, stall 5 s): 66 % against 96 %, restarts not counted."""
    rates, costs = Rates(mtbf_s=1.8 * HOUR), Costs(stall_s=5.0)
    assert goodput(rates, costs, Job(), 5000.0) == pytest.approx(0.66, abs=0.01)
    assert recommend(rates, costs).goodput == pytest.approx(0.96, abs=0.005)
