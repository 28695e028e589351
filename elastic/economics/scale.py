"""How goodput falls with the number of nodes: the next node's worth, the sensible size, the reliability wall.

Failures grow with the nodes, so each further node adds less than itself, and past the *wall* it takes away. With save
cost ∝ N^η, at the optimal interval, d ln(N·G)/d ln N = 1 − λR − λ(1−s)L − λD/(1+λD) − (δ/w)(1+η) for one tier;
without restart cost the wall lies at λδ = 0.797. Here the derivative is taken of the exact optimum of any model, and
parallel efficiency measured at several sizes multiplies in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from elastic.economics.inputs import BadInput, Costs, Job, Rates, positive
from elastic.economics.interval import build_model
from elastic.economics.posterior import rate_of_job
from elastic.economics.roots import crossing

_STEP = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Speed of a step relative to perfect scaling, from step times measured at several node counts.

    Between measurements speed is interpolated on a log-log line; beyond the largest the last slope goes on, at most
    until one more node no longer helps. Without measurements it is 1 everywhere: failures alone are counted.
    """

    points: tuple[tuple[float, float], ...] = ()
    """(nodes, ln of samples per second per node relative to the smallest size), by nodes."""

    @classmethod
    def measured(cls, step_s: Mapping[float, float], batch: Mapping[float, float] | None = None) -> Efficiency:
        """From step times by node count; ``batch`` gives samples per step by node count where it differs."""
        for nodes, seconds in step_s.items():
            positive("measured", nodes, "a node count")
            positive("measured", seconds, f"the step time at {nodes} nodes in seconds")
        if len(step_s) < 2:
            raise BadInput("measured", "parallel efficiency needs step times at two sizes or more")
        speed = {n: (batch[n] if batch else 1.0) / (s * n) for n, s in sorted(step_s.items())}
        base = next(iter(speed.values()))
        return cls(points=tuple((float(n), math.log(v / base)) for n, v in speed.items()))

    def __call__(self, nodes: float) -> float:
        """Efficiency at a size, 1 at the smallest one measured."""
        if not self.points:
            return 1.0
        if nodes <= self.points[0][0]:
            return 1.0
        for (n0, e0), (n1, e1) in zip(self.points, self.points[1:], strict=False):
            if nodes <= n1 or n1 == self.points[-1][0]:
                slope = (e1 - e0) / math.log(n1 / n0)
                if nodes > n1:
                    slope = max(-1.0, slope)
                return (
                    math.exp(e0 + slope * math.log(nodes / n0))
                    if nodes <= n1
                    else math.exp(e1 + slope * math.log(nodes / n1))
                )
        return 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalePoint:
    """One size of the job."""

    nodes: float
    mtbf_s: float
    interval_s: float
    goodput: float
    efficiency: float
    useful_nodes: float
    """Nodes' worth of training: nodes × goodput × parallel efficiency."""
    marginal: float
    """What the next node adds to that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """The same job at any size: failures by node plus a constant part, save costs growing by a power of the size."""

    rates: Rates
    costs: Costs
    job: Job
    stall_exponent: float = 0.0
    """η: the stall is ∝ N^η. 0: fixed state over fixed storage; −1: each node writes its share at its own speed."""
    persist_exponent: float = 0.0
    efficiency: Efficiency = Efficiency()

    def __post_init__(self) -> None:
        if self.job.nodes is None:
            raise BadInput(
                "nodes", "a scale curve starts from a size: give the number of nodes that rate and costs belong to"
            )
        for field in ("stall_exponent", "persist_exponent"):
            if not math.isfinite(getattr(self, field)):
                raise BadInput(
                    field,
                    f"{field} is {getattr(self, field)!r}: give a finite exponent, 0 for costs that do not change",
                )

    @property
    def _reference(self) -> int:
        assert self.job.nodes is not None
        return self.job.nodes

    def mtbf_s(self, nodes: float) -> float:
        """MTBF of the job on that many nodes."""
        constant = 1 / self.rates.job_mtbf_s if self.rates.job_mtbf_s else 0.0
        total = 1 / rate_of_job(self.rates, self.job.nodes).mtbf_s
        return 1 / (max(total - constant, 0.0) * nodes / self._reference + constant)

    def costs_at(self, nodes: float) -> Costs:
        """Save costs on that many nodes."""
        ratio = nodes / self._reference
        stall, persist = ratio**self.stall_exponent, ratio**self.persist_exponent
        tiers = tuple(replace(t, stall_s=t.stall_s * stall, persist_s=t.persist_s * persist) for t in self.costs.tiers)
        return replace(
            self.costs, stall_s=self.costs.stall_s * stall, persist_s=self.costs.persist_s * persist, tiers=tiers
        )

    def goodput(self, nodes: float) -> tuple[float, float]:
        """(goodput, interval in seconds) at the best interval."""
        return _solved(self, nodes)

    def useful_nodes(self, nodes: float) -> float:
        """nodes × goodput × parallel efficiency."""
        return nodes * self.goodput(nodes)[0] * self.efficiency(nodes)

    def marginal(self, nodes: float) -> float:
        """What one more node adds, in nodes."""
        h = nodes * _STEP
        return (self.useful_nodes(nodes + h) - self.useful_nodes(nodes - h)) / (2 * h)

    def at(self, nodes: float) -> ScalePoint:
        """Everything about one size."""
        positive("nodes", nodes, "a number of nodes")
        gain, interval = self.goodput(nodes)
        return ScalePoint(
            nodes=nodes,
            mtbf_s=self.mtbf_s(nodes),
            interval_s=interval,
            goodput=gain,
            efficiency=self.efficiency(nodes),
            useful_nodes=self.useful_nodes(nodes),
            marginal=self.marginal(nodes),
        )

    def size_where(self, marginal: float) -> float | None:
        """The largest size whose next node still adds ``marginal``; None when that is beyond 1e12 nodes."""
        low, high = 1e-3, 1.0
        while self.marginal(high) > marginal:
            low, high = high, high * 4
            if high > 1e12:
                return None
        return crossing(lambda n: self.marginal(n) - marginal, low, high)

    @property
    def wall(self) -> float | None:
        """The size beyond which a further node takes away more than it adds."""
        return self.size_where(0.0)


@lru_cache(maxsize=4096)  # the table, both sizes sought and their derivatives meet at the same sizes
def _solved(scaling: Scaling, nodes: float) -> tuple[float, float]:
    job = scaling.job
    model = build_model(scaling.rates, scaling.costs_at(nodes), scaling.mtbf_s(nodes))
    setting = model.best(job.min_interval_s or 0.0, job.max_interval_s or math.inf)
    return model.goodput(setting), setting.work_s


def scale_curve(
    rates: Rates,
    costs: Costs,
    job: Job,
    nodes: Iterable[float],
    *,
    stall_exponent: float = 0.0,
    persist_exponent: float = 0.0,
    efficiency: Efficiency = Efficiency(),
) -> tuple[ScalePoint, ...]:
    """Goodput, best interval and the next node's worth at each size; rate and costs are those of ``job.nodes``."""
    scaling = Scaling(
        rates=rates,
        costs=costs,
        job=job,
        stall_exponent=stall_exponent,
        persist_exponent=persist_exponent,
        efficiency=efficiency,
    )
    return tuple(scaling.at(n) for n in nodes)
