"""Events on the wire, the writer's background thread, and reading everything back."""

from __future__ import annotations

import json
import logging
import math
import threading
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.store import open_store
from elastic.ledger import events
from elastic.ledger.events import Event, Metric, SaveCommitted, Unknown, decode, encode, utc
from elastic.ledger.reader import read
from elastic.ledger.writer import Writer

text = st.text(max_size=20)
whole = st.integers(-(2**53), 2**53)
number = st.floats(allow_nan=False)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    "int": whole,
    "float": number,
    "str": text,
    "bool": st.booleans(),
    "bool | None": st.none() | st.booleans(),
    "int | None": st.none() | whole,
    "float | None": st.none() | number,
    "str | None": st.none() | text,
    "dict[str, float]": st.dictionaries(text, number, max_size=3),
    "dict[str, str]": st.dictionaries(text, text, max_size=3),
    "tuple[str, ...]": st.lists(text, max_size=3).map(tuple),
    "tuple[tuple[str, str], ...]": st.lists(st.tuples(text, text), max_size=3).map(tuple),
}


@st.composite
def some_event(draw: st.DrawFn) -> Event:
    kind = draw(st.sampled_from(sorted(events.KINDS)))
    known: Any = events.KINDS[kind]
    payload = known(**{f.name: draw(VALUES[f.type]) for f in fields(known)})
    envelope = {f.name: draw(VALUES[f.type]) for f in fields(Event) if f.name not in ("data", "time")}
    return Event(time=utc(draw(st.floats(0, 4e9))), data=payload, **envelope)


@given(some_event())
def test_an_event_survives_its_line(event: Event) -> None:
    line = encode(event)
    assert "\n" not in line
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert decode(line) == event


def line(**changes: Any) -> str:
    row = json.loads(encode(sample(Metric(name="loss", last=1.0, mean=1.0, min=1.0, max=1.0))))
    return json.dumps(row | changes)


def sample(data: events.Payload, **changes: Any) -> Event:
    base: dict[str, Any] = {"epoch": "e00000001", "generation": None, "start": "ab", "rank": 0, "world": 1, "step": 3}
    base |= {"time": utc(1.5), "mono_s": 2.0, "host": "h", "pid": 1}
    return Event(**base | changes, data=data)


def test_the_line_is_what_the_schema_says() -> None:
    """Ledgers outlive releases: what is written today must be readable for ever."""
    event = sample(SaveCommitted(attempt="a", bytes=5, stall_s=0.1, persist_s=1.0))
    assert encode(event) == (
        '{"schema":"elastic.ledger/1","kind":"save_committed","epoch":"e00000001","generation":null,"start":"ab",'
        '"rank":0,"world":1,"step":3,"time":"1970-01-01T00:00:01.500000Z","mono_s":2.0,"host":"h","pid":1,'
        '"data":{"attempt":"a","bytes":5,"stall_s":0.1,"persist_s":1.0,"stall_max_s":null}}'
    )
    assert event.unix_s == 1.5
    assert set(events.KINDS) == {
        *("run_started", "resumed", "save_started", "save_committed", "save_failed", "interval_changed", "steps"),
        *("crash_loop", "last_seen", "metric", "evaluated", "stop_requested", "stopped", "finished", "error"),
    }
    assert all(is_dataclass(cls) for cls in events.KINDS.values())


def test_numbers_that_json_does_not_have_come_back() -> None:
    event = sample(Metric(name="loss", last=math.nan, mean=-math.inf, min=-math.inf, max=math.inf))
    back = decode(encode(event)).data
    assert isinstance(back, Metric)
    assert math.isnan(back.last)
    assert (back.min, back.max) == (-math.inf, math.inf)


def test_readers_are_tolerant_of_what_comes_later() -> None:
    known = decode(line())
    assert decode(line(weather="fine")) == known
    data = json.loads(line())["data"]
    assert decode(line(data=data | {"unit": "nats"})) == known
    later = decode(line(kind="node_drained", data={"node": "n1", "left": [1, 2]}))
    assert later.data == Unknown(kind="node_drained", fields={"node": "n1", "left": [1, 2]})
    assert decode(encode(later)) == later


