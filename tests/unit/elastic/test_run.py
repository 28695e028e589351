"""The loop in one process, on a real folder: what is saved, what is restored, what comes out as an error."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from ckpt.errors import Refused, StorageError
from ckpt.store import open_store
from ckpt.store.local import LocalStore
from elastic import Cadence, ElasticSampler, Run
from elastic.ledger.events import (
    CrashLoop,
    Error,
    Event,
    IntervalChanged,
    Metric,
    Resumed,
    SaveCommitted,
    SaveFailed,
    SaveStarted,
    Steps,
    Stopped,
)
from elastic.ledger.reader import read
from tests.dist.launch import ROOT
from tests.dist.readback import differences, step_folder


class Training:
    """A model whose every step draws from all random streams, so that a stream that is off by one shows."""

    def __init__(self, folder: Path, *, seed: int = 1, workers: int = 0) -> None:
        self.url = str(folder)
        data = TensorDataset(torch.arange(40), torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(data, batch_sampler=ElasticSampler(data, 4, seed=seed), num_workers=workers)
        self.state = ckpt.State(model=self.model, optim=self.optim, data=self.loader)
        self.trained: list[tuple[int, tuple[int, ...], float]] = []

    def run(self, **settings: Any) -> Run:
        return Run(self.url, self.state, **{"every": 3, **settings})

    def step(self, number: int, batch: Any) -> torch.Tensor:
        ids, x = batch
        loss = self.model(x * (1 + 0.01 * random.random() + 0.01 * np.random.rand())).square().mean()
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        self.trained.append((number, tuple(ids.tolist()), loss.item()))
        return loss

    def train(self, until: int, then: Callable[[Run, int], object] = lambda run, number: None, **settings: Any) -> Run:
        """Train; ``then(run, number)`` comes last in the body of each step."""
        with self.run(**settings) as self.last:
            for number, batch in self.last.steps(until=until):
                self.last.log(loss=self.step(number, batch))
                then(self.last, number)
        return self.last


def at(step: int, do: Callable[[], object]) -> Callable[[Run, int], object]:
    return lambda run, number: do() if number == step else None


def crash() -> None:
    raise ZeroDivisionError


def stop_with(name: str) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), getattr(signal, name))


@pytest.fixture
def control(tmp_path: Path) -> Training:
    training = Training(tmp_path / "control")
    training.train(10)
    return training


def committed(folder: Path) -> list[int]:
    return sorted(int(p.name.split("-")[0]) for p in (folder / "commits").glob("*.json"))


def events(folder: Path) -> list[Event]:
    ledger = read(open_store(str(folder)))
    assert ledger.problems == ()
    return list(ledger.events)


def kinds(folder: Path) -> list[str]:
    return [e.kind for e in events(folder)]


def test_a_fresh_run_saves_when_due_and_at_its_end(control: Training, tmp_path: Path) -> None:
    assert [n for n, _, _ in control.trained] == list(range(10))
    assert committed(tmp_path / "control") == [3, 6, 9, 10]
    samples = [i for _, ids, _ in control.trained for i in ids]
    assert sorted(samples) == list(range(40))


def test_a_crash_is_resumed_bit_for_bit(control: Training, tmp_path: Path) -> None:
    folder = tmp_path / "crash"
    crashed = Training(folder)
    with pytest.raises(ZeroDivisionError):
        crashed.train(10, at(4, crash))  # the optimizer has moved: a save now would be neither step 4 nor step 5
    resumed = crashed.last.resumed
    assert (resumed.step, resumed.attempt, resumed.rng) == (0, None, "fresh")
    assert committed(folder) == [3]
    again = Training(folder, seed=99)  # nothing of this survives the resume
    run = again.train(10)
    assert (run.resumed.step, run.resumed.rng) == (3, "restored")
    assert again.trained == control.trained[3:]
    assert differences(step_folder(folder, 10), step_folder(tmp_path / "control", 10)) == []


def test_workers_that_fetch_ahead_change_nothing(control: Training, tmp_path: Path) -> None:
    folder = tmp_path / "workers"
    Training(folder, workers=2).train(4, every=4)
    again = Training(folder, workers=2)
    again.train(10)
    assert [ids for _, ids, _ in again.trained] == [ids for _, ids, _ in control.trained[4:]]


def test_break_saves_nothing_after_the_last_boundary(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with training.run() as run:
        for number, batch in run.steps(until=10):
            training.step(number, batch)
            if number == 4:
                break
        assert run.step == 4
    assert committed(tmp_path) == [3]


@pytest.fixture
def handlers() -> Iterator[None]:
    """Handlers as they were, after the test; the defaults before."""
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    for number in before:  # the suite may run where SIGINT is ignored
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_ends_the_step_saves_and_leaves_with_75(control: Training, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "stopped"
    stopped = Training(folder)
    with pytest.raises(SystemExit) as caught:
        stopped.train(10, at(6, stop_with(name)), every=100)
    assert caught.value.code == 75
    assert stopped.last.step == 7
    assert signal.getsignal(getattr(signal, name)) == signal.SIG_IGN  # nothing changes this status any more
    assert committed(folder) == [7]
    assert [type(e.data) for e in events(folder)][-1] is Stopped
    assert [e.data.source for e in events(folder) if e.kind == "stop_requested"] == [name]  # type: ignore[union-attr]
    again = Training(folder)
    again.train(10)
    assert stopped.trained + again.trained == control.trained
    assert differences(step_folder(folder, 10), step_folder(tmp_path / "control", 10)) == []


LATE = """
import os, signal, sys
from tests.unit.elastic.test_run import Training, at
Training(sys.argv[1]).train(2, at(1, lambda: os.kill(os.getpid(), getattr(signal, sys.argv[2]))))
print("not reached")
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_in_the_last_step_is_handed_on_when_the_run_has_finished(tmp_path: Path, name: str) -> None:
    done = subprocess.run([sys.executable, "-c", LATE, str(tmp_path), name], cwd=ROOT, capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip
    assert done.returncode == -getattr(signal, name)
    assert done.stdout == ""
    assert kinds(tmp_path)[-1] == "finished"
    assert committed(tmp_path) == [2]


WORKERS = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader
import ckpt, elastic

if __name__ == "__main__":
    url, number, evaluating = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
    data = list(range(64))
    loader = DataLoader(data, batch_sampler=elastic.ElasticSampler(data, 2), num_workers=2)
    with elastic.Run(url, ckpt.State(data=loader), every=1000) as run:
        for step, _ in run.steps(until=10**6):
            if evaluating and step == 2:
                with run.evaluation() as ev:
                    for n, _ in enumerate(ev.batches(DataLoader(data * 100, num_workers=2))):
                        if n == 2:
                            print("ready", flush=True)
                        time.sleep(0.01)
            elif step == 5:
                print("ready", flush=True)
            time.sleep(0.01)
"""


@pytest.mark.parametrize("evaluating", [False, True])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_to_the_whole_group_leaves_the_loaders_workers_alone(
    tmp_path: Path, name: str, evaluating: bool
) -> None:
    script = tmp_path / "job.py"
    script.write_text(WORKERS)
    number = getattr(signal, name)
    arguments = [str(tmp_path / "run"), str(int(number)), str(evaluating)]
    with subprocess.Popen(
        [sys.executable, str(script), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        family = psutil.Process(job.pid).children(recursive=True)
        os.killpg(job.pid, number)
        _, said = job.communicate(timeout=60)
    assert job.returncode == 75, said
    assert len(committed(tmp_path / "run")) == 1
    assert len(family) >= 2
    assert psutil.wait_procs(family, timeout=20)[1] == []


def test_the_last_step_has_to_be_a_whole_number(tmp_path: Path) -> None:
    with Training(tmp_path).run() as run, pytest.raises(Refused, match="give a whole number of steps"):
        next(run.steps(until=2.5))  # type: ignore[arg-type]
    with Training(tmp_path).run() as run:
        assert sum(1 for _ in run.steps(until=np.int64(2))) == 2  # type: ignore[arg-type]
    assert committed(tmp_path) == [2]


def left(folder: Path) -> weakref.ref[nn.Module]:
    training = Training(folder)
    with training.run() as run:
        for number, batch in run.steps(until=2):
            training.step(number, batch)
            with run.evaluation() as ev:
                list(ev.batches("ab"))
    return weakref.ref(training.model)


def test_a_run_that_was_left_is_gone_with_its_model_at_once(tmp_path: Path) -> None:
    left(tmp_path / "first")  # what is imported late may keep a frame
    gc.collect()
    gc.disable()
    try:
        assert left(tmp_path / "second")() is None
    finally:
        gc.enable()


def test_save_failures_stop_also_where_the_next_save_is_due_before_the_last_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = LocalStore.put

    def slow_503(self: LocalStore, key: str, *rest: Any) -> Any:
        if key.startswith("steps/"):
            time.sleep(0.2)
            raise StorageError("503 slow down")
        return put(self, key, *rest)

    monkeypatch.setattr(LocalStore, "put", slow_503)
    training = Training(tmp_path)
    with pytest.raises(StorageError, match="503"):
        training.train(40, lambda run, number: time.sleep(0.02), every=2, save_failures="stop")
    assert training.last.step == 4


def test_stop_and_save_on_request(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with training.run(every="1h") as run:
        for number, batch in run.steps(until=100):
            training.step(number, batch)
            if number == 1:
                run.save()
            if number == 4:
                run.stop()
    assert run.step == 5
    assert committed(tmp_path) == [2, 5]
    assert [e.data.reason for e in events(tmp_path) if isinstance(e.data, SaveStarted)] == ["asked", "stop"]


def test_loops_can_follow_each_other_and_a_finished_one_is_skipped(control: Training, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    both = Training(folder)
    for _ in range(2):
        with both.run(every=100) as run:
            for until in (4, 10):
                for number, batch in run.steps(until=until):
                    both.step(number, batch)
    assert both.trained == control.trained
    assert committed(folder) == [4, 10]


def test_a_save_by_the_clock(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with training.run(every="30ms") as run:
        for number, batch in run.steps(until=10):
            training.step(number, batch)
            time.sleep(0.02)
    assert 2 <= len(committed(tmp_path)) <= 6
    assert {e.data.reason for e in events(tmp_path) if isinstance(e.data, SaveStarted)} == {"clock", "end"}


def test_automatic_saves_tell_their_interval(tmp_path: Path) -> None:
    Training(tmp_path).train(3, every="auto", keep=ckpt.Latest(2))
    (change,) = [e.data for e in events(tmp_path) if e.kind == "interval_changed"][:1]
    assert change.interval_s > 0  # type: ignore[union-attr]
    assert committed(tmp_path) == [3]


def test_what_was_learned_is_in_the_step_and_asked_of_none(control: Training, tmp_path: Path) -> None:
    folder = tmp_path / "auto"
    first = Training(folder)
    with pytest.raises(ZeroDivisionError):
        first.train(10, lambda run, n: run.save() if n == 2 else crash() if n == 7 else None, every="auto")
    (saved,) = committed(folder)
    again = Training(folder)
    again.train(8, every="auto")
    changes = [e.data for e in events(folder) if e.epoch == "e00000002" and isinstance(e.data, IntervalChanged)]
    assert changes[0].was_s == 120.0
    assert changes[-1].inputs["failures"] == 1
    assert changes[-1].inputs["stall_s"] < 5.0  # measured by the life before; 10 s are assumed
    fixed = Training(folder)
    fixed.train(9, every=100)  # reads a step which keeps what it has no use for
    back = Training(folder)
    back.train(10, every="auto")  # and the other way round
    trained = first.trained[:saved] + again.trained + fixed.trained + back.trained
    assert trained == control.trained
    assert ckpt.open(folder).load(Training(folder).state).step == 10
    manifests = [step_folder(folder, n).joinpath("manifest.json").read_text() for n in (8, 9, 10)]
    assert ['"run"' in text for text in manifests] == [True, False, True]


def test_three_starts_that_come_to_nothing_are_a_crash_loop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), Training(tmp_path).run(every="auto"):
            raise ZeroDivisionError
    assert "crash_loop" not in kinds(tmp_path)
    Training(tmp_path).train(2, every="auto")
    assert [e.data.starts for e in events(tmp_path) if isinstance(e.data, CrashLoop)] == [3]
    assert "crash loop: 3 starts in a row ended before their first step" in caplog.text
    told = [e.data for e in events(tmp_path) if isinstance(e.data, IntervalChanged)]
    assert {change.inputs["failures"] for change in told} == {0.0}  # they teach no rate


def test_a_ledger_that_cannot_be_read_does_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Training(tmp_path).train(2, every="auto")
    for file in (tmp_path / "ledger").iterdir():
        file.unlink()
    (tmp_path / "ledger").rmdir()
    (tmp_path / "ledger").write_text("a file where a folder should be")
    Training(tmp_path).train(3, every="auto")
    assert committed(tmp_path) == [2, 3]


def test_the_ledger_tells_the_story(tmp_path: Path) -> None:
    Training(tmp_path).train(4)
    story = events(tmp_path)
    told = [e.kind for e in story if e.kind not in ("steps", "metric")]
    assert told == [
        *("run_started", "resumed", "save_started", "save_committed"),
        *("save_started", "save_committed", "finished"),
    ]
    assert {(e.epoch, e.rank, e.world, e.generation) for e in story} == {("e00000001", 0, 1, None)}
    saved = [e for e in story if isinstance(e.data, SaveCommitted)]
    assert [e.step for e in saved] == [3, 4]
    assert all(e.data.bytes > 0 and e.data.stall_s >= 0 for e in saved)  # type: ignore[union-attr]
    assert sum(e.data.n for e in story if isinstance(e.data, Steps)) == 4
    losses = [e.data for e in story if isinstance(e.data, Metric)]
    assert [m.n for m in losses] == [3, 1]  # as they came, not all at the end
    (resumed,) = [e.data for e in story if isinstance(e.data, Resumed)]
    assert {"start", "resume"} <= resumed.seconds.keys()
    again = Training(tmp_path)
    again.train(5)
    (_, resumed) = [e.data for e in events(tmp_path) if isinstance(e.data, Resumed)]
    assert resumed.attempt == "000000000004-e00000001-0"
    assert resumed.world_then == 1


def test_metrics_go_to_the_ledger_at_their_step(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with training.run() as run:
        for number, batch in run.steps(until=2):
            training.step(number, batch)
        run.metric(val_loss=torch.tensor(0.25), accuracy=1)
    rows = [(e.step, e.data.name, e.data.last) for e in events(tmp_path) if isinstance(e.data, Metric)]
    assert rows == [(2, "val_loss", 0.25), (2, "accuracy", 1.0)]


def test_the_best_steps_by_a_metric_are_kept_through_restarts(tmp_path: Path) -> None:
    losses = {2: 0.5, 4: 0.1, 6: 0.3, 8: 0.2, 10: 0.4}

    def told(run: Run, number: int) -> None:
        if number % 2:
            run.metric(val_loss=losses[number + 1])

    runs: list[Run] = []
    for until in (5, 10):
        training = Training(tmp_path)
        keep = ckpt.Best(lambda: runs[-1].metrics("val_loss"), n=2)
        runs.append(training.run(every=2, keep=keep))
        with runs[-1] as run:
            for number, batch in run.steps(until=until):
                training.step(number, batch)
                told(run, number)
    assert runs[-1].metrics("val_loss") == losses
    assert committed(tmp_path) == [4, 8, 10]


class WhenAsked(Cadence):
    """At the steps that it was given."""

    def at(self, step: int) -> bool:
        return step in (2, 7)


def test_a_cadence_of_ones_own(tmp_path: Path) -> None:
    Training(tmp_path).train(9, every=WhenAsked())
    assert committed(tmp_path) == [2, 7, 9]


def test_a_save_that_fails_in_the_background_is_raised_at_the_next_step(tmp_path: Path) -> None:
    training = Training(tmp_path)
    tmp_path.joinpath("steps").write_text("a file where a folder should be")
    with pytest.raises(StorageError):
        training.train(
            1000,
            lambda run, number: run.save() if number == 2 else time.sleep(0.01),
            every="1h",
            save_failures="raise",
        )
    assert training.last.step < 100
    assert committed(tmp_path) == []
    told = events(tmp_path)
    assert [e.step for e in told if isinstance(e.data, SaveFailed)] == [3]
    assert [e.data.error for e in told if isinstance(e.data, Error)] == ["C-E"]


def test_the_last_save_failing_is_raised_on_leaving(tmp_path: Path) -> None:
    tmp_path.joinpath("steps").write_text("a file where a folder should be")
    with pytest.raises(StorageError):
        Training(tmp_path).train(2, every=1000)
    Training(tmp_path / "next").train(1)  # the process is free for another run


def test_a_ledger_that_cannot_be_written_does_not_stop_training(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("a file where a folder should be")
    Training(tmp_path).train(4)
    assert committed(tmp_path) == [3, 4]


def test_one_run_at_a_time(tmp_path: Path) -> None:
    first, second = Training(tmp_path / "1"), Training(tmp_path / "2")
    with first.run() as run:
        with pytest.raises(Refused, match="another Run is active"), second.run():
            pass
        for _ in run.steps(until=1):
            with pytest.raises(Refused, match="one loop at a time"):
                next(iter(run.steps(until=2)))
    with pytest.raises(Refused, match="inside the run's with block"):
        next(iter(run.steps(until=2)))
    with pytest.raises(Refused, match="this Run was entered before"), run:
        pass
    second.train(1)


def test_a_world_without_a_process_group_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(Refused, match="WORLD_SIZE is 4, but there is no process group"), Training(tmp_path).run():
        pass
    assert not (tmp_path / "epochs").exists()


def test_without_data_the_loop_draws_for_itself(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)

    def draws(until: int) -> list[float]:
        drawn = []
        with Run(str(tmp_path), ckpt.State(model=model, best=1.5), every=2) as run:
            for step, batch in run.steps(until=until):
                assert batch is None
                drawn.append(torch.rand(1).item())
                if step == 3:
                    break
        return drawn

    torch.manual_seed(0)
    meant = [torch.rand(1).item() for _ in range(3)]
    torch.manual_seed(0)
    assert draws(6)[:3] == meant
    torch.manual_seed(5)
    assert draws(3) == meant[2:]


def test_fresh_starts_beside_what_is_there(tmp_path: Path) -> None:
    Training(tmp_path).train(4)
    fresh = Training(tmp_path)
    run = fresh.train(2, fresh=True)
    assert run.resumed.step == 0
    assert Training(tmp_path).train(3).resumed.step == 2
