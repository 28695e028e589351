"""Each fault on real processes and files: it fires, it is undone, and it touches nothing else."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from drills.errors import HarnessBroken, NotPossible
from drills.faults import Site
from drills.faults.clock import ClockJump
from drills.faults.disk import FullDisk
from drills.faults.gates import FileGate
from drills.faults.process import Freeze, Kill, KillAgent, KillJob, Stale, Terminate
from drills.faults.rest import Damage
from drills.faults.slow import MemorySqueeze, Throttle
from drills.faults.storage import StorageFault
from drills.processes import OWNER_VARIABLE, kill_owned, owned, proc_of

SLEEP = "import time; print('up', flush=True); time.sleep(300)"
COUNT = "import time; print('up', flush=True)\nwhile True: pass"
CLOCK = """
import sys, time
print('up', flush=True)
while True:
    print(time.time(), time.time_ns() / 1e9, flush=True)
    time.sleep(0.02)
"""


class Jobs:
    """Processes that carry the mark of a drill."""

    def __init__(self, folder: Path) -> None:
        self.owner = f"test{uuid.uuid4().hex[:12]}:drilled"
        self.started: list[subprocess.Popen[str]] = []
        self.site = Site(folder=folder, owner=self.owner, url=f"file://{folder}/store/drilled")

    def start(self, code: str, *args: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        p = subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True,
                             env={**os.environ, **(env or {}), OWNER_VARIABLE: self.owner})  # fmt: skip
        self.started.append(p)
        assert p.stdout is not None
        assert p.stdout.readline() == "up\n"
        rank = len(self.site.workers)
        self.site = replace(self.site, workers={**self.site.workers, rank: proc_of(p.pid, rank)})
        return p


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path)
    yield made
    kill_owned(made.owner)
    for p in made.started:
        p.communicate(timeout=30)
    assert owned(made.owner) == []


def until(true: Callable[[], bool], timeout_s: float = 30) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.01)
    return False


def state(p: subprocess.Popen[str]) -> str:
    return str(psutil.Process(p.pid).status())


def test_all_ranks_are_killed_at_once_and_a_bystander_is_not(jobs: Jobs) -> None:
    a, b = jobs.start(SLEEP), jobs.start(SLEEP)
    bystander = subprocess.Popen([sys.executable, "-c", SLEEP])
    try:
        evidence = Kill(which="all").inject(jobs.site)
        assert sorted(evidence["pids"]) == sorted((a.pid, b.pid))
        assert "all 2 ranks" in evidence["said"]
        assert (a.wait(), b.wait()) == (-9, -9)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_frozen_process_is_seen_stopped_and_goes_on_when_healed(jobs: Jobs) -> None:
    a, b = jobs.start(SLEEP), jobs.start(SLEEP)
    evidence = Freeze().inject(replace(jobs.site, rank=1))
    assert evidence["frozen"] == [b.pid]
    assert (state(a), state(b)) == ("sleeping", "stopped")
    assert str(b.pid) in Freeze().heal(jobs.site)
    assert until(lambda: state(b) == "sleeping")
    assert Freeze().heal(jobs.site) == "nothing to undo"


def test_a_stale_job_is_stopped_whole(jobs: Jobs) -> None:
    a, b = jobs.start(SLEEP), jobs.start(SLEEP)
    evidence = Stale().inject(jobs.site)
    assert sorted(evidence["stale"]) == sorted((a.pid, b.pid))
    assert (state(a), state(b)) == ("stopped", "stopped")
    Stale().heal(jobs.site)
    assert until(lambda: state(a) == "sleeping")


def test_a_process_that_is_held_back_gets_its_share_and_no_more(jobs: Jobs) -> None:
    p = jobs.start(COUNT)
    fault = Throttle(share=0.2)

    def stopped(samples: int = 150) -> float:
        seen = 0
        for _ in range(samples):
            seen += state(p) == "stopped"
            time.sleep(0.007)
        return seen / samples

    fault.inject(jobs.site)
    assert until(lambda: state(p) == "stopped")
    assert 0.5 < stopped() < 0.99  # four fifths, and what a busy machine adds or takes
    assert fault.heal(jobs.site).startswith("let go")
    assert stopped(30) == 0


def test_memory_is_limited_for_one_process_and_given_back(jobs: Jobs) -> None:
    p = jobs.start("import sys; print('up', flush=True); sys.stdin.readline(); bytearray(1 << 30)")
    evidence = MemorySqueeze().inject(jobs.site)
    assert resource.prlimit(p.pid, resource.RLIMIT_AS)[0] == evidence["limit_bytes"]
    assert str(p.pid) in MemorySqueeze().heal(jobs.site)
    soft, hard = resource.prlimit(p.pid, resource.RLIMIT_AS)
    assert soft == hard


def test_a_process_at_its_limit_gets_no_more(jobs: Jobs) -> None:
    code = "import os, sys, time; print('up', flush=True)\nwhile not os.path.exists(sys.argv[1]): time.sleep(.01)\n"
    go = jobs.site.folder / "go"
    p = jobs.start(code + "bytearray(1 << 30)", str(go))
    MemorySqueeze().inject(jobs.site)
    go.touch()
    assert p.wait(30) == 1


def test_the_clock_is_wrong_in_the_targets_processes_only(jobs: Jobs) -> None:
    fault = ClockJump(offset_s=-3600.0)
    p = jobs.start(CLOCK, env=fault.setup(jobs.site))
    assert p.stdout is not None
    assert abs(float(p.stdout.readline().split()[0]) - time.time()) < 30
    fault.inject(jobs.site)

    def off(by: float) -> bool:
        assert p.stdout is not None
        seconds, nanoseconds = map(float, p.stdout.readline().split())
        return abs(seconds - by - time.time()) < 30 and abs(nanoseconds - by - time.time()) < 30

    assert until(lambda: off(-3600))
    assert fault.heal(jobs.site) == "the clock is right again"
    assert until(lambda: off(0))


def test_a_clock_that_nobody_reads_is_no_fault(jobs: Jobs) -> None:
    fault = ClockJump(timeout_s=0.3)
    fault.setup(jobs.site)
    with pytest.raises(HarnessBroken, match="no process of the run has asked"):
        fault.inject(jobs.site)


def test_a_job_is_killed_whole_and_an_empty_one_is_not_struck(jobs: Jobs) -> None:
    p = jobs.start(SLEEP)
    evidence = KillJob().inject(replace(jobs.site, root=proc_of(p.pid)))
    assert evidence["pids"] == [p.pid]
    assert p.wait() == -9
    with pytest.raises(HarnessBroken, match="nothing of the run"):
        KillJob().inject(jobs.site)


def test_a_notice_that_is_enough_and_one_that_is_not(jobs: Jobs) -> None:
    polite = jobs.start(SLEEP)
    evidence = Terminate(notice_s=20).inject(replace(jobs.site, root=proc_of(polite.pid)))
    assert evidence["left"] == 0
    deaf = jobs.start("import signal, time; signal.signal(15, 1); print('up', flush=True); time.sleep(300)")
    evidence = Terminate(notice_s=0.3).inject(replace(jobs.site, root=proc_of(deaf.pid)))
    assert evidence["left"] == 1
    assert deaf.wait() == -9


def test_a_command_that_is_itself_a_rank_has_no_launcher_to_kill(jobs: Jobs) -> None:
    p = jobs.start(SLEEP)
    with pytest.raises(HarnessBroken, match="no launcher"):
        KillAgent().inject(replace(jobs.site, root=proc_of(p.pid)))
    assert p.poll() is None


WRITER = """
import os, sys, time
root = sys.argv[1]
data = root + '/steps/000000000007/e00000001-0/__0_0.distcp'
print('up', flush=True)
os.makedirs(root + '/steps/000000000007/e00000001-0'); os.makedirs(root + '/commits')
for n in range(200):
    time.sleep(0.02)
    with open(root + '/turns', 'w') as f: f.write(str(n))
    with open(data, 'wb') as f: f.write(b'x')
    if os.path.exists(data): open(data, 'rb').close()
    open(root + '/commits/tmp', 'wb').close()
    try:
        os.rename(root + '/commits/tmp', root + '/commits/000000000007-e00000001-0.json')
    except OSError as e:
        print('refused', e.errno, flush=True)
