"""Runs over a storage that fails: ``python -m tests.soak.faulty_storage [SEEDS]``; goes on where it stopped.

One request in twenty fails, and every third seed has an outage of 30 seconds in the middle of a save. Appends one line
a seed and client to out/soak/faulty_storage.jsonl. Exit status 1 if a save was lost or another state came back.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.s3.faulty import play
from tests.s3server import S3, S3Server

OUT = Path("out/soak/faulty_storage.jsonl")


def main(seeds: int) -> int:
    """Play every seed that the file does not hold yet."""
    OUT.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in OUT.read_text().splitlines()] if OUT.exists() else []
    done = {(r["seed"], r["client"]) for r in lines}
    with tempfile.TemporaryDirectory() as folder:
        server = S3Server(Path(folder))
        server.start()
        try:
            with S3(server) as s3:
                for seed in range(seeds):
                    for client in ("obstore", "fsspec"):
                        if (seed, client) not in done:
                            result = play(s3, seed, client=client, outage_s=30.0 if seed % 3 == 0 else 0.0)
                            with OUT.open("a") as out:
                                out.write(json.dumps(asdict(result)) + "\n")
                            lines.append(asdict(result))
                            print(result, flush=True)
        finally:
            server.kill()
    bad = [r for r in lines if r["wrong"]]
    print(f"{len(lines)} runs, {sum(r['requests'] for r in lines)} requests, {sum(r['faults'] for r in lines)} faults, "
          f"longest save {max(r['longest_save_s'] for r in lines)} s, {len(bad)} violations")  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 12))
