"""The account adds up, and finds the seconds of a job whose every second is known, whatever order its ledger is in."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.ledger.attempts import story
from elastic.ledger.ends import rows_of
from elastic.ledger.events import Error, Evaluated, Event, Resumed, Steps, Stopped, StopRequested, decode, encode, utc
from elastic.ledger.goodput import CAUSES, PRODUCTIVE, Account, account
from elastic.ledger.rates import rates
from tests.unit.elastic.ledgers import T0, Job, Written

KILLED = Job(steps=100, kills=((33, 1), (61, 0), (77, 1)))


def tiled(found: Account) -> None:
    if not found.slices:
        assert found.wall_s == 0
        return
    assert found.slices[0].start == found.began
    assert found.slices[-1].end == found.ended
    for a, b in zip(found.slices, found.slices[1:], strict=False):
        assert a.end == b.start
    for piece in found.slices:
        assert sum(piece.parts.values()) == pytest.approx(piece.end - piece.start, rel=1e-9, abs=1e-6)
        assert min(piece.parts.values()) >= -1e-9
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s, rel=1e-9)


def near(found: Account, written: Written, rel: float = 0.01) -> None:
    tiled(found)
    assert found.wall_s == pytest.approx(written.wall, rel=1e-6)
    for cause in CAUSES:
        meant = written.truth.get(cause, 0.0)
        assert found.seconds[cause] == pytest.approx(meant, rel=rel, abs=0.002 * written.wall), cause


def test_a_job_that_nothing_befell() -> None:
    written = Written(Job())
    found = account(written.events)
    near(found, written)
    assert found.notes == ()
    assert found.goodput == pytest.approx(50 / written.wall, rel=1e-6)
    assert (found.running, found.steps, found.parts[0].end.how) == (False, 100, "finished")


@pytest.mark.parametrize("last_seen", [True, False])
@pytest.mark.parametrize("world", [2, 4])
def test_every_second_of_a_job_that_was_killed_three_times(world: int, last_seen: bool) -> None:
    written = Written(replace(KILLED, world=world, last_seen=last_seen))
    found = account(written.events)
    near(found, written, rel=0.02)
    assert [p.end.how for p in found.parts] == ["failure"] * 3 + ["finished"]
    assert [p.end.rank for p in found.parts[:3]] == [1, 0, 1]
    assert [p.steps_lost for p in found.parts] == [13, 21, 17, 0]
    assert sum(p.steps_lost for p in found.parts) == written.lost_steps
    loss = sum(s for c, s in written.truth.items() if c not in PRODUCTIVE)
    wrong = sum(abs(found.seconds[c] - written.truth.get(c, 0.0)) for c in CAUSES) / 2
    assert wrong < 0.05 * loss


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_it_finds_what_any_such_job_did(data: st.DataObject) -> None:
    seconds = st.floats(0.01, 20.0)
    job = Job(
        world=data.draw(st.integers(2, 4)), steps=60, every=data.draw(st.integers(1, 30)),
        pulse=data.draw(st.integers(1, 9)), start=data.draw(seconds), load=data.draw(seconds),
        warm=data.draw(st.floats(0, 5)), body=data.draw(st.floats(0.05, 3)), data=data.draw(st.floats(0, 1)),
        stall=data.draw(st.floats(0, 3)), persist=data.draw(st.floats(0, 9)), detect=data.draw(seconds),
        stop=data.draw(seconds), respawn=data.draw(seconds), jitter=data.draw(st.floats(0, 0.2)),
        kills=[(data.draw(st.integers(n * 12 + 3, n * 12 + 9)), data.draw(st.integers(0, 1))) for n in range(4)],
    )  # fmt: skip
    written = Written(job)
    shuffled = list(written.events)
    random.Random(data.draw(st.integers(0, 99))).shuffle(shuffled)
    found = account([*shuffled, *shuffled[:20]])  # twice is once
    tiled(found)
    assert found.wall_s == pytest.approx(written.wall, rel=1e-6)
    loss = sum(s for c, s in written.truth.items() if c not in PRODUCTIVE)
    wrong = sum(abs(found.seconds[c] - written.truth.get(c, 0.0)) for c in CAUSES) / 2
    # when in a step a rank died is not known, only that it was the one after its last: that much may go elsewhere
    assert wrong <= 0.01 * loss + 4 * (job.body + job.data) * 0.5 + 0.01


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_whatever_is_missing_it_adds_up(data: st.DataObject) -> None:
    """Ledgers of killed writers, cut anywhere, with lines that are gone."""
    events = Written(KILLED).events
    kept = data.draw(st.lists(st.integers(0, len(events) - 1), min_size=1, max_size=80, unique=True))
    tiled(account([events[i] for i in kept]))
    tiled(account(events[: data.draw(st.integers(1, len(events)))]))


def jumped(event: Event, by: float) -> Event:
    return replace(event, time=utc(event.unix_s + by))


def test_a_clock_that_jumps_is_named_and_changes_nothing_else() -> None:
    written = Written(Job())
    rows = [e if n < len(written.events) / 2 else jumped(e, -600.0) for n, e in enumerate(written.events)]
    found = account(rows)
    assert found.wall_s == pytest.approx(written.wall, rel=1e-3)
    assert [n for n in found.notes if "jumped by 600 s in start 1" in n]
    assert account(written.events).seconds["training"] == pytest.approx(found.seconds["training"])


def test_the_clock_that_most_events_agree_on_is_taken() -> None:
    events = Written(Job()).events
    late = [e if n < 0.7 * len(events) else jumped(e, 600.0) for n, e in enumerate(events)]
    assert account(late).began == pytest.approx(T0, abs=0.01)


def test_a_rank_whose_clock_is_off_is_moved_and_named() -> None:
    written = Written(KILLED)
    found = account([jumped(e, 90.0) if e.rank == 1 else e for e in written.events])
    assert [n for n in found.notes if "rank 1" in n and "90 s ahead" in n]
    near(found, written, rel=0.02)


def test_a_start_before_the_last_one_was_over_is_named() -> None:
    events = Written(Job(kills=((33, 1),))).events
    found = account([jumped(e, -15.0) if e.epoch > "e00000001" else e for e in events])
    tiled(found)
    assert any("start 2 begins" in n and "two jobs ran at once" in n for n in found.notes)


def test_parts_that_do_not_fit_in_their_time_are_named() -> None:
    events = Written(Job()).events
    first = next(e for e in events if e.kind == "steps" and e.step > 5)
    assert not isinstance(first.data, Resumed)
    long = replace(first, data=replace(first.data, seconds=500.0))  # type: ignore[call-arg]
    found = account([long if e is first else e for e in events])
    tiled(found)
    assert any("clocks disagree" in n for n in found.notes)


def test_evaluations_are_productive_and_no_training() -> None:
    written = Written(Job())
    late = [e if e.mono_s - 50.0 * e.rank < 20 else replace(e, mono_s=e.mono_s + 7, time=utc(e.unix_s + 7))
            for e in written.events]  # fmt: skip
    at = max(e.mono_s for e in late if e.rank == 0 and e.mono_s < 20) + 6.9
    ran = replace(late[0], time=utc(T0 + at), mono_s=at, step=25, data=Evaluated(seconds=7.0))
    found = account([*late, ran])
    assert found.seconds["evaluation"] == pytest.approx(7.0)
    assert found.seconds["training"] == pytest.approx(50.0, rel=1e-3)
    assert found.goodput == pytest.approx(57 / (written.wall + 7), rel=1e-3)


def test_the_hours_after_a_stop_are_a_wait_for_machines() -> None:
    first = [e for e in Written(Job()).events if e.kind != "finished"]
    end = first[-1]
    said = [StopRequested(source="SIGTERM", within_s=120.0), Stopped(status=75)]
    first += [
        replace(end, rank=0, start="s1r0", mono_s=end.mono_s - 50.0 + n * 0.01, data=d) for n, d in enumerate(said)
    ]
    second = [replace(jumped(e, 7200.0), epoch="e00000002", start="x" + e.start) for e in Written(Job()).events]
    found = account([*first, *second])
    assert found.parts[0].end.how == "notice"
    assert found.parts[0].end.cause == "SIGTERM"
    assert found.seconds["wait"] == pytest.approx(7200 - (end.unix_s - T0), abs=0.1)


def test_steps_given_up_on_purpose_are_no_failure() -> None:
    events = []
    for e in Written(Job(kills=((33, 1),))).events:
        rolled = e.epoch == "e00000002" and isinstance(e.data, Resumed)
        events.append(replace(e, data=replace(e.data, rolled_back=33)) if rolled else e)  # type: ignore[call-arg]
    found = account(events)
    assert found.seconds["lost"] == 0
    assert found.seconds["rollback"] > 13 * 0.5


def test_an_error_of_the_training_code_names_its_rank() -> None:
    events = Written(Job(kills=((33, 1),), world=3)).events
    died = next(e for e in events if isinstance(e.data, Error))
    said = Error(error="ValueError", message="bad sample 17\nmore")
    at = {"mono_s": died.mono_s + 50 * (1 - died.rank) - 0.2, "time": utc(died.unix_s - 0.2)}
    own = replace(died, rank=1, start="s1r1", data=said, **at)  # type: ignore[arg-type]
    end = account([*events, own]).parts[0].end
    assert (end.rank, end.cause) == (1, "ValueError: bad sample 17")


def test_a_run_that_is_still_going_says_so() -> None:
    events = Written(Job()).events
    found = account([e for e in events if e.unix_s < T0 + 30])
    assert found.running
    tiled(found)


def test_of_another_ranks_sums_only_the_steps_that_are_missing_are_taken() -> None:
    """Rank 0 was killed after a row at step 35; rank 1's last row began at the save of step 20."""
    attempt = story(Written(Job(kills=((39, 0),), last_seen=False)).events).attempts[0]
    (at, step, row), (then, last, more) = rows_of(attempt)[-2:]
    assert (step, last, more.n) == (35, 38, 3) or (step, last) == (35, 39)
    assert more.seconds == pytest.approx(0.5 * more.n)
    assert then - at == pytest.approx(0.56 * more.n, rel=0.05)
    assert row.n


