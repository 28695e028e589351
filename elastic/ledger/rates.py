"""What a run gets done, and what each rank does with its time: rates, step times, shares, the slowest rank. Pure.

Where the training thread's CPU time is known, the body of a step is cut in time on the CPU (compute) and off it: waits
for other ranks, for storage or for a CPU, which the ledger cannot tell apart. On an accelerator the host waits for the
device as well, so there neither is called compute.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from elastic.ledger.attempts import Attempt
from elastic.ledger.ends import rows_of
from elastic.ledger.events import Metric, Steps
from elastic.ledger.goodput import Account, Part
from elastic.ledger.quantiles import Quantiles

COUNTED = ("tokens", "samples")
"""Names under which ``run.log`` counts what a rank has trained on in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """One rank over all starts with the world size of the last; seconds are sums over ``n`` steps."""

    rank: int
    host: str
    n: int
    times: Quantiles
    body_s: float
    data_s: float
    save_s: float
    between_s: float
    cpu_s: float | None
    peak_bytes: int | None
    peak_rss_bytes: int | None
    energy_j: float | None

    @property
    def off_cpu_s(self) -> float | None:
        """Of the body, the training thread was not on a CPU; None where that is not known."""
        return None if self.cpu_s is None else max(0.0, self.body_s - self.cpu_s)

    @property
    def step_s(self) -> float:
        """Mean time of a whole step, without save stalls."""
        return (self.body_s + self.data_s + self.between_s) / self.n

    @property
    def own_s(self) -> float | None:
        """What a step takes of this rank's own doing: waiting for data, and computing."""
        return None if self.cpu_s is None else (self.data_s + min(self.cpu_s, self.body_s)) / self.n


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowest:
    """The rank that the others wait for: ``excess_s`` more a step than the median of the others, mostly ``cause``."""

    rank: int
    excess_s: float
    cause: str
    """ "data" or "compute"."""
    waits_least: bool
    """It is also the one that waits least within steps, as it must be where the others wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Tokens or samples. ``useful``: of steps that count; ``per_s`` over the wall time, ``speed`` while it trains."""

    useful: float
    per_step: float
    per_s: float | None
    speed: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of a whole run; ``world`` is that of its last start."""

    world: int
    device: bool
    """Whether ranks told of an accelerator's memory."""
    ranks: tuple[RankTimes, ...]
    times: Quantiles
    """Of whole steps, on the lowest rank that trained."""
    step_s: float | None
    slowest: Slowest | None
    counted: Mapping[str, Counted]
    energy_j: float | None
    curve: tuple[tuple[int, float], ...]
    """(step, mean seconds of the steps before it) of the leading rank's rows, in order of time."""


def rates(account: Account) -> Rates:
    """All of it, from an account."""
    world = account.parts[-1].attempt.world
    same = [p.attempt for p in account.parts if p.attempt.world == world]
    ranks = tuple(filter(None, (_rank(r, same) for r in sorted({r for a in same for r in a.stays}))))
    lead = ranks[0] if ranks else None
    energy = [row.energy_j for p in account.parts for s in p.attempt.stays.values() for _, _, row in s.of(Steps)]
    known = [e for e in energy if e is not None]
    return Rates(
        world=world, device=any(r.peak_bytes for r in ranks), ranks=ranks, times=lead.times if lead else Quantiles(),
        step_s=lead.step_s if lead else None, slowest=slowest(ranks), energy_j=math.fsum(known) if known else None,
        counted={n: c for n in COUNTED if (c := _counted(n, account, lead.step_s if lead else None)) is not None},
        curve=tuple((step, (row.seconds + row.data_s) / row.n) for p in account.parts
                    for _, step, row in rows_of(p.attempt) if row.n),
    )  # fmt: skip


def mfu(account: Account, found: Rates, *, flops_per_step: float | None, flops_per_token: float | None,
        peak_flops: float) -> tuple[float, float] | None:  # fmt: skip
    """(while it trains, over the wall time) the share of the devices' peak; None where steps or tokens are not known.

    FLOPs are those of all devices together, ``peak_flops`` those of one in a second.
    """
    tokens = found.counted.get("tokens")
    if flops_per_step is None:
        if flops_per_token is None or tokens is None:
            return None
        flops_per_step = flops_per_token * tokens.per_step
    if not found.step_s or account.wall_s <= 0:
        return None
    devices = found.world * peak_flops
    return flops_per_step / found.step_s / devices, flops_per_step * steps_kept(account) / account.wall_s / devices


