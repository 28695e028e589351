"""What is really on the storage: found by listing, read back by PyTorch's own reader in another process.

Nothing here asks the toolkit. The names of commit records and step folders are taken apart with patterns of its
own, and bytes are compared by ``reader.py``, which imports torch only.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from drills.errors import HarnessBroken
from drills.history import Commit

READER = Path(__file__).with_name("reader.py")
MAX_LEDGER_EVENTS = 200

# commits/000000000042-e00000001-0.json names steps/000000000042/e00000001-0/ (an epoch may carry a random id)
_COMMIT = re.compile(r"(\d{12})-(e(\d{8})(?:\.[0-9a-f]{8})?-(\d+))\.json")
_ATTEMPT_KEY = re.compile(r"steps/(\d{12})/(e\d{8}(?:\.[0-9a-f]{8})?-\d+)/")


def parse_commit(name: str) -> Commit | None:
    """The commit that a record's file name speaks of, or None for a foreign name."""
    m = _COMMIT.fullmatch(name)
    return Commit(step=int(m[1]), name=name, folder=f"steps/{m[1]}/{m[2]}") if m else None


def by_step(commits: Iterable[Commit]) -> dict[int, Commit]:
    """The commit that counts for each step: of several, that of the highest epoch, then counter."""
    best: dict[int, tuple[tuple[int, int], Commit]] = {}
    for c in commits:
        m = _COMMIT.fullmatch(c.name)
        age = (int(m[3]), int(m[4])) if m else (0, 0)
        if c.step not in best or age > best[c.step][0]:
            best[c.step] = (age, c)
    return {step: c for step, (_, c) in sorted(best.items())}


