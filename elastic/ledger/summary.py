"""Sums up what happens too often to be an event of its own: steps, and the metrics of steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ckpt.errors import Refused
from elastic.ledger.events import Metric, Steps

_log = logging.getLogger("elastic")


class StepTimes:
    """Times of the steps since the last row."""

    def __init__(self) -> None:
        self._body: list[float] = []
        self._data_s = self._boundary_s = 0.0

    def add(self, *, body_s: float, data_s: float) -> None:
        """One step: its body, and the wait for its batch."""
        self._body.append(body_s)
        self._data_s += data_s

    def add_boundary(self, seconds: float) -> None:
        """Time between two steps."""
        self._boundary_s += seconds

    def row(self) -> Steps | None:
        """What was added since the last row; None for no step."""
        body, self._body = self._body, []
        data_s, self._data_s = self._data_s, 0.0
        boundary_s, self._boundary_s = self._boundary_s, 0.0
        if not body:
            return None
        return Steps(
            n=len(body), seconds=sum(body), min_s=min(body), max_s=max(body), data_s=data_s, boundary_s=boundary_s
        )


class Metrics:
    """Numbers that the training code logs. A tensor is read a step after it came, when it has long been computed."""

    def __init__(self, *, level: int) -> None:
        self._level = level
        self._waiting: list[tuple[int, dict[str, _Later]]] = []
        self._rows: dict[str, Metric] = {}

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Keep ``values`` of step number ``step``; starts copies from devices, waits for nothing."""
        self._waiting.append((step, {name: _Later(name, value) for name, value in values.items()}))

    def settle(self, before: int) -> None:
        """Read, log and sum up what came in steps before number ``before``."""
        while self._waiting and self._waiting[0][0] < before:
            step, values = self._waiting.pop(0)
            numbers = {name: later.read() for name, later in values.items()}
            _log.log(self._level, "step %d  %s", step, "  ".join(f"{k}={v:.6g}" for k, v in numbers.items()))
            for name, x in numbers.items():
                row = self._rows.get(name)
                self._rows[name] = one(name, x) if row is None else _with(row, x)

    def rows(self) -> list[Metric]:
        """A row a name, of what was settled since the last call."""
        rows, self._rows = list(self._rows.values()), {}
        return rows


def one(name: str, value: Any) -> Metric:
    """A metric of one value, read at once."""
    x = _Later(name, value).read()
    return Metric(name=name, last=x, mean=x, min=x, max=x)


def _with(row: Metric, x: float) -> Metric:
    n = row.n + 1
    return Metric(
        name=row.name,
        last=x,
        n=n,
        mean=row.mean + (x - row.mean) / n,
        min=min(row.min, x),
        max=max(row.max, x),
    )


class _Later:
    """A number, or a one-element tensor on its way to the host."""

    def __init__(self, name: str, value: Any) -> None:
        self._ready: torch.Event | None = None
        if not isinstance(value, torch.Tensor):
            self._value: Any = value
        elif value.numel() != 1:
            raise Refused(f"{name} has {value.numel()} elements", hint=f"log a number: {name}={name}.mean()")
        elif hasattr(value, "full_tensor"):
            raise Refused(
                f"{name} is spread over ranks", hint=f"log what is the same on all: {name}={name}.full_tensor()"
            )
        elif value.device.type == "cpu":
            self._value = value.detach().clone()
        else:  # into pinned memory, behind what is queued: the host goes on
            self._value = value.detach().to("cpu", non_blocking=True)
            self._ready = torch.Event(value.device)
            self._ready.record()
        if isinstance(value, str) or not hasattr(self._value, "__float__"):
            raise Refused(f"{name} is a {type(value).__name__}, not a number")

    def read(self) -> float:
        if self._ready is not None:
            self._ready.synchronize()
        return float(self._value)