print('done', flush=True)
"""


@pytest.mark.parametrize(("phase", "said"), [
    ("save", "its open of steps/000000000007"), ("load", "its open of steps/000000000007"),
    ("commit", "its rename of commits/000000000007-e00000001-0.json"),
])  # fmt: skip
def test_a_file_call_is_held_in_its_phase_and_let_go(jobs: Jobs, phase: str, said: str) -> None:
    gate = FileGate(jobs.site.folder / "gate")
    p = jobs.start(WRITER, str(jobs.site.local), env=gate.env())
    gate.close(phase, 3)
    assert until(lambda: gate.held(jobs.site.workers) is not None)
    held = gate.held(jobs.site.workers)
    assert held is not None
    assert (held.pid, held.rank, held.phase) == (p.pid, 0, phase)
    assert held.what.startswith(said)
    turns = Path(f"{jobs.site.local}/turns")
    before = turns.read_text()
    time.sleep(0.5)
    assert turns.read_text() == before
    gate.open(drop=False)
    assert p.stdout is not None
    assert p.stdout.readline() == "done\n"


def test_a_gate_for_later_steps_holds_nobody(jobs: Jobs) -> None:
    gate = FileGate(jobs.site.folder / "gate")
    gate.close("save", 7)
    p = jobs.start(WRITER, str(jobs.site.local), env=gate.env())
    assert p.stdout is not None
    assert p.stdout.readline() == "done\n"
    assert gate.held(jobs.site.workers) is None


def test_a_local_storage_refuses_file_calls_until_it_is_healed(jobs: Jobs) -> None:
    fault = StorageFault(kind="reset")
    patient = WRITER.replace("    with open(data, 'wb') as f: f.write(b'x')\n", "")  # it only commits, and takes a no
    assert patient != WRITER
    p = jobs.start(patient, str(jobs.site.local), env=fault.setup(jobs.site))
    fault.inject(jobs.site)
    assert p.stdout is not None
    assert p.stdout.readline() == "refused 5\n"
    assert "requests were harmed" in fault.heal(jobs.site)
    assert until(lambda: p.stdout is not None and p.stdout.readline() == "done\n")
    assert fault.heal(jobs.site) == "nothing to undo"


def test_a_storage_fault_that_met_no_request_was_none(jobs: Jobs) -> None:
    fault = StorageFault(kind="slow")
    fault.setup(jobs.site)
    fault.inject(jobs.site)
    with pytest.raises(HarnessBroken, match="no request came"):
        fault.heal(jobs.site)


def test_what_only_a_wire_can_do_is_not_possible_on_a_disk(jobs: Jobs) -> None:
    with pytest.raises(NotPossible, match="cannot be harmed"):
        StorageFault(kind="truncate").setup(jobs.site)


def test_a_disk_is_full_to_the_last_byte_and_empty_again(jobs: Jobs) -> None:
    fault, folder = FullDisk(), jobs.site.local
    assert folder is not None
    try:
        fault.setup(jobs.site)
    except NotPossible as e:
        pytest.skip(str(e))
    try:
        (folder / "kept").write_bytes(b"1")
        assert "0 bytes free" in fault.inject(jobs.site)["said"]
        with pytest.raises(OSError, match="No space"):
            (folder / "more").write_bytes(b"1" * 8192)
        assert "ballast is gone" in fault.heal(jobs.site)
        (folder / "more").write_bytes(b"1")
    finally:
        fault.heal(jobs.site)
        fault.clear(jobs.site)
    assert not os.path.ismount(folder)
    assert {p.name for p in folder.iterdir()} == {"kept", "more"}


def stored(folder: Path, steps: int = 3) -> None:
    for step in range(1, steps + 1):
        attempt = folder / f"steps/{step:012d}/e00000001-0"
        attempt.mkdir(parents=True)
        (attempt / "__0_0.distcp").write_bytes(bytes([step]) * 1000)
        (attempt / "manifest.json").write_text("{}" * 2000)
        (folder / "commits").mkdir(exist_ok=True)
        (folder / f"commits/{step:012d}-e00000001-0.json").write_text("{}")


@pytest.mark.parametrize(("kind", "which", "good"), [
    ("flip", "newest", 2), ("truncate", "newest", 2), ("delete", "all-but-oldest", 1), ("swap", "newest", 2),
])  # fmt: skip
def test_data_at_rest_are_damaged_where_it_is_said(jobs: Jobs, kind: str, which: str, good: int) -> None:
    folder = jobs.site.local
    assert folder is not None
    stored(folder)
    jobs.start(SLEEP)
    evidence = Damage(kind=kind, which=which).inject(jobs.site)
    assert evidence["good_step"] == good
    assert owned(jobs.owner) == []
    harmed = {s: data(folder, s) != bytes([s]) * 1000 for s in (1, 2, 3)}
    assert harmed == {s: s > good for s in (1, 2, 3)}
    if kind == "flip":
        assert sum(a != b for a, b in zip(data(folder, 3), bytes([3]) * 1000, strict=True)) == 1


def data(folder: Path, step: int) -> bytes:
    path = folder / f"steps/{step:012d}/e00000001-0/__0_0.distcp"
    return path.read_bytes() if path.exists() else b""


def test_the_only_step_is_not_damaged(jobs: Jobs) -> None:
    folder = jobs.site.local
    assert folder is not None
    stored(folder, 1)
    jobs.start(SLEEP)
    with pytest.raises(HarnessBroken, match="only 1 committed"):
        Damage().inject(jobs.site)
    assert data(folder, 1) == bytes([1]) * 1000


def test_a_rule_is_written_whole(tmp_path: Path) -> None:
    gate = FileGate(tmp_path / "gate")
    gate.close("save", 1)
    assert json.loads((tmp_path / "gate/rule.json").read_text())["after_step"] == 1
