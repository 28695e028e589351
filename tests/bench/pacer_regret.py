"""The pacer against an oracle that knows the rate and the cost: ``python -m tests.bench.pacer_regret [seeds]``.

A job with an MTBF of 3.1 h, saves of 60 s on average (coefficient of variation 0.5), restarts of 10 min. Failures and
costs are drawn, and the pacer lives through them; what is averaged is the exact goodput of the interval it has
chosen at each moment, so that chance enters only through what it has learned.
"""

import random
import sys
from collections.abc import Sequence

from elastic.economics import Costs, Pacer, Rates
from elastic.economics.models import Setting, SingleTier

DAY_S = 86_400
MTBF_S, SAVE_S, RESTART_S = 3.1 * 3600, 60.0, 600.0
_GAMMA = 4.0  # shape of the save cost: coefficient of variation 0.5


def live(pacer: Pacer, seed: int, days: Sequence[float], jump_at: float | None = None) -> list[float]:
    """Mean points lost to the oracle up to each day; the rate grows 8 times at ``jump_at`` seconds."""
    rng = random.Random(seed)
    clock = lost = 0.0
    out: list[float] = []
    calm, rough = (SingleTier(mtbf_s=m, stall_s=SAVE_S, recovery_s=RESTART_S) for m in (MTBF_S, MTBF_S / 8))
    best = {model: model.goodput(model.best(0.0, 1e9)) for model in (calm, rough)}
    while len(out) < len(days):
        model = rough if jump_at is not None and clock >= jump_at else calm
        work, cost = pacer.interval_s, rng.gammavariate(_GAMMA, SAVE_S / _GAMMA)
        loss = best[model] - model.goodput(Setting(work))
        up = rng.expovariate(1 / model.mtbf_s)
        if up >= work + cost:
            spent = work + cost
            pacer.step(work)
            pacer.saved(stall_s=cost)
        else:
            spent = up + RESTART_S
            pacer.step(up)
            pacer.resumed(failures=1, lost_s=0.0)  # the steps since the save were counted as they went
        clock, lost = clock + spent, lost + loss * spent
        if clock >= days[len(out)] * DAY_S:
            out.append(100 * lost / clock)
    return out


def _pacer(wrong: float, half_life: float) -> Pacer:
    rates = Rates(mtbf_s=wrong * MTBF_S, prior_failures=1.0)
    return Pacer(nodes=1, rates=rates, costs=Costs(stall_s=SAVE_S), half_life_failures=half_life)


def _assuming(wrong: float) -> Pacer:
    """As ``every="auto"`` starts: so many nodes that the fleet's rate is that much too low."""
    nodes = max(1, round(1000 * DAY_S / 7 / (wrong * MTBF_S)))
    return Pacer(nodes=nodes, costs=Costs(stall_s=SAVE_S))


def assumed(wrong: float, days: Sequence[float], seeds: int) -> list[float]:
    """The same where the rate is not given but assumed from the number of nodes."""
    runs = [live(_assuming(wrong), seed, days) for seed in range(seeds)]
    return [sum(column) / seeds for column in zip(*runs, strict=True)]


def regret(wrong: float, days: Sequence[float], seeds: int) -> list[float]:
    """Points lost by each day when the prior MTBF is ``wrong`` times the true one, mean over seeds."""
    runs = [live(_pacer(wrong, 15.0), seed, days) for seed in range(seeds)]
    return [sum(column) / seeds for column in zip(*runs, strict=True)]


def drift(half_life: float, days: float, seeds: int, jump: bool = True) -> float:
    """Points lost over a run whose rate grows 8 times half-way, with a pacer of that memory."""
    at = days * DAY_S / 2 if jump else None
    return sum(live(_pacer(1.0, half_life), seed, (days,), at)[0] for seed in range(seeds)) / seeds


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    days = (1, 3, 14)
    for wrong in (0.25, 4.0):
        losses = ", ".join(f"day {day}: {loss:.2f}" for day, loss in zip(days, regret(wrong, days, seeds), strict=True))
        print(f"prior MTBF x{wrong:g}, points lost by {losses}")
    for wrong in (0.25, 4.0, 100.0):
        losses = ", ".join(
            f"day {day}: {loss:.2f}" for day, loss in zip(days, assumed(wrong, days, seeds), strict=True)
        )
        print(f"assumed MTBF x{wrong:g}, points lost by {losses}", flush=True)
    for half_life in (10.0, 15.0, 20.0, 1e9):
        jump, calm = drift(half_life, 28, seeds), drift(half_life, 28, seeds // 4, jump=False)
        print(
            f"half-life of {half_life:g} failures: {jump:.2f} points lost "
            f"where the rate grows 8 times half-way, {calm:.2f} where it does not"
        )


if __name__ == "__main__":
    main()