def steps_kept(account: Account) -> int:
    """Steps of this run that count."""
    return sum(_kept(p) for p in account.parts)


def slowest(ranks: Sequence[RankTimes]) -> Slowest | None:
    """The rank whose own time stands out by 5 % of a step and three robust deviations; None: none, or not known."""
    own = {r.rank: r.own_s for r in ranks if r.own_s is not None}
    if len(own) < 2 or len(own) != len(ranks):
        return None
    worst = max(ranks, key=lambda r: own[r.rank] or 0.0)
    others = [r for r in ranks if r is not worst]
    usual = median(own[r.rank] or 0.0 for r in others)
    spread = 1.4826 * median(abs((own[r.rank] or 0.0) - usual) for r in others)
    excess = (own[worst.rank] or 0.0) - usual
    if excess <= max(0.05 * worst.step_s, 3 * spread):
        return None
    data = worst.data_s / worst.n - median(r.data_s / r.n for r in others)
    waits = {r.rank: (r.off_cpu_s or 0.0) / r.n for r in ranks}
    return Slowest(rank=worst.rank, excess_s=excess, cause="data" if data > excess / 2 else "compute",
                   waits_least=waits[worst.rank] <= min(waits.values()))  # fmt: skip


def _rank(rank: int, attempts: Sequence[Attempt]) -> RankTimes | None:
    stays = [a.stays[rank] for a in attempts if rank in a.stays]
    rows = [row for stay in stays for _, _, row in stay.of(Steps)]
    n = sum(row.n for row in rows)
    if not n:
        return None
    times = Quantiles()
    for row in rows:
        if row.times is not None:
            try:
                times.merge(Quantiles.parse(row.times))
            except ValueError:  # written by something else: the sums still hold
                continue
    saves = math.fsum(row.save_s or 0.0 for row in rows)
    energy = [row.energy_j for row in rows if row.energy_j is not None]
    return RankTimes(
        rank=rank, host=stays[-1].host, n=n, times=times, save_s=saves,
        body_s=math.fsum(row.seconds for row in rows), data_s=math.fsum(row.data_s for row in rows),
        between_s=max(0.0, math.fsum(row.boundary_s for row in rows) - saves),
        cpu_s=math.fsum(row.cpu_s or 0.0 for row in rows) if all(row.cpu_s is not None for row in rows) else None,
        peak_bytes=max((row.peak_bytes for row in rows if row.peak_bytes is not None), default=None),
        peak_rss_bytes=max((row.peak_rss_bytes for row in rows if row.peak_rss_bytes is not None), default=None),
        energy_j=math.fsum(energy) if energy else None,
    )  # fmt: skip


def _counted(name: str, account: Account, step_s: float | None) -> Counted | None:
    by_world: dict[int, float] = {}
    useful = 0.0
    for part in account.parts:
        each = _per_step(name, part.attempt)
        if each is None:
            each = by_world.get(part.attempt.world, next(iter(by_world.values()), None))
        else:
            by_world[part.attempt.world] = each
        useful += (each or 0.0) * _kept(part)
    if not by_world:
        return None
    now = by_world.get(account.parts[-1].attempt.world, next(iter(by_world.values())))
    return Counted(useful=useful, per_step=now, per_s=useful / account.wall_s if account.wall_s > 0 else None,
                   speed=now / step_s if step_s else None)  # fmt: skip


def _per_step(name: str, attempt: Attempt) -> float | None:
    """What all ranks count in a step of this start; None where nobody counted."""
    found: dict[int, float] = defaultdict(float)
    for rank, stay in attempt.stays.items():
        rows = [m for _, _, m in stay.of(Metric) if m.name == name and math.isfinite(m.mean)]
        calls, steps = sum(m.n for m in rows), sum(row.n for _, _, row in stay.of(Steps))
        if calls:
            each = max(1, round(calls / steps)) if steps else 1  # several calls in a step add up
            found[rank] = each * math.fsum(m.mean * m.n for m in rows) / calls
    return math.fsum(found.values()) * attempt.world / len(found) if found else None


def _kept(part: Part) -> int:
    first, last = part.steps
    return int(max(0.0, min(part.kept, last) - first))
