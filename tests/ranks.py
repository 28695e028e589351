"""Run a function on n real processes with a gloo process group, quickly: forked from a server that imported torch.

``run_ranks(4, fn, *args)`` returns each rank's result in order and raises the first rank's error with its trace.
``fn`` is a module-level function; every process is one that this call started, and is gone when it returns.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch",
        "numpy",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch.distributed.checkpoint",
        "ckpt.checkpoints",
    ]
)


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0, **kwargs: Any) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on ``n`` ranks of one gloo group; each rank's result, in order."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    pipes, processes = [], []
    for rank in range(n):
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_rank, args=(theirs, rank, n, port, fn, args, kwargs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(pipes, timeout_s)
    finally:
        for process in processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(pipes: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        open_ = {p: r for r, p in enumerate(pipes) if r not in results}
        ready = wait(list(open_), timeout_s)
        if not ready:
            raise TimeoutError(f"ranks {sorted(open_.values())} gave no result within {timeout_s} s")
        for pipe in ready:
            try:
                ok, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                ok, value = True, None  # the process ended without a word: killed on purpose by the test
            if not ok:
                raise AssertionError(f"rank {open_[pipe]}:\n{value}")  # type: ignore[index]
            results[open_[pipe]] = value  # type: ignore[index]
    return [results[r] for r in range(len(pipes))]


def _rank(pipe: Connection, rank: int, n: int, port: int, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    try:
        if n > 1:
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        result = fn(*args, **kwargs)
        pipe.send((True, result))
        if n > 1:
            try:
                dist.barrier()
            except RuntimeError:  # a rank that the test killed does not come
                time.sleep(1.0)  # rank 0 holds the store in which the others still read why
            dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
