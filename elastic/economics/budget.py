"""From the model to train back to machines: operations, days, money, the bandwidth that saving needs, people's time.

A dense transformer takes 6 operations per parameter and token (Kaplan et al. 2020, eq. 2.2; attention over long
contexts and recomputation not counted). Utilisation (MFU) is that of undisturbed training: goodput is applied here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic.economics.advice import storage_limits
from elastic.economics.inputs import DAY_S, BadInput, positive, share
from elastic.economics.interval import recommend
from elastic.economics.scale import Scaling

BYTES_PER_PARAMETER = 14.0
"""bf16 weights (2) + fp32 master copy (4) + two fp32 Adam moments (8): what a checkpoint of mixed precision holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How much there is to compute, and how fast a device does it."""

    parameters: float
    tokens: float
    peak_flops: float
    """Operations per second of one device at the precision used."""
    mfu: float
    bytes_per_parameter: float = BYTES_PER_PARAMETER

    def __post_init__(self) -> None:
        for name in ("parameters", "tokens", "peak_flops", "mfu", "bytes_per_parameter"):
            positive(name, getattr(self, name), f"{name.replace('_', ' ')} of the training")
        share("mfu", self.mfu, "the model flops utilisation, such as 0.4")

    @property
    def device_seconds(self) -> float:
        """Device time without failures and saves."""
        return 6 * self.parameters * self.tokens / (self.peak_flops * self.mfu)

    @property
    def checkpoint_bytes(self) -> float:
        """Size of one checkpoint."""
        return self.parameters * self.bytes_per_parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """A training on one size of the job."""

    nodes: float
    goodput: float
    wall_s: float
    device_hours: float
    usd: float | None
    failures: float
    interventions: float
    """Failures that need a person."""
    people_usd: float


def bill(
    scaling: Scaling,
    training: Training,
    nodes: float,
    *,
    manual_share: float = 0.0,
    person_hours: float = 1.0,
    person_usd_per_hour: float = 100.0,
) -> Bill:
    """Days, device-hours and money of a training on ``nodes``; ``manual_share`` of failures cost a person's time."""
    job = scaling.job
    gain = scaling.goodput(nodes)[0]
    devices = nodes * job.devices_per_node
    useful = devices * gain * scaling.efficiency(nodes)
    if useful <= 0:
        raise BadInput(
            "nodes", f"{nodes:g} nodes do no useful work: fewer nodes, cheaper saves or faster restarts are needed"
        )
    wall = training.device_seconds / useful
    hours = devices * wall / 3600
    dead = scaling.costs.dead_s / (scaling.mtbf_s(nodes) + scaling.costs.dead_s)
    failures = wall * (1 - dead) / scaling.mtbf_s(nodes)
    calls = failures * manual_share
    return Bill(
        nodes=nodes,
        goodput=gain,
        wall_s=wall,
        device_hours=hours,
        usd=None if job.usd_per_device_hour is None else hours * job.usd_per_device_hour,
        failures=failures,
        interventions=calls,
        people_usd=calls * person_hours * person_usd_per_hour,
    )


def nodes_for(scaling: Scaling, training: Training, deadline_s: float) -> int:
    """The fewest nodes that finish in time. Raises :class:`BadInput` when no number does, naming the fastest."""
    positive("deadline_s", deadline_s, "the deadline in seconds")
    need = training.device_seconds / deadline_s / scaling.job.devices_per_node
    top = scaling.wall or 1e9
    most = scaling.useful_nodes(top)
    if most < need:
        best = training.device_seconds / (most * scaling.job.devices_per_node)
        raise BadInput(
            "deadline_s",
            f"no number of nodes makes this deadline: the fastest is {best / DAY_S:.3g} days on {top:,.0f} nodes",
        )
    low, high = 1, max(1, int(top) + 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if _useful(scaling, middle) < need else (low, middle)
    return low


def _useful(scaling: Scaling, nodes: float) -> float:
    return scaling.useful_nodes(nodes)


def bandwidth_needed(
    scaling: Scaling, checkpoint_bytes: float, nodes: float, points: float = 1.0
) -> tuple[float, float]:
    """(bytes/s when saves upload in the background, bytes/s when they block) for saving to cost ``points`` at most."""
    costs = scaling.costs_at(nodes)
    at = recommend(
        replace(
            scaling.rates,
            mtbf_s=scaling.mtbf_s(nodes),
            per_1000_node_days=None,
            failures=None,
            exposure_s=None,
            job_mtbf_s=None,
        ),
        costs,
        replace(scaling.job, work_s=None, step_s=None, align_steps=1),
    )
    late, block = storage_limits(at, points)
    return checkpoint_bytes / late, checkpoint_bytes / block


def variants(scaling: Scaling) -> list[tuple[str, Scaling]]:
    """The job as it is and with one thing better, for curves side by side."""
    costs = scaling.costs
    changes: list[tuple[str, Callable[[], Scaling]]] = [
        ("as given", lambda: scaling),
        (
            "restart in half the time",
            lambda: replace(
                scaling,
                costs=replace(
                    costs,
                    detect_s=costs.detect_s / 2,
                    reschedule_s=costs.reschedule_s / 2,
                    load_s=costs.load_s / 2,
                    warmup_s=costs.warmup_s / 2,
                ),
            ),
        ),
        ("a tenth of the stall", lambda: replace(scaling, costs=replace(costs, stall_s=costs.stall_s / 10))),
        (
            "both",
            lambda: replace(
                scaling,
                costs=replace(
                    costs,
                    stall_s=costs.stall_s / 10,
                    detect_s=costs.detect_s / 2,
                    reschedule_s=costs.reschedule_s / 2,
                    load_s=costs.load_s / 2,
                    warmup_s=costs.warmup_s / 2,
                ),
            ),
        ),
    ]
    if costs.dead_s + costs.recovery_s == 0:
        changes = [changes[0], changes[2]]
    return [(name, make()) for name, make in changes]
