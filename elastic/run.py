"""The loop: ``Run`` owns the step boundary, where data position, stop, saves and the ledger fall due together."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import psutil
import torch

import ckpt
from ckpt.errors import Refused, Superseded
from ckpt.policy import Keep
from elastic import membership
from elastic.agreement import SAVE_ASKED, SAVE_CLOCK, SAVE_OVERDUE, STOP_ASKED, STOP_SIGNAL, Agreement, Flags
from elastic.batches import Batches
from elastic.cadence import Auto, parse_every
from elastic.group import check_group, end_superseded, has_position
from elastic.ledger.events import (
    Error,
    Finished,
    Payload,
    Resumed,
    RunStarted,
    SaveCommitted,
    Stopped,
    StopRequested,
)
from elastic.ledger.history import pulse_s, since_save
from elastic.ledger.reader import read
from elastic.ledger.summary import Metrics, StepTimes, one
from elastic.ledger.writer import Writer
from elastic.notices import Notice
from elastic.saves import GRACE_S, Saves, error_name
from elastic.step import Step
from elastic.stop import STOPPED, StopSignals
from elastic.tolerance import Tolerance

_log = logging.getLogger("elastic")
_one_at_a_time = threading.Lock()


class Run:
    """A training run that resumes, saves and stops by itself; used as ``with Run(url, state) as run:`` on every rank.

    Entering restores the newest valid step into ``state``, or starts fresh where nothing was saved (see
    ``ckpt.Checkpoints.resume``). ``every`` is when to save: "auto" (as often as it pays), 500 or "500 steps", "10m".
    "auto" keeps what it has learned of failures and costs in each step, and adds from the ledger what came after it.
    ``keep`` is the retention policy (None: all). ``fresh`` starts from zero beside what is there; ``allow_fallback``
    goes back past more than two damaged steps. ``client`` and ``storage_options`` go to the store, ``deadline_s``
    bounds every wait for other ranks in saving and loading. ``save_failures`` is what a failed save means: "warn"
    trains on, and insists once three intervals have passed without a committed step; "raise" ends at once; "stop" ends
    the loop after this step and then raises (see ``elastic.tolerance``). ``stop_on`` asks to stop besides signals:
    ``elastic.StopFile``, ``TimeLimit``, ``NoticeUrl``. ``incremental``, ``replicas`` and ``verify_snapshot`` are those
    of ``ckpt.open``.

    Leaving the block waits until the last save is durable; after SIGTERM, SIGUSR1 or Ctrl-C it then ends the process
    with status 75; where another job has taken over the run, with status 6. ``break`` and exceptions save nothing:
    state in the middle of a step is never stored. One run at a time in a process; all methods are called on the thread
    that entered it.
    """

    def __init__(
        self,
        url: str,
        state: ckpt.State,
        *,
        every: int | str = "auto",
        keep: Keep | None = None,
        fresh: bool = False,
        allow_fallback: bool = False,
        client: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        deadline_s: float = 600.0,
        save_failures: str = "warn",
        stop_on: Sequence[Notice] = (),
        incremental: bool = False,
        replicas: str = "raise",
        verify_snapshot: bool = False,
    ) -> None:
        self._url, self._state, self._fresh = url, state, fresh
        self._cadence = parse_every(every, nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")))
        self._open: dict[str, Any] = {
            "keep": keep,
            "fresh": fresh,
            "allow_fallback": allow_fallback,
            "client": client,
            "deadline_s": deadline_s,
            "incremental": incremental,
            "replicas": replicas,
            "verify_snapshot": verify_snapshot,
        }
        self._open |= dict(storage_options or {})
        if misnamed := [k for k, v in state.entries.items() if k != "data" and has_position(v)]:
            raise Refused(f"State({misnamed[0]}=…) gives batches, which a run looks for under the name 'data'",
                          hint="ckpt.State(…, data=loader)")  # fmt: skip
        self._batches = Batches(state.entries.get("data"))
        self._unfinished = False
        self._signals, self._notices = StopSignals(), tuple(stop_on)
        self._times = StepTimes()
        self._undo = ExitStack()
        self._entered = self._looping = self._begun = False
        self._step = 0
        self._tolerance = Tolerance(save_failures, now_s=time.monotonic())
        self._ended_by: BaseException | None = None
        self._since = self._pulse_at = 0.0
        self._stop_asked = self._save_asked = self._stop_told = False
        self._stopping = 0
        self._until: int | None = None

    def __enter__(self) -> Self:
        if self._begun or self._entered:
            raise Refused(
                "this Run was entered before", hint="make a new Run, with a new process group, to start again"
            )
        self._rank, world = check_group()
        if not _one_at_a_time.acquire(blocking=False):
            raise Refused("another Run is active in this process", hint="leave its with block first")
        with ExitStack() as undo:
            undo.callback(_one_at_a_time.release)
            began = time.time()
            seconds = {"start": began - psutil.Process().create_time()}
            self._checkpoints = ckpt.open(self._url, **self._open)
            self._state.keep_aside(self._cadence if isinstance(self._cadence, Auto) else None)
            self.resumed = self._checkpoints.resume(self._state)
            self._step = self.resumed.step
            self._saves = Saves(self._checkpoints, self._state, self._cadence, self._tolerance, self._tell_step)
            self._saves.saved_step = self.resumed.step if self.resumed.attempt else None
            epoch = self._checkpoints.epoch
            assert epoch is not None
            self._agreement = Agreement()
            undo.callback(self._agreement.close)
            self._look_back(epoch)
            seconds |= {**self.resumed.seconds, "resume": time.time() - began}
            self._ledger = Writer(
                self._checkpoints.store,
                epoch=epoch,
                rank=self._rank,
                world=world,
                generation=membership.generation(),
            )
            undo.callback(self._ledger.close)
            undo.callback(self._batches.close)
            self._metrics = Metrics(level=logging.INFO if self._rank == 0 else logging.DEBUG)
            self._tell_start(began, seconds)
            for notice in self._notices:
                notice.open()
                undo.callback(notice.close)
            undo.enter_context(self._signals)
            self._undo = undo.pop_all()
        self._entered = True
        return self

    resumed: ckpt.Resumed
    """What entering restored: step, attempt, what was skipped and why, seconds by phase."""

    @property
    def step(self) -> int:
        """Completed steps."""
        return self._step

    def steps(self, until: int) -> Iterator[Step]:
        """Steps up to ``until`` completed ones, from where the state is. Asking for the next completes the last.

        The last one is saved. Ends early when all ranks have agreed to stop; the state is saved then, too. The batches
        come from the state's ``data``; random streams are put back after its iterator is built.
        """
        if not self._entered or self._looping:
            raise Refused("steps() belongs inside the run's with block, one loop at a time")
        self._looping, self._until = True, until
        try:
            self._agreement.check_same("steps(until=...)", until)
            if self._step < until and not self._stopping:
                self._begin()
                self._agreement.post(self._flags())
            mark = time.monotonic()
            while self._step < until and not self._stopping:
                batch = self._batches.next()
                fetched = time.monotonic()
                self._unfinished = True
                step = Step(self._step, batch, self._batches.weights, self._batches.next)
                yield step
                step.check_taken()
                self._unfinished = False
                done = time.monotonic()
                self._times.add(body_s=done - fetched, data_s=fetched - mark)
                self._cadence.step(done - mark)
                self._boundary(last=self._step + 1 == until)
                mark = time.monotonic()
                self._times.add_boundary(mark - done)
        finally:
            self._looping = False

    def save(self) -> None:
        """Ask for a save, from any rank; it is made when all ranks know: after this step or the next."""
        self._save_asked = True

    def stop(self) -> None:
        """Ask all ranks to end the loop, from any rank: after this step or the next, with a save, status unchanged."""
        self._stop_asked = True

    def log(self, **values: Any) -> None:
        """Log numbers of this step. A tensor is read one step later, so this waits for no device.

        They go to the logger "elastic" (INFO on rank 0), and summed up to the ledger.
        """
        self._metrics.add(self._step, values)

    def metric(self, **values: Any) -> None:
        """Put numbers into the ledger at once, a row each: results of an evaluation, rather than of a step."""
        for name, value in values.items():
            self._tell(one(name, value))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._undo:
            self._entered = False
            if error is not None:
                self._abandon(error)
                if isinstance(error, Superseded):
                    end_superseded(error)
                return
            try:
                self._leave()
            except BaseException as late:
                self._tell_error(late)
                if isinstance(late, Superseded):
                    end_superseded(late)
                raise
            if self._stopping == STOP_SIGNAL:
                # the first rank to end makes torchrun send SIGTERM to the others: they end with this status, too
                self._signals.ignore()
                if self._rank == 0:
                    _log.warning("stopped on request, step %d is saved: start the same command again", self._step)
                raise SystemExit(STOPPED)

    # --- the boundary ---------------------------------------------------------------------------------------------

    def _boundary(self, *, last: bool) -> None:
        """Between two steps: the only place where the position moves, saves begin, errors of saves come out."""
        self._step += 1
        self._batches.advance()
        agreed = self._agreement.take(self._flags())
        saves = self._saves
        saves.stall_s = max(saves.stall_s, agreed.stall_us / 1e6)
        self._metrics.settle(self._step - 1)
        saves.look()
        if self._rank == 0 and time.monotonic() >= self._pulse_at:
            self._pulse()
        stop = agreed.stop
        verdict = saves.tolerance.judge(saves.failure) if saves.failure and self._agreement.alone else agreed.failed
        if verdict and (failure := saves.settle(verdict)):
            stop, self._ended_by = stop or STOP_ASKED, failure
        self._stopping = 0 if last else stop
        reason = (
            "end" if last
            else "stop" if self._stopping
            else "steps" if self._cadence.at(self._step) and agreed.save != SAVE_OVERDUE
            else {SAVE_OVERDUE: "overdue", SAVE_CLOCK: "clock", SAVE_ASKED: "asked"}.get(agreed.save)
        )  # fmt: skip
        if reason and saves.saved_step != self._step:
            self._save(reason)
        if not (last or self._stopping):
            self._agreement.post(self._flags())

    def _begin(self) -> None:
        """Before the first step: the data iterator, then the random streams, which building one may have moved."""
        if self._unfinished:  # the batch of a step that was left is trained on again
            self._unfinished = False
            self._batches.begin()
        if not self._begun:
            self._begun = True
            self._batches.begin()
            self._state.restore_rng()
            self._cadence.start()
            self._since = time.monotonic()

    def _flags(self) -> Flags:
        """What this rank has to say now."""
        if self._signals.name is None:
            for asked in filter(None, (notice.asked() for notice in self._notices)):
                self._signals.note(asked.source, asked.within_s)
        signalled = self._signals.name is not None
        if (signalled or self._stop_asked) and not self._stop_told:
            self._stop_told = True
            source = self._signals.name or "run.stop"
            _log.info("stop requested by %s: saving at the next step that all ranks agree on", source)
            self._tell(
                StopRequested(source=source, within_s=self._signals.within_s), unix_s=self._signals.unix_s or None
            )
        saves = self._saves
        rank0 = self._rank == 0
        due = SAVE_CLOCK if rank0 and ((saves.idle and self._cadence.due()) or saves.retry_due()) else 0
        overdue = rank0 and saves.overdue()
        return Flags(
            stop=STOP_SIGNAL if signalled else STOP_ASKED if self._stop_asked else 0,
            save=SAVE_OVERDUE if overdue else SAVE_ASKED if self._save_asked else due,
            failed=saves.tolerance.judge(saves.failure) if saves.failure else 0,
            stall_us=int(saves.stall_s * 1e6),
        )

    def _save(self, reason: str) -> None:
        if isinstance(self._cadence, Auto):
            self._cadence.agree(self._agreement.from_rank_0)
        if row := self._times.row():  # steps before the upload and during it are told apart
            self._tell(row)
        self._save_asked = False
        self._saves.begin(self._step, reason)
        if reason == "overdue":
            self._saves.finish()

    # --- entering and leaving ---------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """A normal end, or a break: what was saved becomes durable."""
        saves = self._saves
        if saves.failure is not None:
            raise saves.failure
        if saves.saved_step == self._step and not self._unfinished:
            saves.finish_last(self._step)
        else:
            saves.finish()
        self._metrics.settle(self._step + 1)
        self._flush()
        if self._stopping:
            self._tell(Stopped(status=STOPPED if self._stopping == STOP_SIGNAL else 0))
        elif self._step == self._until:
            self._tell(Finished(until=self._until))
        if self._ended_by is not None:
            raise self._ended_by

    def _abandon(self, error: BaseException) -> None:
        """An exception: nothing is saved any more; a save under way gets a moment, unless somebody wants us gone."""
        self._signals.__exit__(None, None, None)
        self._flush()
        self._tell_error(error)
        if self._signals.name is None:
            self._saves.give_up()
        self._ledger.close(GRACE_S)

    def _look_back(self, epoch: str) -> None:
        """Rank 0 of an automatic cadence: what the ledger says of the starts since the restored step was saved."""
        if self._rank or self._fresh or not isinstance(self._cadence, Auto):
            return
        attempt = self.resumed.attempt
        first = "" if attempt is None else attempt.partition("-")[2].rpartition("-")[0]
        try:
            events = read(self._checkpoints.store, rank=0, since=first).events
            self._cadence.resumed(since_save(events, attempt=attempt, epoch=epoch))
        except Exception as error:  # a hint for the interval, no reason to end a job
            _log.warning("the ledger cannot be read, so failures since the last save are not counted: %s", error)

    def _pulse(self) -> None:
        """A sign of life, from which a failure's time and the steps before it are known."""
        self._flush()
        now = time.monotonic()
        self._pulse_at = now + pulse_s(now - self._since)

    def _tell(self, data: Payload, *, step: int | None = None, unix_s: float | None = None) -> None:
        self._ledger.record(data, step=self._step if step is None else step, unix_s=unix_s)

    def _tell_step(self, data: Payload, step: int) -> None:
        self._tell(data, step=step)
        if isinstance(data, SaveCommitted):
            self._flush()

    def _tell_start(self, began: float, seconds: dict[str, float]) -> None:
        count = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        self._tell(
            RunStarted(
                url=self._checkpoints.url,
                every=str(self._cadence),
                restart_count=int(count) if count else None,
                versions={"torch": torch.__version__},
            ),
            unix_s=began,
        )
        r = self.resumed
        self._tell(Resumed(attempt=r.attempt, skipped=r.skipped, world_then=r.world_then, rng=r.rng, seconds=seconds))
        _log.log(logging.INFO if self._rank == 0 else logging.DEBUG, "%s", r)
        self._flush()

    def _tell_error(self, error: BaseException) -> None:
        self._tell(Error(error=error_name(error), message=str(error)[:2000]))

    def _flush(self) -> None:
        """Close the open sums and have the ledger written."""
        changes = self._cadence.changes()
        for row in (self._times.row(), *self._metrics.rows(), *(changes if self._rank == 0 else ())):
            if row is not None:
                self._tell(row)
        self._ledger.flush()
