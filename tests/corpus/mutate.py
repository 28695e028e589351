"""Random changes of records: values of other kinds, sizes and shapes; bytes changed and cut."""

from __future__ import annotations

import json
import random
from typing import Any

ODD = [None, True, -1, 0, 1 << 63, 1 << 70, 0.5, 1e400, float("nan"), "", "x", "\ud800", "../x", [], [[]], {}, {"a": 1},
       "2026-11-30", [1] * 70, json.loads("[" * 900 + "]" * 900)]  # fmt: skip


def _mutate(value: Any, rng: random.Random) -> Any:
    """The value with one random part replaced, dropped, doubled or wrapped."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        what = rng.randrange(6)
        if what == 0:
            return {k: v for k, v in value.items() if k != key}
        if what == 1:
            return {**value, rng.choice(["", "extra", "\x00", key.upper()]): value[key]}
        return {k: _mutate(v, rng) if k == key else v for k, v in value.items()}
    if isinstance(value, list) and value and rng.random() < 0.85:
        n = rng.randrange(len(value))
        what = rng.randrange(6)
        if what == 0:
            return value[:n] + value[n + 1 :]
        if what == 1:
            return [*value, value[n]]
        if what == 2:
            return value[::-1]
        return [_mutate(v, rng) if i == n else v for i, v in enumerate(value)]
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 1 << 40])
    return rng.choice(ODD)


def mutated_json(data: bytes, rng: random.Random) -> bytes:
    """A JSON document with one to five parts changed."""
    value = json.loads(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        value = _mutate(value, rng)
    return json.dumps(value).encode()


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """The bytes with one to three changed, and perhaps cut short."""
    raw = bytearray(data)
    for _ in range(rng.choice([1, 1, 3])):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw[: rng.choice([len(raw), rng.randrange(len(raw))])])
