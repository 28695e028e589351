"""Random single-bit flips over all objects of a step: ``python -m tests.soak.flips [FLIPS]``; goes on where it stopped.

Appends one line a flip to out/soak/flips.jsonl. Exit status 1 if any resumed with a changed value, stopped, or did not
name the object.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.damage.flips import Campaign

OUT = Path("out/soak/flips.jsonl")


def main(flips: int) -> int:
    """Play every seed that the file does not hold yet."""
    logging.getLogger("ckpt").setLevel(logging.CRITICAL)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    done = {json.loads(line)["seed"] for line in OUT.read_text().splitlines()} if OUT.exists() else set()
    with tempfile.TemporaryDirectory() as folder, OUT.open("a") as out:
        campaign = Campaign(Path(folder))
        for seed in sorted(set(range(flips)) - done):
            result = campaign.play(seed)
            out.write(json.dumps(asdict(result)) + "\n")
            if seed % 500 == 0:
                out.flush()
                print(f"{seed}/{flips}", file=sys.stderr, flush=True)
    results = [json.loads(line) for line in OUT.read_text().splitlines()]
    verdicts = Counter(r["verdict"].partition(":")[0] for r in results)
    where = Counter("data" if r["object"].endswith(".distcp") else r["object"].partition("/")[0] for r in results)
    print(f"{len(results)} flips: {dict(verdicts)}; in {dict(where)}")
    for r in [r for r in results if r["verdict"] not in ("named", "harmless")][:5]:
        print(r)
    return int(any(v not in ("named", "harmless") for v in verdicts))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
