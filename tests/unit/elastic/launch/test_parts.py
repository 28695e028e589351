"""Heartbeats, the fork server and its crew with real processes; torch's private names."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic.launch import beats
from elastic.launch.beats import Board
from elastic.launch.crew import Crew
from elastic.launch.task import PROGRAM, SCRIPT, Task
from elastic.launch.torchelastic import PRIVATE
from tests.dist.launch import ROOT


@pytest.fixture
def crew() -> Iterator[Crew]:
    it = Crew(method="forkserver", preload=())
    yield it
    it.close()


def program(rank: int, *argv: str) -> Task:
    return Task(local_rank=rank, kind=PROGRAM, argv=argv, env=dict(os.environ))


def until(ready: object, timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while not ready():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:  # an orphan may have become a child of this process, which reaps nobody
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_ends_come_in_order_with_their_statuses(crew: Crew) -> None:
    crew.start([program(0, "sh", "-c", "exit 3"), program(1, "sh", "-c", "sleep 0.3; kill -9 $$")])
    ended = []
    while len(ended) < 2:
        ended += crew.wait(20)
    assert [(e.local_rank, e.status) for e in ended] == [(0, 3), (1, -9)]
    assert crew.pids == {}


def test_a_stopped_worker_that_ignores_sigterm_is_gone_in_bounded_time(crew: Crew) -> None:
    pids = crew.start([program(0, "sh", "-c", "trap '' TERM; kill -STOP $$; sleep 60"), program(1, "sleep", "60")])
    until(lambda: psutil.Process(pids[0]).status() == psutil.STATUS_STOPPED)
    began = time.monotonic()
    assert crew.stop(signal.SIGTERM, 0.2) == []
    assert time.monotonic() - began < 4
    assert all(map(gone, pids.values()))


def test_what_a_dead_worker_left_behind_goes_too(crew: Crew, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    script = f"setsid sleep 60 & echo $! >> {file}; sleep 60 & echo $! >> {file}; exit 1"
    crew.start([program(0, "sh", "-c", script)])
    assert [e.status for e in crew.wait(20)] == [1]
    left = [int(x) for x in file.read_text().split()]
    assert not any(map(gone, left))
    crew.stop(signal.SIGTERM, 1.0)
    until(lambda: all(map(gone, left)))


def test_the_next_generation_starts_after_the_fork_server_was_killed(crew: Crew) -> None:
    pids = crew.start([program(0, "sh", "-c", "setsid sleep 60 & sleep 60")])
    until(lambda: len(psutil.Process(pids[0]).children()) == 2)
    left = [p.pid for p in psutil.Process(pids[0]).children()]
    psutil.Process(pids[0]).parent().kill()
    assert [(e.local_rank, e.status) for e in crew.wait(20)] == [(0, -9)]
    crew.stop(signal.SIGTERM, 0.1)
    until(lambda: all(map(gone, [pids[0], *left])))
    crew.start([program(0, "true")])
    assert [e.status for e in crew.wait(20)] == [0]


def test_no_descriptor_is_left_after_many_generations(crew: Crew) -> None:
    def generation() -> int:
        crew.start([program(0, "false"), program(1, "sleep", "60")])
        crew.wait(20)
        crew.stop(signal.SIGTERM, 1.0)
        return len(os.listdir("/proc/self/fd"))

    first = generation()
    assert {generation() for _ in range(5)} == {first}


@pytest.mark.parametrize("whom", ["launcher", "both"])
def test_a_launcher_that_is_killed_leaves_nobody(whom: str) -> None:
    """With its fork server, nobody is left to clean up: the kernel ends the workers, though not what they started."""
    code = (
        "import os, sys, time\n"
        "from elastic.launch.crew import Crew\n"
        "from elastic.launch.task import *\n"
        "crew = Crew(method='forkserver', preload=())\n"
        "script = 'setsid sleep 60 & echo $! $$; exec sleep 60'\n"
        "crew.start([Task(local_rank=0, kind=PROGRAM, argv=('sh', '-c', script), env=dict(os.environ))])\n"
        "time.sleep(60)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    assert launcher.stdout is not None
    pids = [int(x) for x in launcher.stdout.readline().split()]
    assert len(pids) == 2
    assert not any(map(gone, pids))
    if whom == "both":
        launcher.send_signal(signal.SIGSTOP)
        psutil.Process(pids[1]).parent().kill()
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    if whom == "both":
        until(lambda: gone(pids[1]))
        os.kill(pids[0], signal.SIGKILL)
    until(lambda: all(map(gone, pids)))


def test_an_import_that_starts_a_thread_makes_workers_start_by_exec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "threads_at_import.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='idler', daemon=True).start()\n"
    )
    script = tmp_path / "script.py"
    script.write_text("import sys, threading; sys.exit(40 + threading.active_count())")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from elastic.launch import forkserver\n"
        "import threads_at_import\n"
        "print(forkserver.unsafe_to_fork())\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    assert said.stdout == "an import has started the thread 'idler'\n"
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    crew = Crew(method="forkserver", preload=("threads_at_import",))
    try:
        assert crew.ready() == "an import has started the thread 'idler'"
        crew.start([Task(local_rank=0, kind=SCRIPT, argv=(str(script),), env=dict(os.environ))])
        assert [e.status for e in crew.wait(30)] == [41]  # a fresh interpreter, nobody listens to its heart
    finally:
        crew.close()


def test_a_beat_is_read_as_it_was_written() -> None:
    board = Board(2)
    slot = beats._Slot(board._memory, beats.SLOT)
    assert board.read(1) == beats.Beat()
    slot.loop(41, beats.PHASES.index("save"))
    beat = board.read(1)
    assert (beat.step, beat.phase) == (41, "save")
    assert abs(beat.loop_s - time.monotonic()) < 1
    assert board.read(0) == beats.Beat()
    beats._LOOP.pack_into(board._memory, beats.SLOT, 9, 42, 1, 0, 8)  # half written: the last whole one counts
    assert board.read(1).step == 41
    board.clear()
    assert board.read(1) == beats.Beat()
    board.close()


def test_a_beat_costs_microseconds() -> None:
    board = Board(1)
    slot = beats._Slot(board._memory, 0)
    best = min(_time(lambda: [slot.loop(n, 1) for n in range(1000)]) for _ in range(5))
    assert best / 1000 < 20e-6
    board.close()


def _time(call: object) -> float:
    began = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - began


def test_where_the_main_thread_is() -> None:
    names: dict[str, object] = {"__name__": "torch.distributed.fake", "sys": sys, "look": beats._whereabouts}
    exec("def collective(): return look(sys._getframe())\ndef wrapped(f): return f()", names)
    where, file, line = names["collective"]()  # type: ignore[operator]
    assert where == beats.COLLECTIVE
    assert (file, line) == (zlib.crc32(__file__.encode()), sys._getframe().f_lineno - 2)  # who called it, not torch
    assert beats._whereabouts(sys._getframe())[0] == beats.OWN_CODE

    layers: dict[str, object] = {"__name__": "torch.nn.fake", "sys": sys, "look": beats._whereabouts}
    exec("def deep(n): return deep(n - 1) if n else look(sys._getframe())", layers)
    inside = names["wrapped"](functools.partial(layers["deep"], 5))  # type: ignore[operator, arg-type]
    assert inside[0] == beats.OWN_CODE  # the wrapper of torch.distributed is far below: this is a forward pass


def test_task_travels_whole() -> None:
    task = Task(local_rank=3, kind=SCRIPT, argv=("ä.py", "--x", "1"), env={"A": "ü"}, beats_fd=5)
    assert Task.from_json(task.to_json()) == task
    assert "\n" not in json.dumps(task.to_json())


@pytest.mark.parametrize("home", PRIVATE)
def test_torch_still_has_the_private_names_that_we_use(home: str) -> None:
    module, _, path = home.partition(":")
    thing = importlib.import_module(module)
    for part in path.split("."):
        thing = getattr(thing, part)
    for name in PRIVATE[home]:
        if inspect.isfunction(thing):
            assert f"self.{name} =" in inspect.getsource(thing)
        else:
            assert callable(getattr(thing, name))


def test_torchs_loop_still_does_what_the_shim_counts_on() -> None:
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    loop = inspect.getsource(SimpleElasticAgent._invoke_run)
    for line in ("self._monitor_workers(self._worker_group)", "if self._remaining_restarts > 0:",
                 "self._restart_workers(self._worker_group)", "time.sleep(monitor_interval)"):  # fmt: skip
        assert line in loop
    private = {"elastic.launch.torchelastic"}
    for file in (ROOT / "elastic").rglob("*.py"):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        if name not in private:
            assert "distributed.elastic.agent" not in file.read_text(), name
