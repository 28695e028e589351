"""Where the output of ranks goes, and its last lines; a launcher's own record of what it did."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from elastic.launch.options import ERR, OUT, Options

SCHEMA = "elastic.launch/1"
_TAIL_BYTES = 16_384
STREAMS = {OUT: "stdout.log", ERR: "stderr.log"}


class Logs:
    """Files of one launch: ``<log dir>/<run id>/generation-<n>/rank-<r>/{stdout,stderr}.log``."""

    def __init__(self, options: Options) -> None:
        self._dir, self._run_id = options.log_dir, options.run_id
        self._to_file = 0 if self._dir is None else (options.redirect | options.tee or OUT | ERR)
        self._tee = options.tee if options.redirect or options.tee else self._to_file
        self._tails: list[Any] = []

    def open(self, generation: int, ranks: dict[int, int]) -> dict[int, tuple[str, str]]:
        """Paths of stdout and stderr by local rank ("": the launcher's own), with those that are echoed followed."""
        files: dict[int, tuple[str, str]] = {}
        for local, rank in ranks.items():
            folder = self.folder(generation, rank)
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            out, err = (str(folder / name) if folder and self._to_file & bit else "" for bit, name in STREAMS.items())
            files[local] = (out, err)
            for path in filter(None, (out, err)):
                Path(path).touch()
        self._follow(ranks, files)
        return files

    def folder(self, generation: int, rank: int) -> Path | None:
        """Of one rank in one generation; None without ``--log-dir``."""
        return None if self._dir is None else self._dir / self._run_id / f"generation-{generation}" / f"rank-{rank}"

    def last_lines(self, generation: int, rank: int, count: int = 8) -> tuple[Path | None, list[str]]:
        """Of a rank's stderr, or its stdout where that is empty; and the file they are from."""
        folder = self.folder(generation, rank)
        for name in ("stderr.log", "stdout.log"):
            file = folder / name if folder else None
            if file and file.exists() and file.stat().st_size:
                with file.open("rb") as f:
                    f.seek(max(0, file.stat().st_size - _TAIL_BYTES))
                    return file, f.read().decode(errors="replace").splitlines()[-count:]
        return None, []

    def close(self) -> None:
        """Stop to echo, after what has been written has been."""
        for tail in self._tails:
            tail.stop()
        self._tails = []

    def _follow(self, ranks: dict[int, int], files: dict[int, tuple[str, str]]) -> None:
        self.close()
        from torch.distributed.elastic.multiprocessing.tail_log import TailLog

        for n, (bit, sink) in enumerate(((OUT, sys.stdout), (ERR, sys.stderr))):
            paths = {local: pair[n] for local, pair in files.items() if pair[n]}
            if self._tee & bit and paths:
                prefixes = {local: f"[rank{ranks[local]}]: " for local in paths}
                tail = TailLog("elastic", paths, sink, prefixes)
                tail.start()
                self._tails.append(tail)


class Events:
    """A JSON line for each thing that a launcher does, appended at once; nothing without a path."""

    def __init__(self, path: Path | None) -> None:
        self._fd = None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def add(self, event: str, **facts: Any) -> None:
        """``t`` is Unix time, ``mono`` monotonic seconds of this host."""
        if self._fd is not None:
            line = {"schema": SCHEMA, "event": event, "t": time.time(), "mono": time.monotonic(), **facts}
            os.write(self._fd, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        """No more."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
