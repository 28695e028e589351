"""What a failed save means: the policy by itself, and in real loops whose storage breaks and mends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.errors import Mismatch, RankFailed, Refused, StorageError, Superseded
from ckpt.store import open_store
from elastic.ledger.events import SaveCommitted, SaveFailed, SaveStarted, StopRequested
from elastic.ledger.reader import read
from elastic.notices import StopFile
from elastic.run import Run
from elastic.tolerance import END, GO_ON, PATIENCE, Tolerance
from tests.dist.readback import differences, step_folder
from tests.unit.ckpt.test_saves import break_writes, mend_writes
from tests.unit.elastic.test_run import Training, handlers  # noqa: F401 (a fixture)


def test_what_is_tolerated() -> None:
    warn, strict, stop = (Tolerance(p, now_s=0.0) for p in ("warn", "raise", "stop"))
    for error in (StorageError("503"), RankFailed("silent")):
        assert [t.judge(error) for t in (warn, strict, stop)] == [GO_ON, END, GO_ON]
    for error in (
        Superseded("other job"),
        Refused("replicas differ"),
        Mismatch("keys"),
        TypeError("bug"),
        MemoryError(),
    ):
        assert [t.judge(error) for t in (warn, strict, stop)] == [END, END, END]
    with pytest.raises(Refused, match="warn, raise, stop"):
        Tolerance("ignore", now_s=0.0)


def test_patience_ends_after_three_intervals_without_a_step() -> None:
    t = Tolerance("warn", now_s=100.0)
    assert not t.overdue(10_000.0, 10.0), "nothing has failed"
    t.failed(105.0, 10.0)
    assert [t.retry_due(s) for s in (114.9, 115.0)] == [False, True], "no later than the next one would be due"
    assert not t.overdue(100.0 + PATIENCE * 10, 10.0)
    assert t.overdue(100.1 + PATIENCE * 10, 10.0)
    t.committed(200.0)
    assert not t.overdue(10_000.0, 10.0)
    assert t.failures == 0
    assert not t.retry_due(10_000.0)
    waits = []
    for now_s in (0.0, 1000.0, 2000.0):
        t.failed(now_s, 3600.0)
        waits.append(next(s for s in range(1000) if t.retry_due(now_s + s)))
    assert waits == [30, 60, 120]


def committed(run: Path, step: int) -> None:
    """Wait until a step is durable."""
    end = time.monotonic() + 30
    while not list(run.glob(f"commits/{step:012d}-*")):
        assert time.monotonic() < end
        time.sleep(0.01)


def broken_at(run: Path, at: int, mended: int) -> Callable[[Run, int], None]:
    def then(_: Run, number: int) -> None:
        if number == at:
            committed(run, 3)
            break_writes(run)
        if number == mended:
            time.sleep(0.5)  # what was begun has failed by now
            mend_writes(run)
        time.sleep(0.02)

    return then


def test_training_goes_on_and_saves_when_the_storage_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    control = Training(tmp_path / "control")
    control.train(30)
    job = Training(tmp_path / "job")
    run = job.train(30, broken_at(tmp_path / "job", 5, 10), every=3)
    assert run.step == 30
    assert job.trained == control.trained
    assert "save number 1 in a row failed; training goes on" in caplog.text
    rows = [e for e in read(open_store(job.url)).events if isinstance(e.data, (SaveCommitted, SaveFailed))]
    assert [e.step for e in rows if isinstance(e.data, SaveFailed)] == [6, 9]
    assert {12, 15, 30} <= {e.step for e in rows if isinstance(e.data, SaveCommitted)}
    assert not differences(step_folder(tmp_path / "control", 30), step_folder(tmp_path / "job", 30))


def test_after_three_intervals_it_waits_for_a_save_and_then_ends(tmp_path: Path) -> None:
    job = Training(tmp_path / "job")
    with pytest.raises(StorageError):
        job.train(1000, broken_at(tmp_path / "job", 5, -1), every=3)
    mend_writes(tmp_path / "job")
    assert len(job.trained) < 500, "it went on for three intervals, not for ever"
    rows = [e.data for e in read(open_store(job.url)).events if isinstance(e.data, (SaveStarted, SaveFailed))]
    assert [r.reason for r in rows if isinstance(r, SaveStarted)][-1] == "overdue"
    assert Training(tmp_path / "job").train(6).resumed.step == 3


def test_an_overdue_save_that_works_ends_nothing(tmp_path: Path) -> None:
    """The storage is back just before patience ends, and no save is due by then."""
    job = Training(tmp_path / "job")

    def then(run: Run, number: int) -> None:
        if number == 1:
            run.save()
        if number == 3:
            committed(tmp_path / "job", 2)
            break_writes(tmp_path / "job")
            run.save()
        if number == 12:
            mend_writes(tmp_path / "job")
        time.sleep(0.1)

    run = job.train(60, then, every="1s")
    assert run.step == 60


@pytest.mark.parametrize("policy", ["raise", "stop"])
def test_stricter_policies(tmp_path: Path, policy: str) -> None:
    job = Training(tmp_path / "job")

    def then(_: Run, number: int) -> None:
        if number == 5:
            committed(tmp_path / "job", 3)
            break_writes(tmp_path / "job")
        if number == 6 and policy == "stop":
            time.sleep(0.5)  # the save of step 6 has failed by now
            mend_writes(tmp_path / "job")

    with pytest.raises(StorageError):
        job.train(1000, then, every=3, save_failures=policy)
    if policy == "raise":
        mend_writes(tmp_path / "job")
    assert len(job.trained) <= 12
    resumed = Training(tmp_path / "job").train(1).resumed.step
    assert resumed == 3 if policy == "raise" else resumed > 6, "stop makes one more save"


def test_the_last_save_is_tried_once_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Training(tmp_path / "job")
    run = job.run(every=1000)
    with run:
        for number, batch in run.steps(until=5):
            job.step(number, batch)
            if number == 4:
                break_writes(tmp_path / "job")
        time.sleep(0.5)  # the save of the end has failed by now
        mend_writes(tmp_path / "job")
    assert "is tried once more" in caplog.text
    assert Training(tmp_path / "job").train(1).resumed.step == 5


@pytest.mark.usefixtures("handlers")
def test_a_file_stops_the_run_with_a_save(tmp_path: Path) -> None:
    job = Training(tmp_path / "job")

    def then(_: Run, number: int) -> None:
        if number == 3:
            (tmp_path / "stop").touch()
        time.sleep(0.1)

    with pytest.raises(SystemExit) as left:
        job.train(100, then, stop_on=[StopFile(tmp_path / "stop")])
    assert left.value.code == 75
    asked = [e.data for e in read(open_store(job.url)).events if isinstance(e.data, StopRequested)]
    assert [str(tmp_path / "stop") in a.source for a in asked] == [True]
    assert Training(tmp_path / "job").train(1).resumed.step == len(job.trained)


@pytest.mark.usefixtures("handlers")
def test_ctrl_c_saves_and_a_second_one_ends_at_once(tmp_path: Path) -> None:
    job = Training(tmp_path / "job")

    def once(_: Run, number: int) -> None:
        if number == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # a terminal and a launcher both pass it on

    with pytest.raises(SystemExit) as left:
        job.train(100, once)
    assert left.value.code == 75
    assert Training(tmp_path / "job").train(1).resumed.step == len(job.trained)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # the first run has ended with its status decided
    other = Training(tmp_path / "other")

    def twice(_: Run, number: int) -> None:
        if number == 3:
            signal.raise_signal(signal.SIGINT)
            time.sleep(1.1)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        other.train(100, twice)
    assert len(other.trained) == 4
