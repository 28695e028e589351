"""What fingerprints cost of a save and of a load: the same call with them and without, in turns; medians.

``python -m tests.bench.fingerprint_share [--mib 256] [--runs 7] [--s3]``: one process, a model of fp32 and bf16
tensors, a run on the local disk (``--s3``: on the suite's S3 server). A save ends when the step is committed, a load
when it is proven. Saves without fingerprints are made by replacing the sums with constants: no option does that.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import ckpt
from ckpt.engine import planner
from ckpt.format.fingerprint import Partial
from tests.s3server import S3, S3Server

Act = Callable[[], Any]


def timed(act: Act) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - wall, time.process_time() - cpu


def in_turns(what: str, on: Act, off: Act, runs: int, gib: float) -> None:
    """ABBA …: a drift of the machine hits both alike. The first round warms up."""
    took: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    for n in range(runs + 1):
        for name, act in [("on", on), ("off", off)][:: 1 if n % 2 else -1]:
            pair = timed(act)
            if n:
                took[name].append(pair)
    wall = {k: statistics.median(w for w, _ in v) for k, v in took.items()}
    cpu = {k: statistics.median(c for _, c in v) for k, v in took.items()}
    spread = {k: f"{min(w for w, _ in v):.3f}–{max(w for w, _ in v):.3f}" for k, v in took.items()}
    print(f"{what}: {wall['on']:.3f} s ({spread['on']}) with, {wall['off']:.3f} s ({spread['off']}) without: "
          f"wall {wall['on'] / wall['off'] - 1:+.1%}; CPU {cpu['on'] / gib:.2f} and {cpu['off'] / gib:.2f} s/GiB: "
          f"{(cpu['on'] - cpu['off']) / gib:+.2f} s/GiB")  # fmt: skip


@contextlib.contextmanager
def no_sums() -> Iterator[None]:
    """Saves that take no fingerprints."""
    with mock.patch.object(planner, "partial", lambda tensor, *_: Partial(tensor.numel())):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--s3", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = args.mib << 7
    model = torch.nn.ParameterDict({
        "f32": torch.nn.Parameter(torch.randn(rows, 1024)),  # half of all bytes
        "bf16": torch.nn.Parameter(torch.randn(2 * rows, 1024).bfloat16()),
    })  # fmt: skip
    state = ckpt.State(model=model)
    folder = Path(tempfile.mkdtemp(prefix="torchrelay-bench-"))
    server = S3Server(folder / "s3") if args.s3 else None
    try:
        url, options = str(folder / "run"), {}
        if server is not None:
            server.start()
            s3 = S3(server)
            url, options = s3.url(s3.new_bucket(), "run"), s3.options
        store = ckpt.open(url, keep=ckpt.Latest(1), grace_s=0.0, **options)
        store.resume(state)
        steps = itertools.count(1)

        def save() -> None:
            store.save(next(steps), state).wait()

        def save_without() -> None:
            with no_sums():
                save()

        gib = sum(p.nbytes for p in model.values()) / (1 << 30)
        print(f"{args.mib} MiB, {'S3 server' if args.s3 else 'local disk'}, {torch.get_num_threads()} threads of "
              f"{os.cpu_count()} cores, medians of {args.runs}")  # fmt: skip
        in_turns("save", save, save_without, args.runs, gib)
        save()
        proven, unproven = ckpt.open(url, **options), ckpt.open(url, proof=False, **options)
        in_turns("load", lambda: proven.load(state), lambda: unproven.load(state), args.runs, gib)
        print(f"last load: {proven.load(state).proof}")
    finally:
        if server is not None:
            server.kill()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
