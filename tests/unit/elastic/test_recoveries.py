"""Ways back, phase by phase, and how a run stands, from ledgers whose every second is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.ledger.events import Event, Metric, Resumed, SaveCommitted, SaveFailed, utc
from elastic.ledger.goodput import account
from elastic.ledger.recoveries import BUDGETS_S, PHASES, recoveries, summary
from elastic.ledger.status import status
from tests.unit.elastic.ledgers import T0, Job, Written

KILLED = Job(world=3, kills=((33, 1), (61, 0)))


def marked(events: list[Event]) -> list[Event]:
    """With the phases of a start that a process under an agent tells of."""
    out = []
    for e in events:
        if isinstance(e.data, Resumed):
            seconds = {**e.data.seconds, "import": 2.0, "join": 0.25}
            e = replace(e, data=replace(e.data, seconds=seconds))  # noqa: PLW2901
        out.append(e)
    return out


def test_every_phase_of_every_way_back() -> None:
    back = recoveries(account(marked(Written(KILLED).events)))
    assert [(r.end.rank, r.before.steps_lost, r.after.steps[0]) for r in back] == [(1, 13, 20), (0, 21, 40)]
    half = 0.5 * (KILLED.body + KILLED.data)  # a rank dies at some moment of a step: half of it is taken
    meant = {
        "detect": KILLED.body / 2 + KILLED.detect - half, "stop": 0.3, "respawn": 1.1, "import": 2.0, "join": 0.25,
        "build": 0.75, "load": 1.5, "first step": 0.05 + 0.5 + 0.8,
    }  # fmt: skip
    for r in back:
        assert r.phases.keys() == PHASES.keys() == meant.keys()
        for phase, seconds in meant.items():
            assert r.phases[phase] == pytest.approx(seconds, abs=0.02), phase
        assert r.total_s == pytest.approx(sum(meant.values()), abs=0.1)
        assert r.unsplit == {}
        assert not r.waited
        assert r.over(BUDGETS_S) == []
    assert back[0].caught_up_s is not None
    assert back[0].caught_up_s == pytest.approx(back[0].total_s + 12 * 0.56 + 0.4, abs=4)
    assert summary(back)["join"] == (0.25, 0.25)


def test_budgets_warn_and_what_is_not_known_is_none() -> None:
    back = recoveries(account(Written(KILLED).events))
    assert back[0].phases["import"] is None
    assert back[0].unsplit == {"import+join+build": pytest.approx(3.0, abs=1e-3)}
    over = back[0].over({"load": 1.0, "total": 5.0, "stop": 9.0})
    assert [(p, limit) for p, _, limit in over] == [("load", 1.0), ("total", 5.0)]


def test_a_process_that_dies_alone_is_noticed_by_nobody() -> None:
    back = recoveries(account(Written(Job(world=1, kills=((33, 0),))).events))
    assert back[0].phases["detect"] is None
    assert back[0].phases["respawn"] is None
    assert back[0].unsplit["detect+stop+respawn"] == pytest.approx(0.4 + 1.1, abs=0.3)


def test_a_new_job_is_a_wait_and_has_no_budget() -> None:
    events = [replace(e, data=replace(e.data, restart_count=0)) if e.kind == "run_started" else e  # type: ignore[call-arg]
              for e in Written(Job(respawn=9000.0, kills=((33, 1),))).events]  # fmt: skip
    found = account(events)
    back = recoveries(found)
    assert back[0].waited
    assert found.seconds["wait"] == pytest.approx(9000, rel=1e-3)
    assert back[0].over(BUDGETS_S) == []
    assert "total" not in summary(back)


def until(seconds: float, events: list[Event]) -> list[Event]:
    return [e for e in events if e.unix_s <= T0 + seconds]


def test_how_a_run_stands() -> None:
    written = Written(replace(KILLED, cpu=(0.3, 0.3, 0.3)))
    end = written.wall
    done = status(written.events, now=T0 + end + 60)
    assert (done.state, done.step, done.durable_step) == ("finished", 100, 100)
    assert done.durable_s == pytest.approx(60)
    young = status(until(18, written.events), now=T0 + 20)
    assert (young.state, young.durable_step) == ("running", 20)
    assert young.step > 20
    assert young.recent_step_s == pytest.approx(0.56, rel=0.15)
    assert young.recent_counted["tokens"] == pytest.approx(3000 / 0.56, rel=0.15)
    late = status(until(18, written.events), now=T0 + 18 + 1000)
    assert (late.state, late.heard_s) == ("silent", pytest.approx(1000, abs=4))
    begun = status(until(4.6, written.events), now=T0 + 5)
    assert (begun.state, begun.durable_step, begun.recent_step_s) == ("starting", None, None)


def test_a_failure_that_nobody_followed_and_saves_that_fail() -> None:
    written = Written(KILLED)
    first = [e for e in written.events if e.epoch == "e00000001"]
    dead = status(first, now=T0 + 500)
    assert (dead.state, dead.step, dead.durable_step) == ("failed", 33, 20)
    assert status(first, now=first[-1].unix_s + 10).state == "restarting"
    assert "rank 1 ended without a word" in dead.why
    saved = next(e for e in first if isinstance(e.data, SaveCommitted) and e.rank == 0)
    at = {"mono_s": saved.mono_s + 1, "time": utc(saved.unix_s + 1)}
    failed = [*until(saved.unix_s - T0 + 0.5, first), replace(saved, data=SaveFailed(error="C-T", message="no"), **at)]  # type: ignore[arg-type]
    assert status(failed, now=T0 + 30).failed_saves == 1
    early = {"mono_s": saved.mono_s - 1, "time": utc(saved.unix_s - 1)}
    healed = [*first, replace(saved, data=SaveFailed(error="C-T", message="no"), **early)]  # type: ignore[arg-type]
    assert status(healed, now=T0 + 30).failed_saves == 0


def test_metrics_are_the_newest() -> None:
    events = Written(Job()).events
    row = next(e for e in events if isinstance(e.data, Metric))
    told = [replace(row, mono_s=row.mono_s + n, step=n, data=Metric(name="loss", last=9.0 - n, mean=1, min=1, max=1))
            for n in range(3)]  # fmt: skip
    assert status([*events, *told], now=T0).metrics == {"loss": (2, 7.0)}