class Storage:
    """A run on any storage that fsspec knows; only the faults that damage data at rest write to it."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        import fsspec  # type: ignore[import-untyped, unused-ignore]

        self._fs, self._root = fsspec.core.url_to_fs(url, **options)

    def commits(self) -> list[Commit]:
        """Commit records by name, one LIST; none when the folder is not there."""
        found = (parse_commit(p.rsplit("/", 1)[-1]) for p in self._list("commits"))
        return sorted((c for c in found if c), key=lambda c: c.name)

    def survey(self) -> dict[str, Any]:
        """Commits, attempts without one and their bytes, commits without a folder, unfinished uploads, the ledger."""
        commits = self.commits()
        sizes = self._attempt_sizes()
        named = {c.folder: c for c in commits}
        return {
            "commits": [c.name for c in commits],
            "unnamed": [{"folder": f, "bytes": b} for f, b in sorted(sizes.items()) if f not in named],
            "hollow": sorted(c.name for f, c in named.items() if f not in sizes),
            "bytes": sum(sizes.values()),
            "uploads": self._uploads(),
            "ledger": self._ledger(),
        }

    def _uploads(self) -> list[str]:
        """Keys of uploads in parts that nobody has finished or aborted; they cost money and no listing shows them."""
        call = getattr(self._fs, "call_s3", None)
        if call is None:
            return []
        bucket, _, prefix = self._root.partition("/")
        found = call("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
        return [str(u["Key"]) for u in found.get("Uploads") or ()]

    def objects(self, folder: str) -> dict[str, int]:
        """Data objects of a step by their names below the run, with sizes."""
        self._fs.invalidate_cache()
        found = self._fs.find(f"{self._root}/{folder}", detail=True)
        names = {p[len(self._root) + 1 :]: int(i.get("size") or 0) for p, i in found.items()}
        return {n: size for n, size in names.items() if n.rsplit("/", 1)[-1] not in ("manifest.json", ".metadata")}

    def read(self, name: str) -> bytes:
        """The bytes of an object by its name below the run."""
        self._fs.invalidate_cache()
        data: bytes = self._fs.cat_file(f"{self._root}/{name}")
        return data

    def write(self, name: str, data: bytes) -> None:
        """Replace an object: only for faults, and only below a run that the drill has started."""
        self._fs.pipe_file(f"{self._root}/{name}", data)

    def remove(self, name: str) -> None:
        """Delete an object: only for faults."""
        self._fs.rm_file(f"{self._root}/{name}")

    def _attempt_sizes(self) -> dict[str, int]:
        self._fs.invalidate_cache()
        sizes: dict[str, int] = {}
        try:
            found = self._fs.find(f"{self._root}/steps", detail=True)
        except FileNotFoundError:
            return sizes
        for path, info in found.items():
            m = _ATTEMPT_KEY.search(path[len(self._root) :])
            if m:
                folder = f"steps/{m[1]}/{m[2]}"
                sizes[folder] = sizes.get(folder, 0) + int(info.get("size") or 0)
        return sizes

    def _ledger(self) -> list[dict[str, Any]]:
        """The toolkit's own account, for the reader of the report; no check uses it."""
        events: list[dict[str, Any]] = []
        for path in sorted(p for p in self._list("ledger") if p.endswith(".jsonl")):
            for text in self._fs.cat_file(path).decode(errors="replace").splitlines():
                try:
                    events.append(json.loads(text))
                except ValueError:
                    events.append({"unreadable": text[:200]})
        return events[:MAX_LEDGER_EVENTS]

    def _list(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            return [str(p) for p in self._fs.ls(f"{self._root}/{folder}", detail=False)]
        except FileNotFoundError:
            return []


class CommitWatch:
    """Watches a run's commits from a thread of its own, so that a slow storage delays nobody."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        self._url, self._options = url, options
        self._every_s = 0.1 if url.startswith("file://") else 1.0
        self._found: dict[str, Commit] = {}
        self._stop = threading.Event()
        self.error: str | None = None
        self._thread = threading.Thread(target=self._watch, name="commit-watch", daemon=True)
        self._thread.start()

    def seen(self) -> list[Commit]:
        """Every commit seen so far, in the order of its appearance."""
        return list(self._found.values())

    def close(self) -> None:
        """Look a last time, and end."""
        self._stop.set()
        self._thread.join(timeout=10)

    def _watch(self) -> None:
        storage: Storage | None = None
        while True:
            last = self._stop.is_set()
            try:
                storage = storage or Storage(self._url, self._options)
                for c in storage.commits():
                    if c.name not in self._found:
                        self._found[c.name] = Commit(step=c.step, name=c.name, folder=c.folder, seen=time.time())
                self.error = None
            except Exception as e:  # a storage that cannot be listed is a reason for "not verified", said later
                self.error = f"{type(e).__name__}: {str(e)[:200]}"
            if last:
                return
            self._stop.wait(self._every_s)


def compare(
    left: tuple[str, str, Iterable[Commit]], right: tuple[str, str, Iterable[Commit]],
    *, options: Mapping[str, str], timeout_s: float,
) -> dict[str, Any]:  # fmt: skip
    """Compare the committed steps that both runs still hold; a run is (name, url, its commits now).

    The answer holds ``final`` (last step of each), ``pairs`` as ``reader.py`` gives them, and ``reason`` when
    nothing could be compared. Raises ``HarnessBroken`` when the reader itself fails.
    """
    (left_name, left_url, a), (right_name, right_url, b) = left, right
    mine, theirs = by_step(a), by_step(b)
    answer: dict[str, Any] = {
        "final": [max(mine, default=None), max(theirs, default=None)],
        "pairs": [],
        "reason": None,
    }
    if without := [name for name, steps in ((left_name, mine), (right_name, theirs)) if not steps]:
        return {**answer, "reason": f"no commit records below commits/ in the {' and the '.join(without)} run"}
    pairs = [
        {"step": s, "left": f"{left_url}/{mine[s].folder}", "right": f"{right_url}/{theirs[s].folder}"}
        for s in sorted(mine.keys() & theirs.keys())
    ]
    if not pairs:
        return {**answer, "reason": "the two runs hold no committed step in common"}
    return {**answer, **read_pairs(pairs, options=options, timeout_s=timeout_s)}


def read_pairs(pairs: list[dict[str, Any]], *, options: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    """Run ``reader.py`` on pairs of folders in a process that cannot import the toolkit by accident."""
    request = json.dumps({"pairs": pairs, "options": dict(options)})
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(READER)],
            input=request, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise HarnessBroken(f"reading the checkpoints back took more than {timeout_s:.0f} s",
                            hint="give more time with --budget") from None  # fmt: skip
    if done.returncode != 0:
        raise HarnessBroken("the independent reader failed",
                            facts=[("status", str(done.returncode)), ("said", done.stderr[-600:])])  # fmt: skip
    answer: dict[str, Any] = json.loads(done.stdout)
    if answer["foreign"]:
        raise HarnessBroken(f"the reader imported what it must not: {', '.join(answer['foreign'])}")
    return answer
