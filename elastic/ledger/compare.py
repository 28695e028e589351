"""Runs side by side: how well more devices are used, and which run reaches the same quality first. Pure.

More tokens a second are no gain where more tokens are needed: a larger batch takes fewer, larger steps. So two orders
are given, by speed and by the time to the same value of a metric, and it is said when they differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.ledger.events import Metric
from elastic.ledger.goodput import Account
from elastic.ledger.rates import COUNTED, Rates, rates, steps_kept

QUALITY = ("val", "eval", "valid", "test")
"""How names of validation metrics begin."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value of the metric: ``at_s`` after the first start, all down time included; ``work`` in the common unit."""

    at_s: float
    step: int
    work: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One run. ``speed`` and ``per_s`` are in the common unit: while it trains, and over all hours."""

    name: str
    account: Account
    rates: Rates
    world: int
    speed: float | None
    per_s: float | None
    efficiency: float | None
    """Speed a device, relative to the run with the fewest devices."""
    efficiency_wall: float | None
    """The same over all hours."""
    curve: tuple[Point, ...]
    reached: Point | None
    """Where the metric first was as good as the target."""
    best: float | None

    @property
    def device_s(self) -> float | None:
        """Device-seconds until the target was reached; None where it was not."""
        return None if self.reached is None else self.reached.at_s * self.world


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All runs, in the order given. ``unit`` is "tokens", "samples" or "steps", what all of them have counted."""

    entries: tuple[Entry, ...]
    unit: str
    metric: str | None
    target: float | None
    higher: bool
    notes: tuple[str, ...]

    @property
    def by_speed(self) -> list[Entry]:
        """Fastest first, while training."""
        return sorted((e for e in self.entries if e.speed), key=lambda e: -(e.speed or 0.0))

    @property
    def by_quality(self) -> list[Entry]:
        """First to reach the target first; those that did not are left out."""
        return sorted((e for e in self.entries if e.reached), key=lambda e: e.reached.at_s if e.reached else math.inf)


def compare(
    runs: Sequence[tuple[str, Account]],
    *,
    metric: str | None = None,
    target: float | None = None,
    higher: bool = False,
    notes: Sequence[str] = (),
) -> Comparison:
    """Compare; ``target`` None: the best value that all runs have reached. ``metric`` None: the one validation metric
    that all have, if there is one. ``ValueError`` where no run has the metric that was asked for."""
    said = list(notes)
    found = [rates(account) for _, account in runs]
    unit = next((u for u in COUNTED if all(u in r.counted for r in found)), "steps")
    if unit == "steps":
        said.append("runs are compared by steps: not every run has logged tokens or samples (run.log(tokens=…)), so "
                     "this holds only where their global batches are equal")  # fmt: skip
    metric = _metric(runs, metric, said)
    curves = [_curve(account, r, unit, metric) if metric else () for (_, account), r in zip(runs, found, strict=True)]
    best = [(max if higher else min)((p.value for p in c), default=None) for c in curves]
    if target is None and metric is not None:
        known = [b for b in best if b is not None]
        target = (min(known) if higher else max(known)) if known else None
        if len(known) < len(runs):
            said.append(f"{len(runs) - len(known)} of {len(runs)} runs have no value of {metric}")
    base = min(range(len(runs)), key=lambda n: found[n].world)
    speeds = [_speeds(account, r, unit) for (_, account), r in zip(runs, found, strict=True)]
    entries = []
    for n, (name, account) in enumerate(runs):
        reached = None if target is None else next((p for p in curves[n] if _good(p.value, target, higher)), None)
        entries.append(Entry(
            name=name, account=account, rates=found[n], world=found[n].world, speed=speeds[n][0], per_s=speeds[n][1],
            efficiency=_efficiency(speeds, found, n, base, 0), efficiency_wall=_efficiency(speeds, found, n, base, 1),
            curve=curves[n], reached=reached, best=best[n],
        ))  # fmt: skip
    return Comparison(entries=tuple(entries), unit=unit, metric=metric, target=target, higher=higher, notes=tuple(said))


def _good(value: float, target: float, higher: bool) -> bool:
    return value >= target if higher else value <= target


def _names(account: Account) -> set[str]:
    return {m.name for p in account.parts for _, _, m in p.attempt.lead.of(Metric)} - set(COUNTED)


def _metric(runs: Sequence[tuple[str, Account]], asked: str | None, notes: list[str]) -> str | None:
    names = [_names(account) for _, account in runs]
    if asked is not None:
        if not any(asked in some for some in names):
            known = ", ".join(sorted(set().union(*names))) or "none"
            raise ValueError(f"no run has a metric {asked!r}; there are: {known}")
        return asked
    common = sorted(set.intersection(*names))
    quality = [name for name in common if name.lower().startswith(QUALITY)]
    if len(quality) == 1:
        return quality[0]
    what = (
        f"choose one of {', '.join(quality or common)} with --metric" if common else "log one: run.metric(val_loss=…)"
    )
    notes.append(f"no time to the same quality: {what}")
    return None


def _curve(account: Account, found: Rates, unit: str, metric: str) -> tuple[Point, ...]:
    """Values at steps that count, in order of time, the step at which they were told."""
    each = found.counted[unit].per_step if unit in found.counted else 1.0
    out = []
    for part in account.parts:
        for at, step, row in part.attempt.lead.of(Metric):
            if row.name == metric and step <= part.kept and math.isfinite(row.mean):
                out.append(Point(at - account.began, step, step * each, row.mean))
    return tuple(sorted(out, key=lambda p: p.at_s))


def _speeds(account: Account, found: Rates, unit: str) -> tuple[float | None, float | None]:
    if unit in found.counted:
        return found.counted[unit].speed, found.counted[unit].per_s
    wall = steps_kept(account) / account.wall_s if account.wall_s > 0 else None
    return (1 / found.step_s if found.step_s else None), wall


def _efficiency(
    speeds: Sequence[tuple[float | None, float | None]], found: Sequence[Rates], n: int, base: int, which: int
) -> float | None:
    mine, first = speeds[n][which], speeds[base][which]
    return mine / found[n].world / (first / found[base].world) if mine and first else None
