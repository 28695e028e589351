"""Extra memory of adopt and export on a state with one large tensor: peak resident size above that of a small state.

``python -m tests.bench.moving_memory MIB [FOLDER]`` prints JSON; each command runs in a process of its own. File pages
that the kernel may drop at any time do not count: nothing is mapped.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CODE = """
import resource, sys, time
from ckpt import cli
began = time.monotonic()
status = cli.run(sys.argv[1:])
print(status, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic() - began)
"""


def measure(*words: object) -> tuple[int, float]:
    """Peak resident bytes and seconds of one command."""
    done = subprocess.run([sys.executable, "-c", CODE, *map(str, words)], check=True, capture_output=True, text=True)
    status, kib, seconds = done.stdout.splitlines()[-1].split()
    assert status == "0", done.stderr
    return int(kib) << 10, float(seconds)


def make(folder: Path, mib: int) -> None:
    """A plain DCP folder with one tensor, written by another process."""
    code = (
        "import sys, torch, torch.distributed.checkpoint as dcp\n"
        f"w = torch.arange({mib} * 2**18, dtype=torch.int32).view(-1, 1024).view(torch.float32)\n"
        f"dcp.save({{'model': {{'w': w, 'b': torch.ones(3)}}}}, checkpoint_id={str(folder)!r}, no_dist=True)\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def commands(source: Path, work: Path) -> dict[str, tuple[object, ...]]:
    """What is measured, in this order."""
    run = work / "run"
    return {
        "validate": ("validate", source, "--level", "full"),
        "adopt": ("adopt", source, run),
        "safetensors": ("export", run, work / "st", "--to", "safetensors", "--only", "model.*"),
        "torch": ("export", run, work / "x.pt", "--to", "torch"),
        "dcp": ("export", run, work / "dcp", "--to", "dcp"),
    }


def main(mib: int, folder: Path) -> dict[str, float]:
    """Extra MiB and seconds of each command."""
    out: dict[str, float] = {}
    base: dict[str, int] = {}
    for size, name in ((1, "small"), (mib, "large")):
        work = folder / name
        work.mkdir()
        make(work / "source", size)
        for command, words in commands(work / "source", work).items():
            peak, seconds = measure(*words)
            if name == "small":
                base[command] = peak
            else:
                out[f"{command}_MiB"] = round((peak - base[command]) / 2**20, 1)
                out[f"{command}_s"] = round(seconds, 2)
    return out


if __name__ == "__main__":
    began = time.monotonic()
    if len(sys.argv) > 2:
        print(json.dumps(main(int(sys.argv[1]), Path(sys.argv[2]))))
    else:
        with tempfile.TemporaryDirectory() as place:
            print(json.dumps(main(int(sys.argv[1]), Path(place))))
