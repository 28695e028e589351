"""Time and membership: training that goes on when ranks die, leave or are stopped. Lazy: imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.cadence import Cadence
    from elastic.data import ElasticSampler
    from elastic.determinism import LogicalShards
    from elastic.membership import init
    from elastic.notices import NoticeUrl, StopFile, TimeLimit
    from elastic.run import Run
    from elastic.samples import SeededSamples, sample_rng
    from elastic.step import Micro, Step

__all__ = [
    "Cadence",
    "ElasticSampler",
    "LogicalShards",
    "Micro",
    "NoticeUrl",
    "Run",
    "SeededSamples",
    "Step",
    "StopFile",
    "TimeLimit",
    "init",
    "sample_rng",
]

_HOME = {
    "Cadence": "cadence",
    "ElasticSampler": "data",
    "LogicalShards": "determinism",
    "Micro": "step",
    "NoticeUrl": "notices",
    "Run": "run",
    "SeededSamples": "samples",
    "Step": "step",
    "StopFile": "notices",
    "TimeLimit": "notices",
    "init": "membership",
    "sample_rng": "samples",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOME:
        return getattr(importlib.import_module(f"elastic.{_HOME[name]}"), name)
    if name in _HOME.values():
        return importlib.import_module(f"elastic.{name}")
    raise AttributeError(f"module 'elastic' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *set(_HOME.values())])
