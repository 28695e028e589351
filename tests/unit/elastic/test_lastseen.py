"""What a killed process leaves on its host: found once by its successor, whole or not at all; nothing after an end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckpt.store import open_store
from elastic.ledger import lastseen, marks
from elastic.ledger.events import LastSeen, Steps
from elastic.ledger.lastseen import LastWords, found
from elastic.ledger.power import Meter, Rapl, of_this_host
from elastic.ledger.reader import read
from elastic.ledger.summary import StepTimes
from elastic.ledger.writer import Writer


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lastseen.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def look(rank: int = 0, world: int = 2, *, first: bool = True, before: str = "e00000002") -> list[LastSeen]:
    return list(found("s3://b/run", before=before, rank=rank, world=world, first_here=first))


def words(rank: int = 0, epoch: str = "e00000001") -> LastWords:
    return LastWords("s3://b/run", epoch=epoch, start="ab", rank=rank)


def test_a_successor_finds_the_last_of_it_once() -> None:
    left = words()
    for n in range(1, 8):
        left.write(100.0 + n, n, n, 0.5 * n, 0.1, 0.2, 0.05)
    sums = {"n": 7, "seconds": 3.5, "data_s": 0.1, "boundary_s": 0.2, "save_s": 0.05}
    assert look() == [LastSeen(of_epoch="e00000001", of_start="ab", of_rank=0, unix_s=107.0, steps=7, **sums)]  # type: ignore[arg-type]
    assert look() == []


def test_a_clean_end_leaves_nothing(home: Path) -> None:
    left = words()
    left.write(1.0, 1, 1, 0.5, 0.0, 0.0, 0.0)
    left.close()
    assert look() == []
    assert list(lastseen.folder().iterdir()) == []
    assert lastseen.folder().stat().st_mode & 0o077 == 0


def test_only_its_own_rank_is_told_of_and_by_the_first_of_a_host_those_that_are_no_more() -> None:
    for rank in (0, 1, 3):
        words(rank).write(5.0, rank + 1, 1, 0.5, 0.0, 0.0, 0.0)
    assert [s.of_rank for s in look(1, 2, first=False)] == [1]
    assert [s.of_rank for s in look(0, 2)] == [0, 3]
    words(1, "e00000005").write(5.0, 1, 1, 0.5, 0.0, 0.0, 0.0)
    assert look(1) == []  # of an epoch that is not before this one


def test_being_killed_in_the_middle_of_a_write_spoils_one_of_two() -> None:
    left = words()
    for n in (1, 2):
        left.write(float(n), n, n, 0.5, 0.0, 0.0, 0.0)
    path = next(lastseen.folder().iterdir())
    content = bytearray(path.read_bytes())
    content[len(content) // 2 + 30] ^= 0xFF  # step 2 is in the second slot
    path.write_bytes(content)
    assert [s.steps for s in look()] == [1]
    path.write_bytes(b"")
    assert look() == []


def test_an_older_process_that_still_runs_keeps_out_of_the_way() -> None:
    old, new = words(), words(epoch="e00000002")
    new.write(2.0, 9, 1, 0.5, 0.0, 0.0, 0.0)
    old.write(3.0, 5, 1, 0.5, 0.0, 0.0, 0.0)
    old.close()
    assert [s.steps for s in look(before="e00000003")] == [9]


def test_a_folder_that_somebody_else_may_have_made_is_not_trusted(home: Path) -> None:
    (home / "elsewhere").mkdir()
    lastseen.folder().symlink_to(home / "elsewhere")
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        words()
    assert look() == []


PROGRAM = """
import os, sys, time
from elastic.ledger import lastseen
lastseen.tempfile.gettempdir = lambda: sys.argv[1]
left = lastseen.LastWords("s3://b/run", epoch="e00000001", start="ab", rank=0)
n = 0
while True:
    n += 1
    left.write(time.time(), n, n, 0.001 * n, 0.0, 0.0, 0.0)
    if n == 1000:
        print("going", flush=True)
