"""A drill that was itself killed is cleaned up after, by what it had written down, and nobody else is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from drills import leftovers
from drills.processes import OWNER_VARIABLE, birth, owned_by

HOLDER = """
import os, subprocess, sys
from pathlib import Path
from drills import leftovers
drill = sys.argv[1]
leftovers.begin(drill, Path(sys.argv[2]))
mark = {**os.environ, "TORCHRELAY_DRILL": drill + ":drilled"}
subprocess.Popen(["sleep", "300"], env=mark, start_new_session=True, stdout=subprocess.DEVNULL)
print("up", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_what_a_killed_drill_left_is_found_healed_and_said(tmp_path: Path) -> None:
    drill = uuid.uuid4().hex[:12]
    other = subprocess.Popen(["sleep", "300"], env={**os.environ, OWNER_VARIABLE: f"{drill}x:drilled"})
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, drill, str(tmp_path)], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True)  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "up\n"
        assert leftovers.heal() == []  # its drill is still there
        assert len(owned_by(drill)) == 1
        holder.kill()
        holder.communicate()
        (said,) = leftovers.heal()
        assert "1 processes ended" in said
        assert str(tmp_path) in said
        assert owned_by(drill) == []
        assert other.poll() is None
        assert leftovers.heal() == []
    finally:
        holder.kill()
        holder.communicate()
        other.kill()
        other.wait()


def test_a_mount_that_was_left_goes_and_one_that_is_not_the_drills_stays(tmp_path: Path) -> None:
    drill, mine, foreign = uuid.uuid4().hex[:12], tmp_path / "mine", tmp_path / "foreign"
    for path, mark in ((mine, f"torchrelay-{drill}"), (foreign, "somebody-else")):
        path.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", mark, str(path)], check=False,
                              capture_output=True)  # fmt: skip
        if done.returncode:
            pytest.skip("mounting is not permitted here")
    try:
        state = {"drill": drill, "pid": os.getpid(), "born": birth(os.getpid()) - 1, "folder": str(tmp_path),
                 "mounts": [str(mine), str(foreign)]}  # fmt: skip
        (leftovers.folder() / f"{drill}.json").write_text(json.dumps(state))
        (said,) = leftovers.heal()
        leftovers.unmount(str(foreign), f"{drill}:drilled")
        assert f"{mine} unmounted" in said
        assert not os.path.ismount(mine)
        assert os.path.ismount(foreign)
    finally:
        for path in (mine, foreign):
            subprocess.run(["umount", str(path)], check=False, capture_output=True)


def test_a_drill_that_ended_well_leaves_no_note(tmp_path: Path) -> None:
    leftovers.begin("abc", tmp_path)
    assert [p.name for p in leftovers.folder().iterdir()] == ["abc.json"]
    leftovers.end("abc")
    assert list(leftovers.folder().iterdir()) == []


def test_a_note_that_cannot_be_read_harms_nobody() -> None:
    (leftovers.folder() / "torn.json").write_text('{"drill": "x"')
    began = time.monotonic()
    assert leftovers.heal() == []
    assert time.monotonic() - began < 5
