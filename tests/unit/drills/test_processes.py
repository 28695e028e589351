"""Who is who, and what may be signalled: on real processes that the test starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from drills.errors import HarnessBroken
from drills.faults import Site
from drills.faults.process import Kill
from drills.processes import OWNER_VARIABLE, Table, birth, kill_owned, owned, wall_time
from drills.timeline import Proc

SLEEP = "import time; time.sleep(60)"
LAUNCHER = """
import os, subprocess, sys, time
for rank in "01":
    subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**os.environ, "RANK": rank}, start_new_session=True)
time.sleep(60)
"""
WORKER = "import os, subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"


@pytest.fixture
def owner() -> Iterator[str]:
    mark = f"test-{uuid.uuid4().hex}"
    yield mark
    kill_owned(mark)
    assert owned(mark) == []


def start(owner: str, code: str, *args: str, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *args], env={**os.environ, OWNER_VARIABLE: owner, **env})


def proc(p: subprocess.Popen[bytes], rank: int = 0) -> Proc:
    return Proc(pid=p.pid, rank=rank, born=birth(p.pid), started=0.0)


def until(table: Table, root: int, ranks: set[int]) -> dict[int, Proc]:
    end = time.monotonic() + 20
    while set(table.workers) != ranks and time.monotonic() < end:
        table.scan(root)
        time.sleep(0.05)
    time.sleep(0.3)
    table.scan(root)  # children of the workers inherit the rank; they must not be taken for it
    return table.workers


def test_ranks_are_found_below_a_launcher_and_their_children_are_not(owner: str) -> None:
    launcher = start(owner, LAUNCHER, WORKER)
    table = Table(owner)
    found = until(table, launcher.pid, {0, 1})
    assert set(found) == {0, 1}
    assert all(b"time.sleep" in Path(f"/proc/{p.pid}/cmdline").read_bytes() for p in found.values())
    assert len(owned(owner)) == 5
    assert abs(wall_time(birth(launcher.pid)) - time.time()) < 25
    table.close()
    kill_owned(owner)
    launcher.wait()


def test_the_kill_takes_one_rank_proves_it_and_tells_the_table(owner: str) -> None:
    launcher = start(owner, LAUNCHER, SLEEP)
    table = Table(owner)
    workers = until(table, launcher.pid, {0, 1})
    evidence = Kill().inject(Site(folder=Path("/"), owner=owner, rank=1, workers=workers))
    assert evidence["pid"] == workers[1].pid
    assert evidence["exit"] == "ended by signal 9"
    assert 0 <= evidence["gone_t"] - evidence["t"] < 5
    gone = table.ended(5)
    assert [(p.rank, p.pid) for p in gone] == [(1, workers[1].pid)]
    assert set(table.workers) == {0}
    table.close()
    kill_owned(owner)
    launcher.wait()


@pytest.mark.parametrize("what", ["another mark", "another process", "gone", "no such rank"])
def test_the_kill_refuses_what_the_drill_has_not_started(owner: str, what: str) -> None:
    p = start(owner, SLEEP)
    time.sleep(0.3)
    victim = proc(p)
    if what == "another process":
        victim = Proc(pid=p.pid, rank=0, born=victim.born + 1, started=0.0)
    if what == "gone":
        p.kill()
        p.wait()
    site = Site(folder=Path("/"), owner="other" if what == "another mark" else owner, workers={0: victim},
                rank=3 if what == "no such rank" else 0)  # fmt: skip
    with pytest.raises(HarnessBroken):
        Kill().inject(site)
    assert what == "gone" or p.poll() is None
    kill_owned(owner)
    p.wait()


def test_a_process_that_ended_by_itself_is_not_a_kill(owner: str) -> None:
    p = start(owner, "import os; os._exit(3)")
    victim = proc(p)
    time.sleep(1.0)  # a zombie now, since nobody waits for it
    with pytest.raises(HarnessBroken):
        Kill().inject(Site(folder=Path("/"), owner=owner, workers={0: victim}))
    p.wait()


def test_a_process_that_wins_the_race_to_its_own_end_is_not_a_kill(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = start(owner, "import os, signal, time; signal.signal(signal.SIGUSR1, lambda *a: os._exit(3)); time.sleep(60)")
    time.sleep(1.0)
    send = signal.pidfd_send_signal
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda fd, number: send(fd, signal.SIGUSR1))
    with pytest.raises(HarnessBroken, match="ended by itself before the signal arrived"):
        Kill().inject(Site(folder=Path("/"), owner=owner, workers={0: proc(p)}))
    p.wait()


def test_what_hangs_on_nothing_any_more_is_still_found(owner: str) -> None:
    p = start(owner, "import os, subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)")
    p.wait()
    assert [x.name() for x in owned(owner)] == ["sleep"]
    kill_owned(owner)
    assert owned(owner) == []


def test_a_command_without_ranks_is_known_by_its_log(owner: str) -> None:
    p = start(owner, SLEEP)
    time.sleep(0.2)
    table = Table(owner)
    assert table.scan(p.pid) == []
    assert table.adopt(0, p.pid) is not None
    assert table.adopt(0, p.pid) is None
    assert table.adopt(1, os.getpid()) is None
    assert set(table.workers) == {0}
    table.close()
    kill_owned(owner)
    p.wait()
