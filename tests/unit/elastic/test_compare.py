"""Efficiency between sizes, and the time to the same quality where it is not what tokens a second promise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elastic.ledger.compare import Comparison, compare
from elastic.ledger.events import Event, Metric, Resumed
from elastic.ledger.goodput import Account, account
from tests.unit.elastic.ledgers import Job, Written


def told(events: list[Event], name: str, value: Callable[[int], float]) -> list[Event]:
    """With an evaluation at every save."""
    out = list(events)
    for e in events:
        if e.kind == "save_started" and e.rank == 0:
            x = value(e.step)
            out.append(replace(e, mono_s=e.mono_s - 1e-3, data=Metric(name=name, last=x, mean=x, min=x, max=x)))
    return out


def run(value: Callable[[int], float], **changes: Any) -> Account:
    return account(told(Written(Job(**changes)).events, "val_loss", value))


def decay(steps: float) -> Callable[[int], float]:
    return lambda step: 1.0 + 2.0 * math.exp(-step / steps)


def three() -> list[tuple[str, Account]]:
    """Twice the devices: nearly twice the tokens; but the largest needs many more of them."""
    return [
        ("one", run(decay(50), world=1, steps=200, body=1.0)),
        ("two", run(decay(28), world=2, steps=200, body=1.1)),
        ("four", run(decay(60), world=4, steps=200, body=1.2)),
    ]


def by_name(c: Comparison) -> dict[str, Any]:
    return {e.name: e for e in c.entries}


def test_efficiency_is_the_speed_a_device_of_the_smallest() -> None:
    c = compare(three())
    e = by_name(c)
    assert c.unit == "tokens"
    step = {name: run_.rates.step_s for name, run_ in e.items()}
    assert e["one"].efficiency == 1.0
    assert e["two"].efficiency == pytest.approx(step["one"] / step["two"])
    assert e["four"].efficiency == pytest.approx(step["one"] / step["four"])
    assert e["four"].speed == pytest.approx(4000 / step["four"])
    assert [x.name for x in c.by_speed] == ["four", "two", "one"]


def test_more_tokens_a_second_are_not_always_faster() -> None:
    c = compare(three(), target=1.2)
    assert [x.name for x in c.by_quality] == ["two", "one", "four"]
    e = by_name(c)
    assert e["two"].reached.step == 80
    assert e["two"].reached.work == 80 * 2000
    assert e["four"].reached.step == 140
    assert e["four"].device_s == pytest.approx(4 * e["four"].reached.at_s)
    assert e["two"].reached.at_s < e["one"].reached.at_s < e["four"].reached.at_s


def test_without_a_target_it_is_the_best_that_all_have_reached() -> None:
    c = compare(three())
    assert c.metric == "val_loss"
    assert c.target == pytest.approx(1 + 2 * math.exp(-200 / 60))
    assert by_name(c)["four"].reached.step == 200
    higher = compare([(n, account(told(Written(Job(steps=200)).events, "test_acc", lambda s: s / 200.0)))
                      for n in "ab"], higher=True)  # fmt: skip
    assert higher.target == 1.0
    assert higher.entries[0].reached is not None
    assert higher.entries[0].reached.step == 200


def test_down_time_counts_on_the_way_to_quality() -> None:
    calm = run(decay(50), world=2, steps=200)
    hit = run(decay(50), world=2, steps=200, kills=((33, 1), (61, 0), (77, 1)))
    c = compare([("hit", hit), ("calm", calm)], target=1.1)
    e = by_name(c)
    assert e["hit"].reached.step == e["calm"].reached.step
    assert e["hit"].reached.at_s > e["calm"].reached.at_s + 20
    assert e["hit"].efficiency_wall < 0.99 * (e["calm"].efficiency_wall or 0)
    assert e["hit"].reached.work == e["calm"].reached.work


def test_a_value_of_steps_that_were_given_up_does_not_count() -> None:
    events = told(Written(Job(kills=((42, 1),), persist=5.0)).events, "val_loss", lambda s: 0.1 if s == 40 else 1.0)
    seen = [e for e in events if not (isinstance(e.data, Metric) and e.step == 40 and e.epoch > "e00000001")]
    assert any(isinstance(e.data, Resumed) and e.step < 40 for e in seen if e.epoch > "e00000001")
    assert any(isinstance(e.data, Metric) and e.step == 40 and e.data.last == 0.1 for e in seen)
    c = compare([("a", account(seen))], target=0.5)
    assert c.entries[0].reached is None


def test_what_cannot_be_compared_is_said() -> None:
    plain = [("a", account(Written(Job(tokens=0.0)).events)), ("b", account(Written(Job(world=4)).events))]
    c = compare(plain)
    assert c.unit == "steps"
    assert any("not every run has logged" in n for n in c.notes)
    assert any("run.metric(val_loss=" in n for n in c.notes)
    with pytest.raises(ValueError, match="no run has a metric 'bleu'; there are: val_loss"):
        compare(three(), metric="bleu")
    mixed = [*three(), ("bare", account(Written(Job()).events))]
    c = compare(mixed, metric="val_loss")
    assert any("1 of 4 runs have no value" in n for n in c.notes)
    assert by_name(c)["bare"].reached is None
    two = told(told(Written(Job()).events, "val_loss", decay(50)), "eval_acc", decay(50))
    c = compare([("a", account(two))])
    assert c.metric is None
    assert any("choose one of eval_acc, val_loss with --metric" in n for n in c.notes)
