"""Save and load beside plain DCP and the raw client, in one run, in turns; medians, with min and max.

``python -m tests.bench.save_load [--mib 256] [--runs 5]``: one process, one state, local disk and the real S3 server
of the suite. Time ends when the bytes are durable. The server's own MD5 bounds what any client can write to it, so
the client's CPU seconds a GiB are told too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import torch
import torch.distributed.checkpoint as dcp

import ckpt
from tests.s3server import S3, S3Server

Arm = tuple[str, Callable[[int], object]]


def measure(arms: list[Arm], runs: int, mib: int) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for name, _ in arms}
    cpu: dict[str, list[float]] = {name: [] for name, _ in arms}
    for n in range(runs + 1):
        for name, act in arms if n % 2 else reversed(arms):  # ABBA: a drift of the machine hits both alike
            t, c = time.perf_counter(), time.process_time()
            act(n)
            if n:  # the first round warms up
                seconds[name].append(time.perf_counter() - t)
                cpu[name].append(time.process_time() - c)
    return [
        {
            "what": name,
            "MiB/s": mib / statistics.median(s),
            "seconds": statistics.median(s),
            "min": min(s),
            "max": max(s),
            "CPU s/GiB": statistics.median(cpu[name]) / mib * 1024,
        }
        for name, s in seconds.items()
    ]


def arms_at(url: str, options: dict[str, Any], model: dict[str, torch.Tensor], raw: Any) -> tuple[list[Arm], list[Arm]]:
    """Saving and loading arms for one place; ``raw`` is obstore's own store there, or None."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    target = {k: torch.zeros_like(v) for k, v in model.items()}
    fs = {} if raw is None else dict(options)
    written = itertools.count()

    def writer(path: str) -> Any:
        return dcp.FileSystemWriter(path) if raw is None else FsspecWriter(path, **fs)

    def reader(path: str) -> Any:
        return dcp.FileSystemReader(path) if raw is None else FsspecReader(path, **fs)

    own = ckpt.ObjectWriter
    saves: list[Arm] = [
        ("torchrelay", lambda n: dcp.save(model, storage_writer=own(f"{url}/own{next(written)}", **options))),
        ("plain DCP", lambda n: dcp.save(model, storage_writer=writer(f"{url}/dcp{n}"))),
    ]
    loads: list[Arm] = [
        ("torchrelay", lambda n: dcp.load(target, storage_reader=ckpt.ObjectReader(f"{url}/own0", **options))),
        ("plain DCP", lambda n: dcp.load(target, storage_reader=reader(f"{url}/dcp0"))),
    ]
    if raw is not None:
        whole = [v.view(torch.uint8).reshape(-1).numpy() for v in model.values()]
        size = sum(len(w) for w in whole)
        saves.append(("raw obstore", lambda n: obstore.put(raw, "raw", whole, chunk_size=16 << 20, max_concurrency=4)))

        def get(_: int) -> None:
            starts = list(range(0, size, 8 << 20))
            obstore.get_ranges(raw, "raw", starts=starts, ends=[min(s + (8 << 20), size) for s in starts])

        loads.append(("raw obstore", get))
    return saves, loads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = {f"layer{n}": torch.randn(args.mib << 17) for n in range(2)}  # two fp32 tensors of half the size each
    folder = Path(tempfile.mkdtemp(prefix="torchrelay-bench-"))
    server = S3Server(folder / "s3")
    server.start()
    s3 = S3(server)
    report = {}
    try:
        bucket = s3.new_bucket()
        options = s3.options
        raw = obstore.store.S3Store(
            bucket,
            endpoint=server.endpoint,
            access_key_id=options["key"],
            secret_access_key=options["secret"],
            region=server.region,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
        places: list[tuple[str, str, dict[str, Any], Any]] = [
            ("local disk", str(folder / "disk"), {}, None),
            ("S3 server", s3.url(bucket, "b"), options, raw),
        ]
        for place, url, opts, client in places:
            saves, loads = arms_at(url, opts, model, client)
            for what, arms in (("save", saves), ("load", loads)):
                rows = measure(arms, args.runs, args.mib)
                report[f"{what}, {place}"] = rows
                print(f"\n{what}, {place}, {args.mib} MiB, median of {args.runs}")
                for r in rows:
                    spread = f"{r['seconds']:.3f} s ({r['min']:.3f}–{r['max']:.3f})"
                    print(f"  {r['what']:<12} {r['MiB/s']:8.0f} MiB/s   {spread}   {r['CPU s/GiB']:.2f} CPU s/GiB")
    finally:
        server.kill()
        shutil.rmtree(folder)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
