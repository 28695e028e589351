"""When to save, what it costs, how far a job can grow: pure arithmetic, no torch, no numpy (but for ``simulate``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic.economics.fitting import fit as fit
    from elastic.economics.inputs import BadInput as BadInput
    from elastic.economics.inputs import Costs as Costs
    from elastic.economics.inputs import Job as Job
    from elastic.economics.inputs import Rates as Rates
    from elastic.economics.inputs import Tier as Tier
    from elastic.economics.interval import Plan as Plan
    from elastic.economics.interval import goodput as goodput
    from elastic.economics.interval import recommend as recommend
    from elastic.economics.pacer import Pacer as Pacer
    from elastic.economics.scale import scale_curve as scale_curve

_HOMES = {
    "BadInput": "inputs",
    "Costs": "inputs",
    "Job": "inputs",
    "Rates": "inputs",
    "Tier": "inputs",
    "Plan": "interval",
    "goodput": "interval",
    "recommend": "interval",
    "Pacer": "pacer",
    "fit": "fitting",
    "scale_curve": "scale",
}

__all__ = [
    "BadInput",
    "Costs",
    "Job",
    "Pacer",
    "Plan",
    "Rates",
    "Tier",
    "fit",
    "goodput",
    "recommend",
    "scale_curve",
]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
