"""Control runs that several drills share: one undisturbed run for each command, code and environment.

A run is found again by what could change it: the words of the command, the bytes of its script and of the modules
beside it, this toolkit's code, the versions of python and torch, the environment, the storage. Its checkpoints stay in
place, since the oracle reads them back for every drill.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drills.history import CONTROL, FILE, History
from drills.scenario import Plan

# What differs from shell to shell and from run to run, and no training should read.
_VOLATILE = (
    "_",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "TERM",
    "COLUMNS",
    "LINES",
    "PYTEST_CURRENT_TEST",
    "PYTEST_VERSION",
    "LOGNAME",
)
_MOST_FILES = 400


def key(plan: Plan) -> str:
    """What names the control run of a plan; the same for every drill and seed of it."""
    facts = {
        "command": list(plan.command), "nproc": plan.nproc, "files": [_of_word(w) for w in plan.command],
        "code": [_package(name) for name in ("ckpt", "elastic")],
        "python": platform.python_version(), "torch": _version("torch"), "cwd": os.getcwd(),
        "storage": "" if plan.default_url else plan.url_base.rsplit("/", 1)[0],
        "env": sorted((k, v) for k, v in os.environ.items() if k not in _VOLATILE),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]


class Shelf:
    """Where control runs of one key are kept: logs, events, and on a local disk checkpoints.

    Each run has a place of its own and ``kept`` names the one that counts, so that two drills that fill the shelf at
    once cannot spoil each other's. Nothing is ever deleted from an object store.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._key, self._plan = key(plan), plan
        self.folder = folder.absolute() / self._key
        self._new = uuid.uuid4().hex[:8]

    @property
    def url(self) -> str:
        """Where a new control run keeps its checkpoints."""
        if self._plan.default_url:
            return f"file://{self.folder}/{self._new}/store"
        return f"{self._plan.url_base.rsplit('/', 1)[0]}/control-{self._key}-{self._new}"

    def keep(self, run_folder: Path) -> None:
        """Keep what the control run of this drill has left; from now on it is the one that is taken."""
        place = self.folder / self._new
        place.mkdir(parents=True, exist_ok=True)
        shutil.copytree(run_folder / CONTROL, place / CONTROL, dirs_exist_ok=True)
        lines = (run_folder / FILE).read_text(encoding="utf-8").splitlines()
        events = [t for t in lines if json.loads(t).get("run") == CONTROL]
        (place / "events.jsonl").write_text("\n".join(events) + "\n", encoding="utf-8")
        draft = place / "kept"
        draft.write_text(self._new)
        draft.rename(self.folder / "kept")

    def kept(self) -> tuple[str, set[str]] | None:
        """URL of the run that is kept, and the names of the commits that it had; None when there is none."""
        events = self._events()
        if not events:
            return None
        commits = {str(e["name"]) for e in events if e["event"] == "commit.seen"}
        return next(str(e["url"]) for e in events if e["event"] == "run.started"), commits

    def take(self, run_folder: Path, history: History) -> None:
        """Put the kept run into a drill, as if it had run there."""
        place = self._place()
        shutil.copytree(place / CONTROL, run_folder / CONTROL, dirs_exist_ok=True)
        history.add("control.cached", said=f"the control run was taken from {place}")
        for e in self._events():
            history.add(e.pop("event"), **e)

    def _place(self) -> Path:
        return self.folder / (self.folder / "kept").read_text().strip()

    def _events(self) -> list[dict[str, Any]]:
        try:
            lines = (self._place() / "events.jsonl").read_text(encoding="utf-8").splitlines()
            return [json.loads(t) for t in lines]
        except (OSError, ValueError):
            return []


def _of_word(word: str) -> str:
    """A digest of the file that a word of the command names, and of the Python files beside it."""
    path = Path(word)
    if "{" in word or not path.is_file():
        return ""
    beside = sorted(path.parent.glob("*.py"))[:_MOST_FILES] if path.suffix == ".py" else []
    return _digest([path, *beside])


def _package(name: str) -> str:
    """A digest of an importable package's Python files, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return ""
    return _digest(sorted(Path(spec.submodule_search_locations[0]).rglob("*.py")))


def _digest(paths: Iterable[Path]) -> str:
    h = hashlib.sha256()
    for p in paths:
        data = p.read_bytes()
        h.update(f"{p.name} {len(data)} ".encode())
        h.update(data)
    return h.hexdigest()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
