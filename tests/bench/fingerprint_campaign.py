"""A million random accidents, each of which must change the fingerprint. Resumable.

    python -m tests.bench.fingerprint_campaign [--until 1000000] [--out out/fingerprint-campaign.jsonl]

One line a batch is appended: seed, tensor, how many of each kind, and every one that was missed, with what it takes
to make it again. Exit status 1 if any line has a miss.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckpt.engine.fingerprint import partial
from ckpt.format.fingerprint import LANES, Partial
from tests import corruptions

SCHEMA = "bench.fingerprint_campaign/1"
DTYPES = {
    d.itemsize: d for d in (torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.complex128)
}  # a fingerprint knows of a dtype its size only
ROUNDS = 50
BOX_KINDS = ("lost_box", "doubled_box", "misplaced_box", "lost_and_doubled")


def tensor(g: np.random.Generator) -> corruptions.Raw:
    """uint8[*shape, itemsize]: one to four dimensions, mostly small, some of several rows; noise, zeros or steps."""
    itemsize = int(g.choice(list(DTYPES)))
    size = int(g.choice([60, 3_000, 40_000, 150_000], p=[0.4, 0.4, 0.15, 0.05])) // itemsize
    shape: list[int] = []
    for _ in range(int(g.integers(0, 4))):
        shape.append(int(g.integers(1, 9)))
        size //= shape[-1]
    shape.insert(int(g.integers(len(shape) + 1)), max(2, size))
    full = (*shape, itemsize)
    match g.choice(["noise", "zeros", "weights"], p=[0.6, 0.1, 0.3]):
        case "noise":
            return g.integers(0, 256, full, np.uint8)
        case "zeros":
            return np.zeros(full, np.uint8)
        case _:  # like trained weights: high bytes hardly differ
            raw = g.integers(0, 256, full, np.uint8)
            raw[..., -1] = g.choice(np.array([0x3C, 0xBC, 0x3D, 0xBD], np.uint8), shape)
            return raw


def of(raw: corruptions.Raw, shape: tuple[int, ...] | None = None, offsets: tuple[int, ...] | None = None) -> Partial:
    flat = torch.from_numpy(np.ascontiguousarray(raw).reshape(-1)).view(DTYPES[raw.shape[-1]])
    sizes = raw.shape[:-1]
    return partial(flat.reshape(sizes), shape or sizes, offsets or (0,) * len(sizes))


def minus(p: Partial) -> Partial:
    return Partial(-p.elements, tuple(-v % (1 << 64) for v in p.sums))


def box_accident(kind: str, x: corruptions.Raw, whole: Partial, g: np.random.Generator) -> Partial | None:
    """The partial of a partition one of whose boxes was lost, counted twice, or taken for another place."""
    shape = x.shape[:-1]
    sizes = [int(g.integers(1, n + 1)) for n in shape]
    spans = [n - k for n, k in zip(shape, sizes, strict=True)]
    at, other = ([int(g.integers(s + 1)) for s in spans] for _ in range(2))
    box = x[tuple(slice(a, a + k) for a, k in zip(at, sizes, strict=True))]
    elsewhere = x[tuple(slice(a, a + k) for a, k in zip(other, sizes, strict=True))]
    here = of(box, shape, tuple(at))
    match kind:
        case "lost_box":
            return whole + minus(here)
        case "doubled_box":
            return whole + here
        case _ if at == other:
            return None
        case "misplaced_box":
            return whole + minus(here) + of(box, shape, tuple(other))
        case _:
            return whole + minus(here) + of(elsewhere, shape, tuple(other))


def batch(seed: int) -> dict[str, Any]:
    """Every kind of accident to one tensor, many times."""
    g = np.random.default_rng(seed)
    x = tensor(g)
    want = of(x)
    tried: Counter[str] = Counter()
    missed: list[dict[str, Any]] = []
    lane_misses = 0
    for n in range(ROUNDS):
        for kind in (*corruptions.ALL, *BOX_KINDS):
            if kind in BOX_KINDS:
                got = box_accident(kind, x, want, g)
            else:
                changed = corruptions.corrupt(kind, x, g)
                got = None if changed is None else of(changed)
            if got is None:
                continue
            tried[kind] += 1
            lane_misses += sum(a == b for a, b in zip(got.sums, want.sums, strict=True))
            if got == want:
                missed.append({"round": n, "kind": kind})
    return {
        "schema": SCHEMA, "seed": seed, "shape": x.shape[:-1], "itemsize": x.shape[-1], "tried": dict(tried),
        "lanes": tried.total() * LANES, "lane_misses": lane_misses, "missed": missed,
    }  # fmt: skip


def main() -> int:
    """Go on where the file ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--until", type=int, default=1_000_000, help="accidents in all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long; run again to go on")
    parser.add_argument("--out", type=Path, default=Path("out/fingerprint-campaign.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = [json.loads(line) for line in lines]
    kinds: Counter[str] = Counter()
    for line in done:
        kinds.update(line["tried"])
    missed = sum(len(line["missed"]) for line in done)
    seed, began = len(done), time.monotonic()
    with args.out.open("a") as out:
        while kinds.total() < args.until and time.monotonic() - began < args.seconds:
            line = batch(seed)
            out.write(json.dumps(line) + "\n")
            out.flush()
            kinds.update(line["tried"])
            missed += len(line["missed"])
            seed += 1
    for kind, n in sorted(kinds.items()):
        print(f"{n:>9} {kind}")
    print(f"{kinds.total():>9} accidents, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
