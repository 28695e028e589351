"""Stragglers: on readings of real slowed runs (medians and means of two ranks, in ms), and on simulated worlds."""

from __future__ import annotations

import random

import pytest

from elastic.launch.straggler import CAUSES, WINDOW, StepRecord, Stragglers, Verdict

Window = dict[int, list[StepRecord]]

# two gloo ranks on two cores, rank 1 slowed: (own compute, wait, CPU) of each rank; where the mean differs from the
# median, a part of the steps carries the stall
READ = {
    "none": ((3.3, 1.0, 3.3), (3.3, 1.1, 3.3)),
    "stopped 4 ms of each step": ((3.3, 4.9, 3.3), (7.5, 0.6, 3.5)),
    "CPU quota": ((3.5, 24.4, 3.3), (9.6, 18.3, 3.5)),
}
STOPPED_NOW_AND_THEN = ((3.4, 3.4), (3.4, 4.8))  # (median, mean) of compute; a median alone saw nothing here


def steady(reading: tuple[tuple[float, float, float], ...], rng: random.Random) -> Window:
    def record(compute: float, wait: float, cpu: float) -> StepRecord:
        noise = rng.gauss(1, 0.03)
        return StepRecord(compute_s=compute * noise / 1e3, wait_s=wait / 1e3, cpu_s=cpu / 1e3)

    return {rank: [record(*values) for _ in range(WINDOW)] for rank, values in enumerate(reading)}


def first(windows: list[Window], stragglers: Stragglers) -> tuple[int, list[Verdict]]:
    """Steps until the first verdict, and the verdict."""
    for n, window in enumerate(windows, 1):
        if verdicts := stragglers.window(window):
            return n * WINDOW, verdicts
    return 0, []


@pytest.mark.parametrize("name", ["stopped 4 ms of each step", "CPU quota"])
def test_recorded_slow_runs_are_named_within_30_steps_as_descheduled(name: str) -> None:
    rng = random.Random(1)
    steps, verdicts = first([steady(READ[name], rng) for _ in range(10)], Stragglers())
    assert 0 < steps <= 30
    assert [(v.rank, v.cause) for v in verdicts] == [(1, "descheduled")]


def test_a_recorded_undisturbed_run_is_left_alone() -> None:
    rng = random.Random(2)
    assert first([steady(READ["none"], rng) for _ in range(100)], Stragglers()) == (0, [])


def test_a_median_that_sees_nothing_is_not_enough() -> None:
    """Half-second duty: two of eight steps carry the whole stall, as recorded."""
    (median0, _), (median1, mean1) = STOPPED_NOW_AND_THEN
    stall = (mean1 - median1) * WINDOW / 2
    windows = []
    for _ in range(10):
        slow = [median1 + (stall if n < 2 else 0.0) for n in range(WINDOW)]
        windows.append({
            0: [StepRecord(compute_s=median0 / 1e3, wait_s=(0.7 + c - median1) / 1e3, cpu_s=3.3e-3) for c in slow],
            1: [StepRecord(compute_s=c / 1e3, wait_s=0.6e-3, cpu_s=3.3e-3) for c in slow],
        })  # fmt: skip
    steps, verdicts = first(windows, Stragglers())
    assert 0 < steps <= 30
    assert [(v.rank, v.cause) for v in verdicts] == [(1, "descheduled")]


