"""What a drill that was itself killed has left behind: written down before it is done, found and healed later.

One small file for each drill under way, in a folder of the user's own. A file whose drill is gone is worked through:
processes by the mark in their environment, mounts by the mark in the mount table; nothing else is ever touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drills.processes import birth, kill_marked, owned_by


def folder() -> Path:
    """Where the files are: ``$XDG_STATE_HOME/torchrelay``, else a folder below the temporary one, private."""
    base = os.environ.get("XDG_STATE_HOME")
    path = Path(base) / "torchrelay" if base else Path(tempfile.gettempdir()) / f"torchrelay-drills-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def begin(drill: str, run_folder: Path) -> None:
    """Write down that this process holds the drill of this id."""
    _write(drill, {"drill": drill, "pid": os.getpid(), "born": birth(os.getpid()), "folder": str(run_folder),
                   "mounts": []})  # fmt: skip


def end(drill: str) -> None:
    """The drill has put everything back."""
    _path(drill).unlink(missing_ok=True)


@contextlib.contextmanager
def noting(owner: str, *, mount: str) -> Iterator[None]:
    """Write a mount down before it is made."""
    drill = owner.partition(":")[0]
    state = _read(_path(drill))
    if state:
        _write(drill, {**state, "mounts": [*state["mounts"], mount]})
    yield


def unmount(path: str, owner: str) -> None:
    """Unmount what this drill has mounted there, and nothing else."""
    mark = f"torchrelay-{owner.partition(':')[0]}"
    if (mark, path) in _mounts():
        subprocess.run(["umount", path], check=False, capture_output=True, timeout=20)


def heal() -> list[str]:
    """Undo what drills that are gone have left; one sentence for each drill."""
    said = []
    for path in sorted(folder().glob("*.json")):
        state = _read(path)
        if state is None or _alive(state):
            continue
        drill = str(state["drill"])
        done = []
        if processes := owned_by(drill):
            kill_marked(drill)
            done.append(f"{len(processes)} processes ended")
        for mount in state["mounts"]:
            if (f"torchrelay-{drill}", mount) in _mounts():
                unmount(mount, drill)
                done.append(f"{mount} unmounted")
        left = [m for m in state["mounts"] if (f"torchrelay-{drill}", m) in _mounts()]
        if left or owned_by(drill):
            said.append(f"drill {drill} in {state['folder']} was killed, and not all could be put back: {left}")
            continue
        path.unlink(missing_ok=True)
        said.append(f"healed what the drill in {state['folder']} had left when it was killed: "
                    f"{', '.join(done) or 'nothing was left'}")  # fmt: skip
    return said


def _alive(state: dict[str, Any]) -> bool:
    try:
        return birth(int(state["pid"])) == int(state["born"])
    except OSError:
        return False


def _mounts() -> set[tuple[str, str]]:
    """(source, place) of every mount; octal escapes of the table undone."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    pairs = (line.split()[:2] for line in lines)
    return {(a, b.encode().decode("unicode_escape")) for a, b in pairs}


def _path(drill: str) -> Path:
    return folder() / f"{drill}.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        state = json.loads(path.read_text())
        return state if {"drill", "pid", "born", "folder", "mounts"} <= state.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _write(drill: str, state: dict[str, Any]) -> None:
    draft = _path(drill).with_suffix(".new")
    draft.write_text(json.dumps(state))
    draft.rename(_path(drill))