@pytest.mark.parametrize(
    "bad",
    [
        "", "[]", "{}", "nonsense", line(schema="elastic.ledger/2"), line(kind=None), line(data=[]), line(data={}),
        line(step="three"), line(time="yesterday"), line(time="2026-01-01T00:00:00"), line(rank=float("inf")),
        "[" * 100_000, line(data={"name": "x", "last": [], "mean": 1, "min": 1, "max": 1}),
    ],
)  # fmt: skip
def test_a_line_that_is_no_event_is_a_value_error(bad: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode(bad)


def metric(x: float) -> Metric:
    return Metric(name="loss", last=x, mean=x, min=x, max=x)


def test_flushes_become_objects_and_all_ranks_read_back_in_order(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    writers = [Writer(store, epoch="e00000003", rank=r, world=2, generation="g") for r in (0, 1)]
    for n in range(3):
        for writer in writers:
            writer.record(metric(float(n)), step=n, unix_s=100.0 + n)
    for writer in writers:
        writer.close()
    assert sorted(e.key for e in store.list("ledger/")) == [
        "ledger/e00000003-r00000-000000.jsonl",
        "ledger/e00000003-r00001-000000.jsonl",
    ]
    earlier = Writer(store, epoch="e00000002", rank=0, world=1, generation=None)
    earlier.record(metric(9.0), step=9, unix_s=500.0)  # a wrong clock does not put an epoch behind a later one
    earlier.close()
    ledger = read(store)
    assert ledger.problems == ()
    assert [(e.epoch, e.step, e.rank) for e in ledger.events] == [
        ("e00000002", 9, 0),
        *(("e00000003", n, rank) for n in range(3) for rank in (0, 1)),
    ]
    assert {e.start for e in ledger.events if e.rank == 0} != {e.start for e in ledger.events if e.rank == 1}


def test_unreadable_lines_are_reported_not_raised(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("ledger/e00000001-r00000-000000.jsonl", [(line() + "\nnot an event\n").encode()])
    ledger = read(store)
    assert len(ledger.events) == 1
    assert len(ledger.problems) == 1
    assert ledger.problems[0].startswith("ledger/e00000001-r00000-000000.jsonl line 2: ")


def test_a_store_that_fails_costs_one_warning_and_no_event(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(str(tmp_path))
    (tmp_path / "ledger").write_text("a file where a folder should be")
    writer = Writer(store, epoch="e00000001", rank=0, world=1, generation=None)
    with caplog.at_level(logging.WARNING, "elastic.ledger"):
        for n in range(3):
            writer.record(metric(float(n)), step=n)
            writer.flush()
            until(lambda: not writer._asked)
        (tmp_path / "ledger").unlink()
        writer.record(metric(3.0), step=3)
        writer.close()
    assert [r.message for r in caplog.records if "cannot be written" in r.message] != []
    assert len(caplog.records) == 1
    assert [e.step for e in read(store).events] == [0, 1, 2, 3]
    assert [e.key for e in store.list("ledger/")] == ["ledger/e00000001-r00000-000000.jsonl"]


def until(true: Any) -> None:
    for _ in range(1000):
        if true():
            return
        threading.Event().wait(0.005)
    raise AssertionError("never came true")


@settings(max_examples=20, deadline=None)
@given(flushes=st.lists(st.booleans(), max_size=12))
def test_every_event_is_written_once(flushes: list[bool], tmp_path_factory: pytest.TempPathFactory) -> None:
    store = open_store(str(tmp_path_factory.mktemp("ledger")))
    writer = Writer(store, epoch="e00000001", rank=0, world=1, generation=None)
    for n, flush in enumerate(flushes):
        writer.record(metric(0.0), step=n)
        if flush:
            writer.flush()
    writer.close()
    assert [e.step for e in read(store).events] == list(range(len(flushes)))
