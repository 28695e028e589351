"""What n failures in so much up-time say about the failure rate, and what is still unknown.

With up-time B (the running attempt included, which is how censoring enters) the rate is
λ | data ~ Gamma(a₀ + n, b₀ + B); Jeffreys' prior is a₀ = ½, b₀ = 0. Waste is linear in λ to first order, so the number
to plug in is the mean *rate*, MTBF = b/a, not the mean MTBF b/(a−1): the former is within 2e-6 of the exact
optimum of expected goodput, the latter costs 0.08 points after three failures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from elastic.economics.inputs import (
    DAY_S,
    NODE_DAYS,
    PRIOR_FAILURES,
    PRIOR_PER_1000_NODE_DAYS,
    BadInput,
    Rates,
)
from elastic.economics.roots import gamma_quantile, maximise


@dataclass(frozen=True, slots=True)
class Posterior:
    """λ ~ Gamma(``a``, rate ``b_s``), in failures per second of up-time."""

    a: float
    b_s: float
    """Exposure in seconds, the prior's part included."""
    source: Literal["given", "observed", "assumed", "assumed+observed", "given+observed"]
    known: bool = False
    """The rate was given without saying how many failures it is worth: no uncertainty is claimed."""

    @property
    def mtbf_s(self) -> float:
        """1 / mean rate: the MTBF to plan with."""
        return self.b_s / self.a

    def mtbf_range_s(self, coverage: float = 0.95) -> tuple[float, float]:
        """Equal-tailed credible interval of the MTBF; a rate given as known returns itself twice."""
        if self.known:
            return self.mtbf_s, self.mtbf_s
        tail = (1 - coverage) / 2
        return self.b_s / gamma_quantile(self.a, 1 - tail), self.b_s / gamma_quantile(self.a, tail)

    @property
    def value_of_knowing(self) -> float:
        """Share of save-and-rework waste that knowing the MTBF would avoid: 1 − Γ(a+½)/(Γ(a)√a), about 1/(8a)."""
        return 1 - math.exp(math.lgamma(self.a + 0.5) - math.lgamma(self.a)) / math.sqrt(self.a)

    def expected(self, f: Callable[[float], float]) -> float:
        """E[f(λ)]: the trapezoid rule over log λ, which converges exponentially here."""
        low = max(math.log(1e-17) / self.a, -300.0)
        high = math.log(self.a + 45 + 10 * math.sqrt(self.a))
        low = min(low, high - 8) if self.a < 20 else math.log(self.a) - 10 / math.sqrt(self.a)
        h = min(0.15, 0.4 / math.sqrt(self.a))
        steps = math.ceil((high - low) / h)
        scale = math.lgamma(self.a)
        total = weight = 0.0
        for i in range(steps + 1):
            u = low + i * h
            p = math.exp(self.a * u - math.exp(u) - scale)
            total += p * f(math.exp(u) / self.b_s)
            weight += p
        return total / weight

    def best_work_s(self, goodput: Callable[[float, float], float], low_s: float, high_s: float) -> float:
        """The interval that maximises E[goodput(interval, rate)]. Not E[time], which diverges for long intervals."""
        return maximise(lambda w: self.expected(lambda rate: goodput(w, rate)), low_s, high_s, tol=1e-6)


def node_rate(per_1000_node_days: float) -> float:
    """Failures per node and second."""
    return per_1000_node_days / (NODE_DAYS * DAY_S)


def rate_of_job(rates: Rates, nodes: int | None) -> Posterior:
    """What is known of the job's failure rate from what was given, seen or has to be assumed.

    Raises :class:`BadInput` when neither a rate nor enough to derive one is there.
    """
    stated = _stated(rates, nodes)
    if rates.failures is None or rates.exposure_s is None:
        if stated is not None:
            a = rates.prior_failures or 1.0
            return Posterior(a, a / stated, "given", known=rates.prior_failures is None)
        if nodes is None:
            raise BadInput(
                "mtbf_s",
                "no failure rate: give mtbf_s, or failures and exposure_s (those seen, and in how much up-time), "
                "or the number of nodes",
            )
        rate = nodes * node_rate(PRIOR_PER_1000_NODE_DAYS)
        rate += 1 / rates.job_mtbf_s if rates.job_mtbf_s else 0.0
        a = rates.prior_failures or PRIOR_FAILURES
        return Posterior(a, a / rate, "assumed")
    n, seen = rates.failures, rates.exposure_s
    if stated is not None:
        a = rates.prior_failures or PRIOR_FAILURES
        return Posterior(a + n, a / stated + seen, "given+observed")
    if nodes is not None and rates.prior_failures is not None:
        prior = nodes * node_rate(PRIOR_PER_1000_NODE_DAYS)
        return Posterior(rates.prior_failures + n, rates.prior_failures / prior + seen, "assumed+observed")
    return Posterior(0.5 + n, seen, "observed")


def _stated(rates: Rates, nodes: int | None) -> float | None:
    rate = 1 / rates.mtbf_s if rates.mtbf_s is not None else None
    if rates.per_1000_node_days is not None:
        if nodes is None:
            raise BadInput("nodes", "per_1000_node_days is a rate per node: give the number of nodes")
        rate = nodes * node_rate(rates.per_1000_node_days)
    if rates.job_mtbf_s is not None and rate is not None:
        rate += 1 / rates.job_mtbf_s
    elif rates.job_mtbf_s is not None and nodes is None:
        rate = 1 / rates.job_mtbf_s
    return rate


def effective_cost_s(samples: Iterable[float], mtbf_s: float) -> float:
    """The constant that acts like a random cost: −M·ln E[e^(−X/M)], at most the mean (Jensen)."""
    seen = list(samples)
    return -mtbf_s * math.log(sum(math.exp(-x / mtbf_s) for x in seen) / len(seen))
