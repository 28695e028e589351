"""``validate --level full`` beside the page cache's read rate and the hash alone, in one run, in turns; medians.

``python -m tests.bench.validate_rate [--mib 2048] [--rounds 5]``: one step on local disk, made here and deleted after.
Arms: *read*, two threads that read the same files into one reused buffer each, of the size that is fastest here, and
in 8 MiB as programs often do; *hash*, two threads that take the XXH3-128 of as many bytes that are in memory; the
validation as a call. Peak memory is of a fresh process that runs the command.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash

import ckpt
from ckpt.store import open_store
from ckpt.tools.target import Address, locate
from ckpt.tools.validate import validate

PART_BYTES = 64 << 20


def make_step(url: str, mib: int) -> None:
    model = torch.nn.ParameterList(torch.randn(4096, 4096) for _ in range(max(1, mib // 64)))
    state = ckpt.State(model=model)
    with ckpt.open(url) as store:
        store.resume(state)
        store.save(1, state)


def two_threads(files: list[Path], work: Callable[[int, int, int], None]) -> float:
    """GB/s at which two threads do ``work(file descriptor, start, end)`` on all files."""
    opened = [os.open(f, os.O_RDONLY) for f in files]
    sizes = [os.fstat(fd).st_size for fd in opened]
    jobs = [(fd, lo, min(lo + PART_BYTES, n)) for fd, n in zip(opened, sizes, strict=True)
            for lo in range(0, n, PART_BYTES)]  # fmt: skip

    def run() -> None:
        while jobs:
            try:
                job = jobs.pop()
            except IndexError:
                return
            work(*job)

    threads = [threading.Thread(target=run) for _ in range(2)]
    began = time.perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    seconds = time.perf_counter() - began
    for fd in opened:
        os.close(fd)
    return sum(sizes) / seconds / 1e9


def reading(piece: int) -> Callable[[int, int, int], None]:
    local = threading.local()

    def work(fd: int, lo: int, hi: int) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(bytearray(piece))
        while lo < hi:
            lo += os.preadv(fd, [local.buffer[: hi - lo]], lo)

    return work


def hashing(piece: int) -> Callable[[int, int, int], None]:
    buffer = os.urandom(piece)

    def work(fd: int, lo: int, hi: int) -> None:
        h = xxhash.xxh3_128()
        for at in range(lo, hi, piece):
            h.update(memoryview(buffer)[: hi - at])

    return work


def drop(files: list[Path]) -> None:
    """Let the next read come from the disk."""
    for f in files:
        fd = os.open(f, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def peak_mib(url: str) -> float:
    """Of the command in a process of its own."""
    code = (
        "import re, sys, ckpt.cli\n"
        f"status = ckpt.cli.run(['validate', {url!r}, '--level', 'full', '--json'])\n"
        "sys.stderr.write(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stderr) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each turn")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ckpt-validate-rate-", dir=args.folder))
    try:
        url = str(folder / "run")
        make_step(url, args.mib)
        files = sorted(Path(url).glob("steps/*/*/*.distcp"), key=lambda f: -f.stat().st_size)
        size = sum(f.stat().st_size for f in files)
        place = locate(Address.parse(url))
        attempt = place.catalog.resolve(None)
        store = open_store(url)

        def check() -> float:
            report = validate(store, attempt.prefix, level="full", attempt=attempt)
            assert report.verdict == "good", report
            return report.bytes_hashed / report.seconds / 1e9

        pieces = (256 << 10, 512 << 10, 1 << 20)
        best = max(pieces, key=lambda p: statistics.median(two_threads(files, reading(p)) for _ in range(3)))
        arms = {
            "validate full": check,
            f"read, {best >> 10} KiB": lambda: two_threads(files, reading(best)),
            "read, 8 MiB": lambda: two_threads(files, reading(8 << 20)),
            "xxh3-128 alone": lambda: two_threads(files, hashing(512 << 10)),
        }
        rates: dict[str, list[float]] = {name: [] for name in arms}
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for n in range(args.rounds + 1):
            for name in list(arms) if n % 2 else list(reversed(arms)):
                if args.cold:
                    drop(files)
                cpu = time.process_time()
                rate = arms[name]()
                if n:  # the first round warms up
                    rates[name].append(rate)
                    seconds[name].append((time.process_time() - cpu) / size * (1 << 30))
        median = {name: statistics.median(r) for name, r in rates.items()}
        print(json.dumps({
            "GiB": size / (1 << 30), "cold": args.cold, "cores": os.cpu_count(), "load average": os.getloadavg()[0],
            "GB/s": {k: {"median": round(median[k], 2), "min": round(min(r), 2), "max": round(max(r), 2)}
                     for k, r in rates.items()},
            "CPU s/GiB": {k: round(statistics.median(c), 3) for k, c in seconds.items()},
            "validate / best read": round(median["validate full"] / median[f"read, {best >> 10} KiB"], 3),
            "validate / read in 8 MiB": round(median["validate full"] / median["read, 8 MiB"], 3),
            "peak MiB of the command": round(peak_mib(url), 1),
        }, indent=1))  # fmt: skip
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
