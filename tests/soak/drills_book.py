"""The whole book on three targets: ``python -m tests.soak.drills_book [SEEDS]``; goes on where it stopped.

The bundled example under torchrun, a plain script that only uses ``ckpt.open`` on a local disk, and the same on the S3
server of the suite. Results lie below out/soak/drills_book/, a line a drill in results.jsonl of each target. Exit
status 1 if a drill failed; "not verified" is told with its reason and is none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.s3server import S3, S3Server

ROOT = Path(__file__).parents[2]
OUT = ROOT / "out/soak/drills_book"
TORCHRUN = ("torchrun", "--nproc-per-node", "{nproc}", "--max-restarts", "3")
EXAMPLE = (*TORCHRUN, str(ROOT / "examples/train_gpt.py"), "{url}", "--steps", "100", "--every", "10", "--seed", "1",
           "--log-file", "{log}")  # fmt: skip
PLAIN = (*TORCHRUN, str(ROOT / "tests/targets/plain_ckpt_target.py"), "{url}", "--steps", "120", "--every", "8",
         "--verify-snapshot", "--log-file", "{log}")  # fmt: skip


def book(name: str, seeds: int, target: tuple[str, ...], *options: str) -> int:
    """Hold the book on one target; the exit status of the tool."""
    words = ["run", "book", "--seeds", str(seeds), "--nproc", "2", "--out", str(OUT / name), *options]
    return subprocess.run([sys.executable, "-m", "drills", *words, "--", *target], cwd=ROOT, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode  # fmt: skip


@contextmanager
def s3_options() -> Iterator[tuple[str, ...]]:
    """Options that lead a drill to a server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        server = S3Server(Path(folder))
        server.start()
        try:
            with S3(server) as s3:
                given = {"endpoint_url": s3.endpoint, "key": server.key, "secret": server.secret}
                pairs = [w for k, v in given.items() for w in ("--storage-option", f"{k}={v}")]
                yield ("--url-base", s3.url(s3.new_bucket(), "drills"), *pairs)
        finally:
            server.kill()


def main(seeds: int) -> int:
    """Hold what the files do not hold yet."""
    OUT.mkdir(parents=True, exist_ok=True)
    book("example", seeds, EXAMPLE)
    book("plain", seeds, PLAIN)
    with s3_options() as options:
        book("s3", seeds, PLAIN, *options)
    rows = [json.loads(t) for f in sorted(OUT.glob("*/results.jsonl")) for t in f.read_text().splitlines()]
    counts = {v: sum(r["verdict"] == v for r in rows) for v in ("pass", "not verified", "fail", "harness broke")}
    print(f"{len(rows)} drills: {', '.join(f'{n} {v}' for v, n in counts.items())}")
    return 1 if counts["fail"] or counts["harness broke"] else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
