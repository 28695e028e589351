"""Who hangs: verdicts on readings as ranks give them, of a simulated job and its faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.launch.beats import Beat
from elastic.launch.watch import Hang, Reading, Watch

TICK = 0.1


class Ranks:
    """A world in lockstep, ten looks a second; a fault changes what single ranks show."""

    def __init__(self, world: int, step_s: float = 0.2, **limits: float) -> None:
        self.watch = Watch(**limits)  # type: ignore[arg-type]
        self.now, self.step_s = 100.0, step_s
        self.readings = {
            r: Reading(beat=Beat(step=0, phase="step", thread_s=self.now, collectives=1), state="S", cpu_s=0.0)
            for r in range(world)
        }
        self.cpu: dict[int, float] = {}

    def run(self, seconds: float) -> Hang | None:
        """All ranks step."""
        for _ in range(round(seconds / TICK)):
            done = int((self.now - 100.0) / self.step_s)
            for r, old in self.readings.items():
                beat = replace(old.beat, step=done, collectives=1 + 2 * done, waiting=bool(r % 2))
                self.readings[r] = replace(old, beat=beat)
            if (hang := self.tick()) is not None:
                return hang
        return None

    def stand(self, seconds: float, stale: tuple[int, ...] = ()) -> Hang | None:
        """Nobody steps; the threads of all but ``stale`` still beat."""
        for _ in range(round(seconds / TICK)):
            if (hang := self.tick(stale)) is not None:
                return hang
        return None

    def change(self, rank: int, *, state: str = "S", busy: bool = False, **beat: object) -> None:
        old = self.readings[rank]
        self.readings[rank] = replace(old, state=state, beat=replace(old.beat, **beat))  # type: ignore[arg-type]
        self.cpu[rank] = TICK if busy else 0.0

    def tick(self, stale: tuple[int, ...] = ()) -> Hang | None:
        self.now += TICK
        for r, old in self.readings.items():
            beat = old.beat if r in stale else replace(old.beat, thread_s=self.now)
            self.readings[r] = replace(old, beat=beat, cpu_s=old.cpu_s + self.cpu.get(r, 0.0))
        return self.watch.look(self.now, self.readings)


def trained(world: int = 4, **limits: float) -> Ranks:
    ranks = Ranks(world, **limits)
    assert ranks.run(10) is None
    return ranks


def others_wait(ranks: Ranks, victim: int) -> None:
    for r, reading in ranks.readings.items():
        if r != victim:
            ranks.change(r, waiting=True, collectives=reading.beat.collectives + 1)


@pytest.mark.parametrize("victim", range(4))
def test_a_stopped_rank(victim: int) -> None:
    ranks = trained()
    others_wait(ranks, victim)
    ranks.change(victim, state="T")
    hang = ranks.stand(4, stale=(victim,))
    assert hang is not None
    assert hang.ranks == (victim,)
    assert hang.why[victim] == "it is stopped by a signal"
    assert 3.0 < hang.still_s < 3.5


def test_a_rank_frozen_in_the_kernel() -> None:
    ranks = trained()
    others_wait(ranks, 2)
    ranks.change(2, state="D")
    hang = ranks.stand(4, stale=(2,))
    assert hang is not None
    assert hang.ranks == (2,)
    assert "uninterruptible" in hang.why[2]


def test_a_held_interpreter_lock_even_when_it_burns_cpu() -> None:
    for busy in (False, True):
        ranks = trained()
        others_wait(ranks, 1)
        ranks.change(1, state="R" if busy else "S", busy=busy)
        hang = ranks.stand(4, stale=(1,))
        assert hang is not None
        assert hang.ranks == (1,)
        assert "holds the interpreter lock" in hang.why[1]


def test_a_deadlock_in_user_code() -> None:
    ranks = trained()
    others_wait(ranks, 3)
    ranks.change(3, waiting=False)
    hang = ranks.stand(4)
    assert hang is not None
    assert hang.ranks == (3,)
    assert hang.why[3].startswith("it has entered")


def test_a_rank_that_skipped_a_collective_and_waits_in_the_next_step() -> None:
    ranks = trained()
    for r in range(4):
        ranks.change(r, waiting=True)
    ranks.change(2, step=ranks.readings[2].beat.step + 1, waiting=True)
    hang = ranks.stand(4)
    assert hang is not None
    assert hang.ranks == (2,)
    assert "skipped" in hang.why[2]


@pytest.mark.parametrize(("world", "line"), [(2, 31), (4, 31), (4, 29)])
def test_a_rank_that_skipped_a_collective_and_waits_in_the_one_after(world: int, line: int) -> None:
    """Of two, the one further on in the script; of more, the one that is alone: the next may be that of a new round."""
    ranks = trained(world)
    for r in range(world):
        ranks.change(r, waiting=True, file=7, line=line if r == 1 else 30)
    hang = ranks.stand(4)
    assert hang is not None
    assert hang.ranks == (1,)
    assert f"line {line}: it skipped one" in hang.why[1]


def test_a_rank_that_computes_is_waited_for_much_longer() -> None:
    ranks = trained(quiet_s=20)
    others_wait(ranks, 0)
    ranks.change(0, state="R", busy=True, waiting=False)
    assert ranks.stand(19) is None
    hang = ranks.stand(3)
    assert hang is not None
    assert hang.ranks == (0,)


@pytest.mark.parametrize("phase", ["save", "evaluate", "leave"])
def test_a_phase_of_unknown_length_is_waited_for(phase: str) -> None:
    ranks = trained(quiet_s=20)
    others_wait(ranks, 0)
    for r in range(4):
        ranks.change(r, phase=phase, waiting=bool(r))
    assert ranks.stand(19) is None


def test_when_all_wait_alike_the_cause_is_elsewhere() -> None:
    ranks = trained()
    for r in range(4):
        ranks.change(r, waiting=True)
    assert ranks.stand(30) is None


def test_the_limit_is_learned_from_slow_steps() -> None:
    ranks = Ranks(2, step_s=3.0)
    assert ranks.run(40) is None
    limit = ranks.watch.limit_s
    assert limit is not None
    assert 8.5 < limit < 9.6
    others_wait(ranks, 1)
    ranks.change(1, waiting=False)
    assert ranks.stand(8.0) is None
    assert ranks.stand(4.0) is not None


def test_before_the_first_steps_nothing_is_known() -> None:
    ranks = Ranks(2)
    ranks.change(1, waiting=True)
    assert ranks.stand(60) is None


def test_collectives_are_progress_where_no_loop_beats() -> None:
    watch, now = Watch(), 0.0
    for n in range(60):
        now += TICK
        reading = Reading(beat=Beat(thread_s=now, collectives=n, waiting=n % 2 == 0), state="S", cpu_s=0)
        assert watch.look(now, {0: reading, 1: reading}) is None
    for _ in range(40):
        now += TICK
        beats = {0: Beat(thread_s=now, collectives=60, waiting=True), 1: Beat(thread_s=now, collectives=59)}
        hang = watch.look(now, {r: Reading(beat=b, state="S", cpu_s=0) for r, b in beats.items()})
        if hang:
            break
    else:
        pytest.fail("no verdict")
    assert hang.ranks == (1,)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.02, 2.9), min_size=10, max_size=40), st.integers(1, 4))
def test_no_alarm_while_ranks_move(pauses: list[float], world: int) -> None:
    """Whatever the pauses, below the floor of 3 s nothing is said."""
    ranks = Ranks(world)
    for done, pause in enumerate(pauses, 1):
        for r in range(world):
            ranks.change(r, step=done, collectives=done, waiting=bool(r % 2))
        assert ranks.stand(pause) is None