"""


def test_it_outlives_kill_9(home: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(home)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        killed = time.time()
    seen = look()
    assert len(seen) == 1
    assert seen[0].steps >= 1000
    assert abs(killed - seen[0].unix_s) < 0.5
    assert seen[0].seconds == pytest.approx(0.001 * seen[0].steps)


def test_a_run_tells_of_its_predecessor_and_measures_itself(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    store = open_store(url)
    first, second = (Writer(store, epoch=f"e0000000{n}", rank=0, world=1, generation=None) for n in (1, 2))
    times = StepTimes()
    times.begin(first, url, 40)
    for _ in range(3):
        times.begin_body()
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        times.add(body_s=0.02, data_s=0.01)
        times.add_save(0.3)
        times.add_boundary(0.5)
    row = times.row()
    assert row is not None
    assert (row.n, row.save_s, row.boundary_s) == (3, pytest.approx(0.9), pytest.approx(1.5))
    assert row.cpu_s == pytest.approx(0.06, abs=0.03)
    assert row.peak_rss_bytes is not None
    assert row.peak_rss_bytes > 50 << 20
    times.add(body_s=0.5, data_s=0.25)  # killed before this is told
    again = StepTimes()
    again.begin(second, url, 40)
    first.close()
    second.close()
    seen = [e.data for e in read(store).events if isinstance(e.data, LastSeen)]
    assert len(seen) == 1
    assert (seen[0].of_epoch, seen[0].of_start, seen[0].steps, seen[0].n) == ("e00000001", first.start, 44, 1)
    assert (seen[0].seconds, seen[0].data_s) == (0.5, 0.25)
    again.close()


def test_the_parts_of_a_step_time_are_those_between_two_ends() -> None:
    times = StepTimes()
    times.add(body_s=1.0, data_s=0.5)
    times.add_save(2.0)
    times.add_boundary(2.25)
    times.add(body_s=1.0, data_s=0.5)
    row = times.row()
    assert isinstance(row, Steps)
    assert row.times is not None
    from elastic.ledger.quantiles import Quantiles

    assert Quantiles.parse(row.times).at(1.0) == pytest.approx(1.75, rel=0.01)  # with the pause, without the save


def test_where_the_folder_is_somebody_elses_a_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lastseen, "folder", lambda: Path("/proc/nothing"))
    writer = Writer(open_store(str(tmp_path / "run")), epoch="e00000001", rank=0, world=1, generation=None)
    times = StepTimes()
    times.begin(writer, "u", 0)
    times.add(body_s=1.0, data_s=0.5)
    times.close()
    writer.close()


def test_energy_is_read_from_counters_that_overflow(tmp_path: Path) -> None:
    zones = [tmp_path / "intel-rapl:0", tmp_path / "intel-rapl:1", tmp_path / "intel-rapl:0:0"]
    for zone in zones:
        zone.mkdir()
        (zone / "max_energy_range_uj").write_text("10000000\n")
        (zone / "energy_uj").write_text("9000000\n")
    meter = Meter(Rapl(tmp_path))
    (zones[0] / "energy_uj").write_text("9500000\n")
    (zones[1] / "energy_uj").write_text("500000\n")  # over its end
    (zones[2] / "energy_uj").write_text("9900000\n")  # a part of the first
    assert meter.take() == pytest.approx(0.5 + 1.5)
    assert meter.take() == 0.0
    (zones[1] / "energy_uj").unlink()
    assert meter.take() is None
    with pytest.raises(OSError, match="no processor"):
        Rapl(tmp_path / "none")
    assert of_this_host() is None or os.access("/sys/class/powercap", os.R_OK)


def test_the_age_of_a_process_is_known_to_a_tenth_of_a_second() -> None:
    code = "import sys, time; from elastic.ledger import marks; print(time.time() - marks._born_s(), time.time())"
    began = time.time()
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    age, now = map(float, answer)
    assert age == pytest.approx(now - began, abs=0.2)


def test_phases_of_a_start_are_told_where_they_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "_asked_s", None)
    assert marks.phases(time.time()).keys() == {"start"}
    marks.asked()
    assert marks.phases(time.time()).keys() == {"start"}
    marks.joined()
    phases = marks.phases(time.time())
    assert phases["import"] + phases["join"] <= phases["start"] + 1e-3
