"""Sums up what happens too often to be an event of its own: steps, and the metrics of steps."""

from __future__ import annotations

import logging
import math
import os
import resource
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from ckpt.errors import Refused
from elastic.ledger.events import Metric, Steps
from elastic.ledger.lastseen import LastWords, found
from elastic.ledger.power import Meter, of_this_host
from elastic.ledger.quantiles import Quantiles
from elastic.ledger.writer import Writer

_log = logging.getLogger("elastic")
_MANY = 128
_RSS = 1 if sys.platform == "darwin" else 1024  # what getrusage counts memory in


class StepTimes:
    """Times of the steps since the last row, on the thread that trains.

    ``begin`` joins it to a run; only then it measures CPU time, memory and energy, and leaves its last words on the
    host, where whatever cannot be written is left out.
    """

    def __init__(self) -> None:
        self._n, self._least_s, self._most_s = 0, math.inf, 0.0
        self._whole, self._wholes = Quantiles(), list[float]()  # the latter wait: one by one, they cost more
        self._body_s = self._data_s = self._boundary_s = self._save_s = self._cpu_s = self._since_s = 0.0
        self._steps = 0
        self._cpu_at: float | None = None
        self._words: LastWords | None = None
        self._energy = Meter(None)

    def begin(self, ledger: Writer, url: str, step: int) -> None:
        """From now on, steps after ``step`` belong to the run at ``url``; tells its ledger how predecessors ended."""
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self._steps, self._cpu_at = step, time.thread_time()
        self._energy = Meter(of_this_host() if local == 0 else None)
        rank, epoch = ledger.rank, ledger.epoch
        try:
            for seen in found(url, before=epoch, rank=rank, world=ledger.world, first_here=local == 0):
                ledger.record(seen, step=step)
                ledger.flush()  # it is told once
            self._words = LastWords(url, epoch=epoch, start=ledger.start, rank=rank)
        except OSError as error:
            _log.debug("how far this process comes is not kept on this host: %s", error)

    def begin_body(self) -> None:
        """The batch is there, the body of a step begins."""
        if self._cpu_at is not None:
            self._cpu_at = time.thread_time()

    def add(self, *, body_s: float, data_s: float) -> None:
        """One step: its body, and the wait for its batch."""
        self._n += 1
        self._body_s += body_s
        self._least_s, self._most_s = min(self._least_s, body_s), max(self._most_s, body_s)
        self._wholes.append(self._since_s + body_s + data_s)
        if len(self._wholes) == _MANY:
            self._fold()
        self._data_s += data_s
        self._since_s = 0.0
        self._steps += 1
        if self._cpu_at is not None:
            self._cpu_s += time.thread_time() - self._cpu_at
        self._tell()

    def add_boundary(self, seconds: float) -> None:
        """Time between two steps, a save's stall included."""
        self._boundary_s += seconds
        self._since_s += seconds
        self._tell()

    def add_save(self, seconds: float) -> None:
        """Of the boundary under way, training stood still so long for a save."""
        self._save_s += seconds
        self._since_s -= seconds

    def row(self) -> Steps | None:
        """What was added since the last row; None for no step."""
        if not self._n:
            return None
        self._fold()
        measured = self._cpu_at is not None
        row = Steps(
            n=self._n, seconds=self._body_s, min_s=self._least_s, max_s=self._most_s,
            data_s=self._data_s, boundary_s=self._boundary_s, save_s=self._save_s, times=str(self._whole),
            cpu_s=self._cpu_s if measured else None, energy_j=self._energy.take(),
            peak_bytes=_peak_bytes() if measured else None,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS if measured else None,
        )  # fmt: skip
        self._body_s = self._data_s = self._boundary_s = self._save_s = self._cpu_s = self._most_s = 0.0
        self._n, self._least_s, self._whole = 0, math.inf, Quantiles()
        return row

    def _fold(self) -> None:
        for seconds in self._wholes:
            self._whole.add(seconds)
        self._wholes.clear()

    def close(self) -> None:
        """The run is left in good order: nothing is left on the host."""
        words, self._words = self._words, None
        if words is not None:
            words.close()

    def _tell(self) -> None:
        if self._words is not None:
            self._words.write(time.time(), self._steps, self._n, self._body_s, self._data_s, self._boundary_s,
                              self._save_s)  # fmt: skip


def _peak_bytes() -> int | None:
    if not torch.accelerator.is_available() or not torch.accelerator.current_accelerator():
        return None
    return torch.accelerator.max_memory_allocated()


class Metrics:
    """Numbers that the training code logs. A tensor is read a step after it came, when it has long been computed."""

    def __init__(self, *, level: int) -> None:
        self._level = level
        self._waiting: list[tuple[int, dict[str, float | _Later]]] = []
        self._rows: dict[str, list[float]] = {}  # n, sum, min, max, last: cheap to add to between two steps

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Keep ``values`` of step number ``step``; starts copies from devices, waits for nothing."""
        numbers: dict[str, float | _Later] = {name: _number(name, value) for name, value in values.items()}
        self._waiting.append((step, numbers))

    def settle(self, before: int) -> None:
        """Read, log and sum up what came in steps before number ``before``."""
        while self._waiting and self._waiting[0][0] < before:
            step, values = self._waiting.pop(0)
            numbers = {name: x if isinstance(x, float) else x.read() for name, x in values.items()}
            if self._level >= logging.INFO and _log.isEnabledFor(self._level):
                _log.log(self._level, "step %d  %s", step, "  ".join(f"{k}={v:.6g}" for k, v in numbers.items()))
            for name, x in numbers.items():
                row = self._rows.get(name)
                if row is None:
                    self._rows[name] = [1, x, x, x, x]
                else:
                    row[:] = row[0] + 1, row[1] + x, min(row[2], x), max(row[3], x), x

    def rows(self) -> list[Metric]:
        """A row a name, of what was settled since the last call."""
        rows, self._rows = self._rows, {}
        return [
            Metric(name=name, n=int(n), mean=total / n, min=least, max=most, last=last)
            for name, (n, total, least, most, last) in rows.items()
        ]


def one(name: str, value: Any) -> Metric:
    """A metric of one value, read at once."""
    number = _number(name, value)
    x = number if isinstance(number, float) else number.read()
    return Metric(name=name, last=x, mean=x, min=x, max=x)


def _number(name: str, value: Any) -> float | _Later:
    """A number; of a tensor on a device a promise of one."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise Refused(f"{name} has {value.numel()} elements", hint=f"log a number: {name}={name}.mean()")
        if hasattr(value, "full_tensor"):
            raise Refused(
                f"{name} is spread over ranks", hint=f"log what is the same on all: {name}={name}.full_tensor()"
            )
        return float(value.item()) if value.is_cpu else _Later(value)
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise Refused(f"{name} is a {type(value).__name__}, not a number")
    return float(value)


class _Later:
    """A one-element tensor on its way to the host, into pinned memory, behind what is queued: the host goes on."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value.detach().to("cpu", non_blocking=True)
        self._ready = torch.Event(value.device)
        self._ready.record()

    def read(self) -> float:
        """Waits for it."""
        self._ready.synchronize()
        return float(self._value)
