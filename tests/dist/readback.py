"""What a job left behind, read without this project: steps by plain DCP, the rest from the job's own log."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests.dist.launch import Line


def step_folder(run: Path, step: int) -> Path:
    """The folder of a committed step; the newest attempt where there are several."""
    commits = sorted((run / "commits").glob(f"{step:012d}-*.json"))
    assert commits, f"step {step} is not committed: {sorted(p.name for p in (run / 'commits').glob('*'))}"
    return run / "steps" / f"{step:012d}" / commits[-1].stem.split("-", 1)[1]


def content(folder: Path) -> dict[str, Any]:
    """Every tensor, as its bytes, and every value of a step, by key."""
    state: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about loading in one process, which is meant
        _load_state_dict(state, FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return dict(_flat(state, ""))


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for k, v in value.items():
            yield from _flat(v, f"{path}.{k}")
    elif isinstance(value, (list, tuple)):
        for n, v in enumerate(value):
            yield from _flat(v, f"{path}[{n}]")
    elif isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield path, (str(value.dtype), tuple(value.shape), raw)
    else:
        yield path, repr(value)


def differences(a: Path, b: Path) -> list[str]:
    """The keys in which two steps differ by a bit."""
    left, right = content(a), content(b)
    assert left
    return sorted(k for k in left.keys() | right.keys() if left.get(k) != right.get(k))


def by_step(lines: list[Line]) -> dict[tuple[int, int], set[tuple[float, tuple[int, ...]]]]:
    """For each (step, rank), all (loss, samples) that were logged: one, unless something went another way."""
    out: dict[tuple[int, int], set[tuple[float, tuple[int, ...]]]] = {}
    for line in lines:
        if "step" in line:
            out.setdefault((line["step"], line["rank"]), set()).add((line["loss"], tuple(line["samples"])))
    return out
