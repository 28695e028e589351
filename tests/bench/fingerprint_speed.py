"""Fingerprint beside memcpy and XXH3-128: one process, one thread, CPU time (the machine may be shared).

python -m tests.bench.fingerprint_speed [--mib 64] [--rounds 9]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import xxhash

from ckpt.engine.fingerprint import float32_mm, partial


def main() -> None:
    """GB/s, best of all rounds, every round in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = args.mib << 20
    data = torch.randint(-128, 128, (size,), dtype=torch.int8)
    copy = torch.empty_like(data)
    runs: dict[str, Callable[[], object]] = {
        "memcpy": lambda: copy.copy_(data),
        "xxh3-128": lambda: xxhash.xxh3_128(data.numpy()).digest(),
    }
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        for shape in ((-1,), (-1, 4096), (4096, -1), (-1, 512, 3, 3)):
            x = data.view(dtype)
            known = -torch.Size(shape).numel() if -1 in shape else 1
            x = x[: x.numel() // known * known].view(shape)
            name = f"{str(dtype)[6:]} {tuple(x.shape)}"
            runs[name] = lambda x=x: partial(x, x.shape, (0,) * x.dim())
            if shape == (-1, 4096):
                runs[f"{name}, float32 products"] = lambda x=x: partial(x, x.shape, (0,) * x.dim(), product=float32_mm)
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(args.rounds):
        for name, run in runs.items():
            began = time.thread_time_ns()
            run()
            best[name] = min(best[name], (time.thread_time_ns() - began) / 1e9)
    for name, seconds in best.items():
        print(f"{size / seconds / 1e9:7.2f} GB/s {seconds / size * (1 << 30):6.3f} s/GiB  {name}")
    for count, tensor in ((1000, torch.zeros(())), (1000, torch.zeros(4096))):
        began = time.thread_time_ns()
        for _ in range(count):
            partial(tensor, tensor.shape, (0,) * tensor.dim())
        print(f"{(time.thread_time_ns() - began) / count / 1e3:7.1f} us a tensor of {tuple(tensor.shape)}")


if __name__ == "__main__":
    main()
