"""Several batches a step, and evaluation inside a step: in one process here, on several ranks in tests/dist."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from ckpt.errors import Refused
from elastic import ElasticSampler, Run
from elastic.ledger.events import Evaluated, Steps, Stopped, StopRequested
from elastic.stop import StopRequests, iterate
from tests.dist.readback import differences, step_folder
from tests.unit.elastic.test_run import Training, at, committed, events

pytestmark = pytest.mark.usefixtures("handlers")
VALIDATION = TensorDataset(torch.randn(20, 4, generator=torch.Generator().manual_seed(9)))


@pytest.fixture
def handlers() -> Any:
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    for number in before:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# --- next_batch -------------------------------------------------------------------------------------------------------


def several(folder: Path, until: int, stop_at: int | None = None) -> list[int]:
    """A loop whose step number n takes 1 + n % 3 batches; the samples it trained on."""
    data = TensorDataset(torch.arange(40))
    loader = DataLoader(data, batch_sampler=ElasticSampler(data, 4, seed=2), num_workers=0)
    seen: list[int] = []
    with Run(str(folder), ckpt.State(data=loader), every=1) as run:
        for step in run.steps(until=until):
            mine = [step.batch, *(step.next_batch() for _ in range(step.number % 3))]
            if step.number == stop_at:
                raise ZeroDivisionError
            seen += [i for (ids,) in mine for i in ids.tolist()]
    return seen


def test_a_step_of_several_batches_counts_them_all(tmp_path: Path) -> None:
    whole = several(tmp_path / "whole", 10)
    assert len(whole) == 4 * (4 * 1 + 3 * 2 + 3 * 3)
    assert sorted(whole[:40]) == list(range(40))
    folder = tmp_path / "crashed"
    with pytest.raises(ZeroDivisionError):
        several(folder, 10, stop_at=5)
    assert several(folder, 10) == whole[4 * (1 + 2 + 3 + 1 + 2) :]


def test_micro_batches_and_several_batches_do_not_mix(tmp_path: Path) -> None:
    data = TensorDataset(torch.arange(40))
    loader = DataLoader(data, batch_sampler=ElasticSampler(data, 4, micro=1))
    with Run(str(tmp_path), ckpt.State(data=loader)) as run:
        step = next(run.steps(until=2))
        with pytest.raises(Refused, match="micro-batches"):
            step.next_batch()


def test_no_data_no_next_batch(tmp_path: Path) -> None:
    with Run(str(tmp_path), ckpt.State(n=1)) as run:
        step = next(run.steps(until=2))
        with pytest.raises(Refused, match="no data"):
            step.next_batch()


# --- evaluation -------------------------------------------------------------------------------------------------------


def evaluate(training: Training, run: Run) -> float:
    """Draws from every random stream, and builds a loader whose iterator draws one more."""
    total = 0.0
    with run.evaluation() as ev:
        assert not training.model.training
        for (x,) in ev.batches(DataLoader(VALIDATION, batch_size=4, shuffle=True)):
            total += float(training.model(x + random.random() + np.random.rand()).square().sum())
    return total


@pytest.mark.parametrize("frozen", [False, True])
def test_evaluation_changes_nothing_in_training(tmp_path: Path, frozen: bool) -> None:
    trained, modes = [], []
    for name, every in (("plain", 99), ("evaluated", 3)):
        training = Training(tmp_path / name)
        training.model[1].train(not frozen)  # a mode that the user has chosen stays
        training.train(
            10,
            lambda run, n, t=training, every=every: evaluate(t, run) if n % every == every - 1 else None,  # type: ignore[misc]
        )
        trained.append(training.trained)
        modes.append([m.training for m in training.model.modules()])
    assert trained[0] == trained[1]
    assert differences(step_folder(tmp_path / "evaluated", 10), step_folder(tmp_path / "plain", 10)) == []
    assert modes == [[True, True, not frozen, True]] * 2


def test_generators_of_the_state_are_put_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    with Run(str(tmp_path), ckpt.State(generator=generator)) as run:
        for _ in run.steps(until=1):
            before = generator.get_state()
            with run.evaluation():
                torch.rand(3, generator=generator)
            assert torch.equal(generator.get_state(), before)


def test_its_time_is_told_apart(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with training.run(every=100) as run:
        for number, batch in run.steps(until=3):
            training.step(number, batch)
            with run.evaluation() as ev:
                time.sleep(0.05)
            assert ev.seconds >= 0.05
    rows = [e for e in events(tmp_path) if isinstance(e.data, Evaluated)]
    assert [e.step for e in rows] == [0, 1, 2]
    assert all(0.05 <= e.data.seconds < 5 and not e.data.stopped for e in rows)  # type: ignore[union-attr]
    steps = [e.data for e in events(tmp_path) if isinstance(e.data, Steps)]
    assert sum(s.seconds for s in steps) < sum(e.data.seconds for e in rows)  # type: ignore[union-attr]


def test_a_stop_ends_an_evaluation_early_and_saves_the_step(tmp_path: Path) -> None:
    training = Training(tmp_path)
    seen: list[int] = []
    caught: list[bool] = []

    def long(run: Run, number: int) -> None:
        if number != 4:
            return
        with run.evaluation() as ev:
            for n in ev.batches(range(1000)):
                seen.append(n)
                if n == 6:
                    os.kill(os.getpid(), signal.SIGTERM)
        caught.append(ev.stopped)

    with pytest.raises(SystemExit):
        training.train(10, long, every=100)
    assert (seen, caught) == (list(range(7)), [True])
    assert committed(tmp_path) == [5]
    assert [e.data.stopped for e in events(tmp_path) if isinstance(e.data, Evaluated)] == [True]


def test_a_break_out_of_it_is_no_stop(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with training.run(every=100) as run:
        for number, batch in run.steps(until=3):
            training.step(number, batch)
            with run.evaluation() as ev:
                for n in ev.batches(range(1000)):
                    if n == 2:
                        break
            assert not ev.stopped
    assert run.step == 3


def test_after_the_loop_and_never_two_at_once(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with pytest.raises(Refused, match="with block"), training.run().evaluation():
        pass
    with training.run() as run:
        for number, batch in run.steps(until=2):
            training.step(number, batch)
        with run.evaluation() as ev:
            assert list(ev.batches("abc")) == ["a", "b", "c"]
            with pytest.raises(Refused, match="one at a time"), run.evaluation():
                pass
    assert committed(tmp_path) == [2]


def test_an_exception_in_it_is_an_exception_of_the_step(tmp_path: Path) -> None:
    training = Training(tmp_path)

    def fail(run: Run, number: int) -> None:
        if number == 2:
            with run.evaluation():
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        training.train(5, fail, every=1)
    assert committed(tmp_path) == [1, 2]
    assert training.model.training


# --- being asked to stop ----------------------------------------------------------------------------------------------


def test_a_signal_is_told_while_the_main_thread_runs_no_python(tmp_path: Path) -> None:
    told = threading.Event()
    requests = StopRequests(told=lambda: told.set, grace_s=7.0)
    with requests:
        sender = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGTERM))
        sender.start()
        began, ended = time.monotonic(), 0.0
        while not told.is_set() or ended == 0.0:
            torch.linalg.svdvals(torch.randn(1200, 1200))  # one long call in C
            ended = time.monotonic()
            assert ended - began < 60
    assert requests.name == "SIGTERM"
    assert requests.within_s == 7.0
    sender.join()


def test_a_forked_child_dies_of_sigterm_and_does_not_speak_for_its_parent() -> None:
    with StopRequests() as requests:
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
            os._exit(0)
        os.kill(pid, signal.SIGTERM)  # at once: there is no moment in which it would be lost
        assert os.waitpid(pid, 0)[1] == signal.SIGTERM
        time.sleep(0.05)
        assert requests.name is None


@pytest.mark.parametrize(("grace", "wait_s", "in_time"), [("30s", 0.0, True), ("10ms", 0.1, False)])
def test_the_ledger_says_whether_the_save_was_in_time(tmp_path: Path, grace: str, wait_s: float, in_time: bool) -> None:
    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(wait_s)

    with pytest.raises(SystemExit):
        Training(tmp_path).train(100, at(4, stop), grace=grace)
    story = [e.data for e in events(tmp_path)]
    (asked,) = [d for d in story if isinstance(d, StopRequested)]
    (stopped,) = [d for d in story if isinstance(d, Stopped)]
    assert asked.within_s == (30.0 if in_time else 0.01)
    assert stopped.in_time is in_time
    assert stopped.took_s is not None
    assert stopped.took_s >= wait_s


def test_a_stop_heard_in_an_evaluation_after_the_loop_ends_with_75(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with pytest.raises(SystemExit) as caught, training.run() as run:  # noqa: PT012
        for number, batch in run.steps(until=2):
            training.step(number, batch)
        with run.evaluation() as ev:
            for n in ev.batches(range(100)):
                if n == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 75
    assert committed(tmp_path) == [2]


def test_an_event_loop_that_begins_inside_keeps_its_signals() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    try:
        with StopRequests():
            signal.set_wakeup_fd(ours.fileno())
        assert signal.set_wakeup_fd(-1) == ours.fileno()
    finally:
        signal.set_wakeup_fd(-1)
        ours.close()
        theirs.close()


def test_with_an_event_loop_outside_a_signal_is_told_all_the_same() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    told = threading.Event()
    signal.set_wakeup_fd(ours.fileno())
    try:
        with StopRequests(told=lambda: told.set):
            os.kill(os.getpid(), signal.SIGTERM)
            assert told.wait(10)
    finally:
        signal.set_wakeup_fd(-1)
        ours.close()
        theirs.close()


def test_a_fork_leaves_the_mask_of_its_caller_as_it_was() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        with StopRequests():
            pid = os.fork()
            if pid == 0:
                os._exit(0 if signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ()) else 1)
            assert os.waitpid(pid, 0)[1] == 0
            now = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            assert signal.SIGUSR1 in now
            assert signal.SIGTERM not in now
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_worker_ends_when_its_parent_says_so_and_not_when_others_do() -> None:
    def forks() -> Iterator[int]:
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        return iter([pid])

    class Source:
        def __iter__(self) -> Iterator[int]:
            return forks()

    with StopRequests():
        (pid,) = iterate(Source())
        subprocess.run(["kill", "-TERM", str(pid)], check=True)  # another process
        time.sleep(0.3)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        os.kill(pid, signal.SIGTERM)
        assert os.waitpid(pid, 0)[1] == (128 + signal.SIGTERM) << 8