def test_a_ledger_of_an_older_release_is_accounted_for_as_well() -> None:
    """Its rows tell of no save stalls, no CPU time and no distribution: the saves themselves tell of their stall."""
    written = Written(replace(KILLED, last_seen=False))
    old = [replace(e, data=replace(e.data, save_s=None, times=None, cpu_s=None)) if isinstance(e.data, Steps) else e
           for e in written.events]  # fmt: skip
    found = account(old)
    near(found, written, rel=0.05)
    assert rates(found).times.n == 0


def test_a_run_that_one_process_enters_again_was_not_born_twice() -> None:
    """As in a notebook: the process is older than its second start."""
    first = Written(Job()).events
    second = []
    for e in first:
        data = e.data
        if isinstance(data, Resumed):
            data = replace(data, seconds={**data.seconds, "start": 100.0})
        second.append(replace(jumped(e, 80.0), epoch="e00000002", start="x" + e.start, data=data))
    again = account([*first, *(replace(e, pid=7) for e in second)])
    assert [n for n in again.notes if "start 2" in n]
    found = account([*first, *second])
    tiled(found)
    assert found.notes == ()
    assert found.parts[1].attempt.born == pytest.approx(T0 + 80 + 3, abs=0.01)


def test_one_rank_that_lived_to_tell_of_the_end_is_enough() -> None:
    events = [e for e in Written(Job()).events if not (e.kind == "finished" and e.rank == 0)]
    found = account(events)
    tiled(found)
    assert (found.running, found.parts[0].end.how) == (False, "finished")


def test_the_same_event_twice_counts_once() -> None:
    events = Written(KILLED).events
    once, twice = (rates(account(some)) for some in (events, [*events, *map(replace, reversed(events))]))
    assert [r.n for r in twice.ranks] == [r.n for r in once.ranks]
    assert twice.counted == once.counted


def test_nothing_is_no_account() -> None:
    with pytest.raises(ValueError, match="no events"):
        account([])


def test_events_come_back_from_their_lines() -> None:
    events = Written(KILLED).events
    assert account([decode(encode(e)) for e in events]).seconds == account(events).seconds
