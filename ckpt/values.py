"""Values of a state: made plain or refused by name, digested so that ranks can be compared."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from ckpt.engine.planner import Atomic
from ckpt.errors import Refused

PLAIN = (type(None), bool, int, float, str, bytes)
CONTAINERS = (dict, list, tuple, set, OrderedDict, Counter, torch.Size)


def atoms(nested: Any, path: str = "") -> Iterator[tuple[str, Atomic]]:
    """Every value of a captured state, by key."""
    if isinstance(nested, Atomic):
        yield path, nested
    elif isinstance(nested, dict):
        for k, v in nested.items():
            yield from atoms(v, f"{path}.{k}" if path else k)


def plain_atoms(content: Any, path: str) -> Any:
    """The captured content with every value made plain, or refused by name."""
    if isinstance(content, Atomic):
        return Atomic(_plain(content.value, path))
    return {k: plain_atoms(v, f"{path}.{k}") for k, v in content.items()} if isinstance(content, dict) else content


def _plain(value: Any, path: str) -> Any:
    """A value as it will be read back. Exact types only: a subclass would be saved, and refused by every load."""
    kind = type(value)
    if kind is bytes and not value:  # torch's allow-list has no name for it
        raise Refused(f"{path} is an empty bytes object, which no load would take", hint="keep None or '' in its place")
    if kind in PLAIN or kind is torch.Size or (isinstance(value, torch.Tensor) and not isinstance(value, DTensor)):
        return value
    if isinstance(value, np.generic):  # what a schedule written with numpy leaves in a learning rate
        return value.item()
    if kind in CONTAINERS:
        if isinstance(value, dict):
            return kind({_plain(k, f"{path} key"): _plain(v, f"{path}[{k!r}]") for k, v in value.items()})
        return kind(_plain(v, f"{path}[{n}]") for n, v in enumerate(value))
    raise Refused(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored safely",
        hint="keep numbers, text, bytes, tensors, lists, tuples, sets and dicts in what state_dict() returns",
    )


def value_digest(value: Any) -> str:
    """XXH3-128 of plain data, independent of how objects are shared in memory. 0.0 and -0.0, 1 and True differ."""
    h = xxhash.xxh3_128()
    _feed(value, h.update)
    return h.hexdigest()


def _feed(value: Any, update: Callable[[bytes], None]) -> None:
    if isinstance(value, (Mapping, set, frozenset)):  # neither has an order that ranks would share
        entries = value.items() if isinstance(value, Mapping) else value
        update(f"{type(value).__name__}{len(value)}".encode())
        for entry in sorted(map(value_digest, entries)):
            update(entry.encode())
    elif isinstance(value, (list, tuple)):
        update(f"{type(value).__name__}{len(value)}".encode())
        for v in value:
            _feed(v, update)
    elif isinstance(value, torch.Tensor):
        update(f"t{value.dtype}{tuple(value.shape)}".encode())
        if value.numel():
            update(memoryview(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    elif isinstance(value, float) and math.isnan(value):
        update(b"nan")
    else:
        update(f"{type(value).__name__}:{value!r};".encode())


@dataclass(frozen=True, slots=True)
class Differing:
    """A value that is not the same on all ranks."""

    key: str
    ranks: tuple[int, ...]


def differing_values(per_rank: Iterable[Mapping[str, str]]) -> list[Differing]:
    """The replicated values whose digests differ from rank 0's, with the ranks. Pure."""
    maps = list(per_rank)
    off = ((key, tuple(r for r, m in enumerate(maps) if m.get(key) != maps[0].get(key))) for key in set().union(*maps))
    return sorted((Differing(key, ranks) for key, ranks in off if ranks), key=lambda d: d.key)