def world(
    rng: random.Random, ranks: int, victim: int | None, cause: str, factor: float, network: float = 1.0
) -> Window:
    """A step ends when the slowest has come; noise of 4 % a step, now and then a hiccup of 30 ms on any rank."""
    base, out = 0.020, {r: list[StepRecord]() for r in range(ranks)}
    for _ in range(WINDOW):
        parts = {}
        for r in range(ranks):
            compute = base * max(0.8, rng.gauss(1, 0.04))
            p = {
                "compute_s": compute,
                "cpu_s": compute,
                "data_s": 0.001,
                "storage_s": 0.0,
                "queued_s": 0.0,
                "work": 1.0,
            }
            if rng.random() < 0.01:
                p["compute_s"] += 0.030
            if r == victim:
                extra = (factor - 1) * base
                if cause in ("compute", "imbalance"):
                    p["compute_s"] += extra
                    p["cpu_s"] += extra
                    p["work"] = factor if cause == "imbalance" else 1.0
                elif cause == "descheduled":
                    p["compute_s"] += extra
                    p["queued_s"] += extra
                elif cause in ("data", "storage"):
                    p[f"{cause}_s"] += extra
            parts[r] = p
        own = {r: p["compute_s"] + p["data_s"] + p["storage_s"] for r, p in parts.items()}
        slowest = max(own.values())
        for r, p in parts.items():
            errors = int(cause == "network" and r == victim and rng.random() < 0.5)
            out[r].append(StepRecord(wait_s=slowest - own[r] + 0.004 * network, link_errors=errors, **p))
    return out


@pytest.mark.parametrize("cause", [c for c in CAUSES if c != "network"])
@pytest.mark.parametrize(("factor", "within"), [(1.2, 100), (1.5, 30), (3.0, 30)])
@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_each_cause_is_found_in_time_and_called_by_its_name(cause: str, factor: float, within: int, ranks: int) -> None:
    good = 0
    for seed in range(6):
        rng = random.Random(seed)
        stragglers, victim = Stragglers(), seed % ranks
        for _ in range(6):
            assert stragglers.window(world(rng, ranks, None, "", 1)) == []
        steps, verdicts = first([world(rng, ranks, victim, cause, factor) for _ in range(15)], stragglers)
        assert 0 < steps <= within, (seed, steps)
        assert [v.rank for v in verdicts] == [victim]
        good += verdicts[0].cause == cause
    assert good >= 5


def test_no_alarm_in_2000_undisturbed_steps() -> None:
    for ranks in (2, 8):
        rng, stragglers = random.Random(ranks), Stragglers()
        for _ in range(2_000 // WINDOW):
            assert stragglers.window(world(rng, ranks, None, "", 1)) == []


def test_a_slow_network_is_told_from_slow_ranks_and_the_bad_link_is_named() -> None:
    for victim in (2, None):
        rng, stragglers = random.Random(7), Stragglers()
        for _ in range(20):
            stragglers.window(world(rng, 4, None, "", 1))
        steps, verdicts = first([world(rng, 4, victim, "network", 1, network=4) for _ in range(12)], stragglers)
        assert 0 < steps <= 100
        assert [(v.rank, v.cause) for v in verdicts] == [(victim, "network")]


def test_a_declared_slow_stage_is_no_straggler_until_it_is_slower_than_declared() -> None:
    rng, stragglers = random.Random(3), Stragglers(expected={3: 1.5})
    assert first([world(rng, 4, 3, "compute", 1.5) for _ in range(30)], stragglers) == (0, [])
    steps, verdicts = first([world(rng, 4, 3, "compute", 2.5) for _ in range(10)], stragglers)
    assert 0 < steps <= 30
    assert verdicts[0].rank == 3


def test_the_rank_that_waits_is_never_the_one() -> None:
    """Own time may be long where it overlaps with waiting of others for somebody else: no inversion, no verdict."""
    rng = random.Random(4)
    windows = []
    for _ in range(30):
        w = world(rng, 4, None, "", 1)
        w[2] = [StepRecord(compute_s=s.compute_s * 1.5, wait_s=s.wait_s + 0.02, cpu_s=s.cpu_s * 1.5) for s in w[2]]
        windows.append(w)
    assert first(windows, Stragglers()) == (0, [])


def test_one_rank_has_nobody_to_compare_with() -> None:
    assert Stragglers().window({0: [StepRecord(compute_s=1, wait_s=0, cpu_s=1)] * WINDOW}) == []
