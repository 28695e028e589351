"""The optimum against 60-digit arithmetic over seventeen decades, and the special functions against scipy."""

import math

import mpmath as mp
import pytest
from scipy import special, stats

from elastic.economics.roots import (
    crossing,
    gamma_cdf,
    gamma_quantile,
    maximise,
    optimal_work_s,
    optimal_work_safe_save_s,
    upper_gamma,
)


def exact(mtbf, save):
    with mp.workdps(60):
        m, d = mp.mpf(mtbf), mp.mpf(save)
        return m * (1 + mp.lambertw(-(mp.e ** (-1 - d / m))).real)


def test_optimum_is_good_to_1e_12_from_1e_14_to_1e3():
    worst = 0.0
    for i in range(171):
        for mtbf in (10.0, 11_135.083, 3.1e7):
            save = 10 ** (-14 + i / 10) * mtbf
            want = exact(mtbf, save)
            worst = max(worst, float(abs(mp.mpf(optimal_work_s(mtbf, save)) / want - 1)))
    assert worst < 1e-12


@pytest.mark.parametrize("eps", [1e-300, 1e-60, 1e-20, 0.05, 0.999999, 1.0, 1.000001, 50.0, 800.0, 1e9])
def test_optimum_beyond_and_at_the_seams(eps):
    got = optimal_work_s(1.0, eps)
    assert 0 < got <= 1
    assert got == pytest.approx(float(exact(1.0, eps)), rel=1e-12)


@pytest.mark.parametrize("ratio", [1e-12, 1e-3, 0.5, 0.999, 1.0, 1.001, 10.0, 1e6])
def test_optimum_of_saves_that_cannot_be_struck(ratio):
    with mp.workdps(60):
        want = 1000 * (1 + mp.lambertw((mp.mpf(ratio) - 1) / mp.e).real)
    assert optimal_work_safe_save_s(1000.0, ratio * 7000, 7000.0) == pytest.approx(float(want), rel=1e-11)


@pytest.mark.parametrize("shape", [0.5, 1.0, 1.43, 3.5, 40.0, 2000.0])
def test_gamma_functions(shape):
    for p in (0.001, 0.025, 0.3, 0.5, 0.975, 0.9999):
        x = stats.gamma.ppf(p, shape)
        assert gamma_cdf(shape, x) == pytest.approx(p, rel=1e-10)
        assert gamma_quantile(shape, p) == pytest.approx(x, rel=1e-9)
    if shape < 100:
        for x in (1e-6, 0.3, shape, 4 * shape + 3):
            assert upper_gamma(shape, x) == pytest.approx(
                special.gammaincc(shape, x) * special.gamma(shape), rel=1e-9, abs=1e-300
            )


def test_searches():
    assert maximise(lambda x: -((math.log(x) - 3) ** 2), 1e-5, 1e9) == pytest.approx(math.exp(3), rel=1e-6)
    assert maximise(lambda x: x, 1.0, 7.0) == pytest.approx(7.0, rel=1e-6)
    assert crossing(lambda x: 5 - x, 1e-3, 1e6) == pytest.approx(5, rel=1e-12)
    assert crossing(lambda x: -1.0, 2.0, 3.0) == 2.0
    assert crossing(lambda x: 1.0, 2.0, 3.0) == 3.0
