"""Every storage call of save, commit, resume, fall-back, retention and quarantine, with every fault there is.

The suite plays every point and kind for 1, 2 and 4 ranks and samples second faults; ``python -m tests.soak.crash``
plays all of it. Run with ``-s`` for the numbers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from tests.crash.histories import SCENARIOS, Bench, History, Scenario, double, laboratory, overlapping, single
from tests.crash.world import READ_KINDS, WRITE_KINDS

FIRST, KEEPS_1, GRACE, FLIPPED, LACKING, UNFINISHED, IDS_RISE, IDS_FALL, REFERS, LOST = SCENARIOS


@pytest.fixture(autouse=True)
def lab() -> Iterator[None]:
    with laboratory():
        yield


def play(title: str, histories: Callable[[Bench], Iterable[History]]) -> list[History]:
    bench = Bench()
    began = time.process_time()
    played, failed = [], []
    for h in histories(bench):
        played.append(h)
        if violations := bench.play(h):
            failed.append(f"{h}\n    " + "\n    ".join(violations[:4]))
    took = time.process_time() - began
    points = len({h.fault.point for h in played})
    kinds = len({h.fault.kind for h in played})
    print(f"{title}: {points} points, {kinds} kinds of fault, {len(played)} histories, {len(failed)} violations, "
          f"{took:.1f} s of CPU, {len(played) / took:.0f} a second")  # fmt: skip
    assert not failed, f"{len(failed)} of {len(played)} histories, the shortest:\n" + "\n".join(failed[:3])
    return played


def one_rank() -> list[tuple[Scenario, int]]:
    return [(s, 1) for s in SCENARIOS if s is not IDS_RISE]


def several_ranks() -> list[tuple[Scenario, int]]:
    return [(FIRST, 2), (KEEPS_1, 2), (FLIPPED, 2), (UNFINISHED, 2), (KEEPS_1, 4), (REFERS, 2)]


@pytest.mark.parametrize(("scenario", "ranks"), one_rank() + several_ranks(), ids=lambda v: getattr(v, "name", str(v)))
def test_every_fault_at_every_point(scenario: Scenario, ranks: int) -> None:
    played = play(f"{scenario.name}, {ranks} ranks", lambda b: single(b, scenario, ranks, lean=True))
    assert {h.fault.kind for h in played} >= {*READ_KINDS, *WRITE_KINDS}
    ops = {(h.fault.point.op, h.fault.point.key.split("/")[0]) for h in played}
    assert ops >= {
        ("create", "epochs"),
        ("create", "commits"),
        ("put", "steps"),
        ("list", "epochs"),
        ("list", "retire"),
    }
    if scenario.damage or scenario.unfinished:
        assert ("create", "quarantine") in ops
    if scenario in (KEEPS_1, GRACE):
        assert ops >= {("put", "retire"), ("delete", "commits"), ("delete", "steps"), ("delete", "retire")}
    assert {h.fault.point.rank for h in played} == set(range(ranks))


@pytest.mark.parametrize("how", [double, overlapping])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_a_second_fault_in_the_start_that_recovers(
    scenario: Scenario, how: Callable[[Bench, Scenario, int], Iterable[History]]
) -> None:
    def sample(bench: Bench) -> list[History]:
        rng = random.Random(f"{scenario.name} {how.__name__}")
        return rng.sample(list(how(bench, scenario, 1)), 30) + rng.sample(list(how(bench, scenario, 2)), 10)

    play(f"{scenario.name}, {how.__name__}", sample)


def test_a_history_is_the_same_each_time() -> None:
    """What the enumeration rests on: storage calls have one order, and nothing random is left."""
    traces = []
    for _ in range(2):
        bench = Bench()
        p = bench.prepared(GRACE, 2)
        traces.append((p.points, p.world.key()))
    assert traces[0] == traces[1]
