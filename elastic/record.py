"""What a run says of itself while it runs, on one rank: to the ledger, and to the log."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import ckpt
from ckpt.errors import CkptError
from ckpt.store.contract import Store
from elastic.cadence import Auto, Cadence
from elastic.environment import fingerprint, warn_of_changes
from elastic.ledger.events import Error, Metric, Payload, Resumed, RunStarted, SaveCommitted
from elastic.ledger.history import pulse_s, since_save
from elastic.ledger.reader import read
from elastic.ledger.summary import Metrics, StepTimes
from elastic.ledger.writer import Writer

_log = logging.getLogger("elastic")


class Record:
    """The story of one start. Any thread may ``tell``; all else is called on the thread that trains.

    ``step`` gives the completed steps of the moment.
    """

    def __init__(self, ledger: Writer, cadence: Cadence, *, rank: int, step: Callable[[], int]) -> None:
        self._ledger, self._cadence, self._rank, self._step = ledger, cadence, rank, step
        self._level = logging.INFO if rank == 0 else logging.DEBUG
        self.times, self.metrics = StepTimes(), Metrics(level=self._level)
        self._since = self._pulse_at = 0.0
        self._measured: dict[str, dict[int, float]] = {}
        self._earlier: dict[str, dict[int, float]] | None = None

    def tell(self, data: Payload, step: int | None = None, *, unix_s: float | None = None) -> None:
        """One event, at a step other than that of the moment where one is given."""
        self._ledger.record(data, step=self._step() if step is None else step, unix_s=unix_s)
        if isinstance(data, SaveCommitted):
            self.flush()

    def tell_now(self, data: Payload, *, unix_s: float | None = None) -> None:
        """One event, from any thread, that is to be on the store as soon as may be."""
        self._ledger.record(data, step=self._step(), unix_s=unix_s)
        self._ledger.flush()

    def tell_start(
        self, url: str, began: float, resumed: ckpt.Resumed, seconds: dict[str, float], *, skip: int, warm: str | None
    ) -> None:
        """That the run was entered, at ``began``, and what was restored."""
        count = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        started = RunStarted(
            url=url, every=str(self._cadence), restart_count=int(count) if count else None, versions=fingerprint()
        )
        self.tell(started, unix_s=began)
        r = resumed
        self.tell(
            Resumed(
                attempt=r.attempt, skipped=r.skipped, world_then=r.world_then, rng=r.rng, seconds=seconds,
                rolled_back=r.rolled_back, skip=skip, warm=warm, inexact=r.inexact,
            )
        )  # fmt: skip
        more = f", leaving out {skip} batches" if skip else f", with the weights of {warm}" if warm else ""
        _log.log(self._level, "%s%s", resumed, more)
        self.times.begin(self._ledger, url, resumed.step)
        self.flush()

    def measure(self, metric: Metric, step: int) -> None:
        """A number that is of the state at ``step``."""
        self.tell(metric, step)
        self._measured.setdefault(metric.name, {})[step] = metric.last

    def measured(self, store: Store, name: str) -> dict[int, float]:
        """All numbers of that name of this rank, in this start and earlier ones, by step."""
        if self._earlier is None:
            self._earlier = {}
            for event in read(store, rank=self._rank).events:
                if isinstance(event.data, Metric):
                    self._earlier.setdefault(event.data.name, {})[event.step] = event.data.last
        return self._earlier.get(name, {}) | self._measured.get(name, {})

    def tell_error(self, error: BaseException) -> None:
        """That the run is left by an exception."""
        self.tell(Error(error=error_name(error), message=str(error)[:2000]))

    def warn(self, *texts: str) -> None:
        """Say it once for all ranks."""
        for text in texts if self._rank == 0 else ():
            _log.warning("%s", text)

    def train(self) -> None:
        """The first step begins."""
        self._since = time.monotonic()

    def pulse(self) -> None:
        """Rank 0: a sign of life when it is time, from which a failure's time and the steps before it are known."""
        now = time.monotonic()
        if self._rank == 0 and now >= self._pulse_at:
            self.flush()
            self._pulse_at = now + pulse_s(now - self._since)

    def sum_steps(self) -> None:
        """Close the sum of steps: those before an upload and those during it are told apart."""
        if row := self.times.row():
            self.tell(row)

    def flush(self) -> None:
        """Close the open sums and have the ledger written."""
        changes = self._cadence.changes()
        for row in (self.times.row(), *self.metrics.rows(), *(changes if self._rank == 0 else ())):
            if row is not None:
                self.tell(row)
        self._ledger.flush()


def look_back(store: Store, cadence: Cadence, resumed: ckpt.Resumed, epoch: str) -> None:
    """Rank 0: what the ledger says of the starts since the restored step was saved, for whom it concerns."""
    attempt = resumed.attempt
    first = "" if attempt is None else attempt.partition("-")[2].rpartition("-")[0]
    try:
        events = read(store, rank=0, since=first).events
        since = since_save(events, attempt=attempt, epoch=epoch)
        warn_of_changes(events, attempt)
    except Exception as error:  # a hint for the interval, no reason to end a job
        _log.warning("the ledger cannot be read, so failures since the last save are not counted: %s", error)
        return
    if since.notices_missed:
        _log.warning(
            "stop notices missed after step %d: %d. The process was killed before its state was saved; "
            "ask earlier, or save more often", resumed.step, since.notices_missed,
        )  # fmt: skip
    if isinstance(cadence, Auto):
        cadence.resumed(since)


def error_name(error: BaseException) -> str:
    """How the ledger names an error: by its code where it is one of ours."""
    return error.code if isinstance(error, CkptError) else type(error).__name__
