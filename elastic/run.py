"""The loop: ``Run`` owns the step boundary, where data position, stop, saves and the ledger fall due together."""

from __future__ import annotations

import logging
import math
import operator
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import ckpt
from ckpt.errors import Refused, Superseded
from ckpt.policy import Keep
from elastic import membership
from elastic.agreement import (
    NOTHING,
    SAVE_ASKED,
    SAVE_CLOCK,
    SAVE_OVERDUE,
    STOP_ASKED,
    STOP_SIGNAL,
    Agreement,
    Flags,
    together,
)
from elastic.audit import unregistered
from elastic.batches import Batches
from elastic.buckets import pin
from elastic.cadence import Auto, Cadence, parse_every
from elastic.evaluation import Evaluation
from elastic.group import check_group, end_superseded, has_position
from elastic.launch.beats import beat
from elastic.ledger import marks
from elastic.ledger.events import Evaluated, Finished, Stopped, StopRequested
from elastic.ledger.summary import one
from elastic.ledger.writer import Writer
from elastic.notices import Notice
from elastic.record import Record, look_back
from elastic.saves import GRACE_S, Saves
from elastic.start import Start
from elastic.step import Step
from elastic.stop import STOPPED, StopRequests
from elastic.tolerance import Tolerance
from elastic.units import parse_duration

_log = logging.getLogger("elastic")
_one_at_a_time = threading.Lock()
LONG_STEP_S = 1.0  # from then on a round trip at each boundary is nothing, and a stop saves a step earlier
REASONS = {0: None, SAVE_OVERDUE: "overdue", SAVE_CLOCK: "clock", SAVE_ASKED: "asked"}
AGREE_S, MOST_STEPS = 0.4, 4  # shorter steps agree so often, but not seldom in steps, for those may become long


class Run:
    """A training run that resumes, saves and stops by itself; used as ``with Run(url, state) as run:`` on every rank.

    Entering restores the newest valid step into ``state``, or starts fresh where nothing was saved (see
    ``ckpt.Checkpoints.resume``). ``every`` is when to save: "auto" (as often as it pays), 500 or "500 steps", "10m",
    or a ``elastic.Cadence`` of your own.
    "auto" keeps what it has learned of failures and costs in each step, and adds from the ledger what came after it.
    ``keep`` is the retention policy (None: all). ``allow_fallback`` goes back past more than two damaged steps.
    ``client`` and ``storage_options`` go to the store, ``deadline_s`` bounds every wait for other ranks in saving and
    loading. ``save_failures`` is what a failed save means: "warn" trains on, and insists once three intervals have
    passed without a committed step; "raise" ends at once; "stop" ends the loop after this step and then raises (see
    ``elastic.tolerance``). ``incremental``, ``replicas`` and ``verify_snapshot`` are those of ``ckpt.open``.

    Where to begin: ``fresh`` at zero, beside what is there. ``start`` rolls back to that step, whose successors then
    count no longer, and ``skip`` leaves out so many global batches from there. A restart of the same job does neither
    again (torchrun's restarts, Slurm's requeues; for ``start`` any start that asks for the same ``start`` and
    ``skip``): it goes on from what has been saved since. ``warm_start`` is the URL of another run, from whose newest
    valid step a run that restores nothing takes the weights of its modules. ``init`` is called where nothing was
    restored, before that; also where a module has buffers that no step holds.

    What asks to stop: SIGTERM, SIGUSR1, Ctrl-C, which are followed by SIGKILL after ``grace`` ("30s", as torchrun and
    Kubernetes have it), and ``stop_on``: ``elastic.StopFile``, ``TimeLimit``, ``NoticeUrl``. All ranks stop at the same
    step: with steps of a second and more the one that was under way; else within two, where they are shorter than 0.4 s
    within up to five. The ledger says whether the save was done in time.

    Leaving the block waits until the last save is durable; after a signal or a notice it then ends the process with
    status 75; where another job has taken over the run, with status 6. ``break`` and exceptions save nothing:
    state in the middle of a step is never stored. One run at a time in a process; all methods are called on the thread
    that entered it.
    """

    def __init__(
        self,
        url: str,
        state: ckpt.State,
        *,
        every: int | str | Cadence = "auto",
        keep: Keep | None = None,
        fresh: bool = False,
        start: int | None = None,
        skip: int = 0,
        warm_start: str | None = None,
        init: Callable[[], object] | None = None,
        allow_fallback: bool = False,
        client: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        deadline_s: float = 600.0,
        save_failures: str = "warn",
        stop_on: Sequence[Notice] = (),
        grace: str = "30s",
        incremental: bool = False,
        replicas: str = "raise",
        verify_snapshot: bool = False,
    ) -> None:
        self._url, self._state = url, state
        self._start = Start(fresh=fresh, start=start, skip=skip, warm_start=warm_start, init=init)
        self._cadence = parse_every(every, nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")))
        self._store_options: dict[str, Any] = {"client": client, "deadline_s": deadline_s} | dict(storage_options or {})
        self._open: dict[str, Any] = {
            "keep": keep,
            "allow_fallback": allow_fallback,
            "incremental": incremental,
            "replicas": replicas,
            "verify_snapshot": verify_snapshot,
        }
        if misnamed := [k for k, v in state.entries.items() if k != "data" and has_position(v)]:
            raise Refused(f"State({misnamed[0]}=…) gives batches, which a run looks for under the name 'data'",
                          hint="ckpt.State(…, data=loader)")  # fmt: skip
        self._batches = Batches(state.entries.get("data"))
        self._unfinished = False
        self._requests = StopRequests(stop_on, weakref.WeakMethod(self._tell_stop_request), parse_duration(grace))
        self._undo = ExitStack()
        self._entered = self._looping = self._begun = self._evaluating = False
        self._step = self._turns = 0
        self._tolerance = Tolerance(save_failures, now_s=time.monotonic())
        self._ended_by: BaseException | None = None
        self._stop_asked = self._save_asked = False
        self._step_s = LONG_STEP_S
        self._agree_at = 0
        self._heard = NOTHING
        self._evaluated_s = 0.0
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
            self._requests.open()
            undo.callback(self._requests.close)
            began = time.time()
            seconds = marks.phases(began)
            skip, warm = self._resume()
            self._step = self.resumed.step
            epoch = self._checkpoints.epoch
            assert epoch is not None
            self._agreement = Agreement()
            undo.callback(self._agreement.close)
            if self._rank == 0 and not self._start.fresh:
                look_back(self._checkpoints.store, self._cadence, self.resumed, epoch)
            seconds |= {**self.resumed.seconds, "resume": time.time() - began}
            ledger = Writer(
                self._checkpoints.store,
                epoch=epoch,
                rank=self._rank,
                world=world,
                generation=membership.generation(),
            )
            undo.callback(ledger.close)
            self._ledger = ledger
            me = weakref.ref(self)  # a run that was left is gone at once, with its model, not when cycles are collected
            self._record = Record(
                ledger, self._cadence, rank=self._rank, step=lambda: run._step if (run := me()) else 0
            )
            undo.callback(self._record.times.close)
            undo.callback(self._batches.close)
            self._saves = Saves(self._checkpoints, self._state, self._cadence, self._tolerance, self._record.tell)
            self._saves.saved_step = self.resumed.step if self.resumed.attempt else None
            self._record.tell_start(self._checkpoints.url, began, self.resumed, seconds, skip=skip, warm=warm)
            undo.enter_context(self._requests)
            self._undo = undo.pop_all()
        self._entered = True
        return self

    resumed: ckpt.Resumed
    """What entering restored: step, attempt, what was skipped and why, seconds by phase."""

    unregistered: tuple[str, ...] = ()
    """What the loop keeps beside the state, so that it is not saved, and what to write. Known once the loop runs."""

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
        try:
            until = operator.index(until)
        except TypeError:
            raise Refused(f"steps(until={until!r}): give a whole number of steps", hint="int(…)") from None
        self._looping, self._until = True, until
        times = self._record.times
        try:
            self._agreement.check_same("steps(until=...)", until)
            if not self._begun:
                self.unregistered = unregistered(self._state, sys._getframe(1), log=self._rank == 0)
            if self._step < until and not self._stopping:
                self._begin()
                self._agreement.post(self._flags())
                self._agree_at = self._step + 1
            mark = time.monotonic()
            more = None if self._batches.none else self._batches.next
            while self._step < until and not self._stopping:
                batch = self._batches.next()
                fetched = time.monotonic()
                times.begin_body()
                self._unfinished, self._evaluated_s = True, 0.0
                step = Step(self._step, batch, self._batches.weights, more)
                yield step
                step.check_taken()
                self._unfinished = False
                done = time.monotonic()
                times.add(body_s=done - fetched - self._evaluated_s, data_s=fetched - mark)
                self._cadence.step(done - mark)
                self._step_s = done - mark
                self._boundary(step.batches, last=self._step + 1 == until)
                mark = time.monotonic()
                times.add_boundary(mark - done)
        finally:
            self._looping = False

    @contextmanager
    def evaluation(self) -> Iterator[Evaluation]:
        """A block that evaluates, within a step or after the loop, on all ranks: see :class:`Evaluation`."""
        if not self._entered or self._evaluating or (self._looping and not self._unfinished):
            raise Refused("evaluation() belongs inside the run's with block, one at a time")
        self._evaluating = True
        self._turns += 1
        beat(self._step, "evaluate")
        evaluation = Evaluation(self._agreement, self._flags, self._state)
        try:
            with evaluation:
                yield evaluation
        except BaseException:
            # whoever goes on from here alone has missed rounds of the others: all are to hear of it at once
            self._turns += 1
            self._heard = together(self._heard, Flags())
            raise
        finally:
            self._evaluating = False
            beat(self._step)
        self._heard = together(self._heard, evaluation.heard)
        self._evaluated_s += evaluation.seconds
        self._record.tell(Evaluated(seconds=evaluation.seconds, stopped=evaluation.stopped))

    def save(self) -> None:
        """Ask for a save, from any rank; it is made when all ranks know.

        That is after two steps, where those are short after up to four more; in a step that has evaluated, and in those
        of a second and longer, it is after this very step.
        """
        self._save_asked = True

    def stop(self) -> None:
        """End the loop on all ranks, with a save, status unchanged; asked from any rank, once all know, as ``save``."""
        if not self._stop_asked:
            self._stop_asked = True
            self._record.tell_now(StopRequested(source="run.stop"))

    def log(self, **values: Any) -> None:
        """Log numbers of this step. A tensor is read one step later, so this waits for no device.

        They go to the logger "elastic" (INFO on rank 0), and summed up to the ledger. ``tokens`` and ``samples`` are
        what this rank has trained on in the step: ``elastic goodput`` adds them up over ranks.
        """
        self._record.metrics.add(self._step, values)

    def metric(self, **values: Any) -> None:
        """Put numbers into the ledger at once, a row each: results of an evaluation, rather than of a step.

        They are of the state as it will be when the step under way is complete.
        """
        for name, value in values.items():
            self._record.measure(one(name, value), self._step + self._unfinished)

    def metrics(self, name: str) -> dict[int, float]:
        """What ``metric`` was told on this rank under a name, by completed steps: in all starts of the run.

        Reads the ledger once. For ``keep=ckpt.Best(lambda: run.metrics("val_loss"))``, which rank 0 asks.
        """
        return self._record.measured(self._checkpoints.store, name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = self._stopping or self._heard.stop  # heard in an evaluation after the loop
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
                self._record.tell_error(late)
                if isinstance(late, Superseded):
                    end_superseded(late)
                raise
            if self._stopping == STOP_SIGNAL:
                # the first rank to end makes torchrun send SIGTERM to the others: they end with this status, too
                self._requests.ignore()
                if self._rank == 0:
                    how = self._requests.again
                    _log.warning("stopped on request, step %d is saved: %s the same command again", self._step, how)
                raise SystemExit(STOPPED)
        if not self._stopping:
            self._requests.hand_on()

    # --- the boundary ---------------------------------------------------------------------------------------------

    def _boundary(self, batches: int, *, last: bool) -> None:
        """Between two steps: the only place where the position moves, saves begin, errors of saves come out."""
        self._step += 1
        self._turns += batches
        self._batches.advance(batches)
        agrees = last or self._step >= self._agree_at or self._heard is not NOTHING
        agreed = self._agree() if agrees else NOTHING
        saves = self._saves
        saves.stall_s = max(saves.stall_s, agreed.stall_us / 1e6)
        self._record.metrics.settle(self._step - 1)
        saves.look()
        self._record.pulse()
        stop = agreed.stop
        verdict = saves.tolerance.judge(saves.failure) if saves.failure and self._agreement.alone else agreed.failed
        if verdict and (failure := saves.settle(verdict)):
            stop, self._ended_by = stop or STOP_ASKED, failure
        self._stopping = 0 if last else stop
        reason = (
            "end" if last
            else "stop" if self._stopping
            else "steps" if self._cadence.at(self._step) and agreed.save != SAVE_OVERDUE
            else REASONS[agreed.save]
        )  # fmt: skip
        if reason and saves.saved_step != self._step:
            self._save(reason)
        if agrees:
            self._agree_at = self._step + max(1, agreed.stride)
        if not (last or self._stopping or self._agreement.alone) and self._step == self._agree_at - 1:
            self._agreement.post(self._flags())  # a step ahead: nobody waits for a round trip, and what is said is new
        beat(self._step)

    def _agree(self) -> Flags:
        """What the ranks said at the boundary before, in evaluations since then and, after a long step, now."""
        if self._agreement.alone:
            agreed = self._flags()
        else:
            agreed = self._agreement.take(NOTHING)
            agreed.check_turns()
            if agreed.long or self._heard is not NOTHING:  # ranks that have just evaluated stand together anyway
                now = self._agreement.exchange(self._flags())
                now.check_turns()
                agreed = together(agreed, now)
        if self._heard is not NOTHING:
            agreed, self._heard = together(agreed, self._heard), NOTHING
        return agreed

    def _begin(self) -> None:
        """Before the first step: the data iterator, then the random streams, which building one may have moved."""
        if self._unfinished:  # the batch of a step that was left is trained on again
            self._unfinished = False
            self._batches.begin()
        if not self._begun:
            self._begun = True
            if not self._agreement.alone:
                self._record.warn(*pin(self._state))
            self._batches.begin()
            self._state.restore_rng()
            self._cadence.start()
            self._record.train()

    def _flags(self) -> Flags:
        """What this rank has to say now."""
        signalled = self._requests.name is not None
        saves = self._saves
        rank0 = self._rank == 0
        due = SAVE_CLOCK if rank0 and ((saves.idle and self._cadence.due()) or saves.retry_due()) else 0
        overdue = rank0 and saves.overdue()
        if self._agreement.alone and not (
            signalled or self._stop_asked or overdue or self._save_asked or due or saves.failure
        ):
            return NOTHING  # nobody to tell what a single rank can read itself
        return Flags(
            stop=STOP_SIGNAL if signalled else STOP_ASKED if self._stop_asked else 0,
            save=SAVE_OVERDUE if overdue else SAVE_ASKED if self._save_asked else due,
            failed=saves.tolerance.judge(saves.failure) if saves.failure else 0,
            stall_us=int(saves.stall_s * 1e6),
            long=int(self._step_s > LONG_STEP_S),
            stride=1 if self._agreement.alone else min(MOST_STEPS, math.ceil(AGREE_S / max(self._step_s, 1e-6))),
            turns=self._turns,
            turns_least=-self._turns,
        )

    def _save(self, reason: str) -> None:
        if isinstance(self._cadence, Auto):
            self._cadence.agree(self._agreement.from_rank_0)
        self._record.sum_steps()
        self._save_asked = False
        beat(self._step, "save")
        began = time.monotonic()
        if failure := self._saves.begin(self._step, reason):
            self._ended_by, self._stopping = failure, self._stopping or STOP_ASKED
        if reason == "overdue":
            self._saves.finish()
        self._record.times.add_save(time.monotonic() - began)

    # --- entering and leaving ---------------------------------------------------------------------------------------

    def _resume(self) -> tuple[int, str | None]:
        """Restore; returns how many batches are left out, and whose weights a fresh run has taken."""
        initialised = self._start.prepare(self._state)
        self._checkpoints = ckpt.open(self._url, **self._open, **self._store_options, **self._start.options())
        self._state.keep_aside(self._cadence if isinstance(self._cadence, Auto) else None)
        self.resumed = self._checkpoints.resume(self._state)
        if self.resumed.attempt is None:
            return 0, self._start.fill(self._state, initialised=initialised, options=self._store_options)
        skip = self._start.skip if self.resumed.step == self._start.start else 0
        if skip:  # what was saved since then has them behind it
            self._batches.skip(skip)
        return skip, None

    def _leave(self) -> None:
        """A normal end, or a break: what was saved becomes durable."""
        beat(self._step, "leave")
        saves = self._saves
        if saves.failure is not None:
            raise saves.failure
        if saves.saved_step == self._step and not self._unfinished:
            saves.finish_last(self._step)
        else:
            saves.finish()
        self._record.metrics.settle(self._step + 1)
        self._record.flush()
        if self._stopping:
            self._record.tell(self._stopped())
        elif self._step == self._until:
            self._record.tell(Finished(until=self._until))
        if self._ended_by is not None:
            raise self._ended_by

    def _stopped(self) -> Stopped:
        """The state is saved: in time?"""
        status = STOPPED if self._stopping == STOP_SIGNAL else 0
        asked = self._requests
        if asked.name is None:
            return Stopped(status=status)
        took_s = time.time() - asked.unix_s
        in_time = None if asked.within_s is None else took_s <= asked.within_s
        if in_time is False:
            _log.warning("saved %.1f s after %s, which gave %.1f s", took_s, asked.name, asked.within_s)
        return Stopped(status=status, took_s=took_s, in_time=in_time)

    def _abandon(self, error: BaseException) -> None:
        """An exception: nothing is saved any more; a save under way gets a moment, unless somebody wants us gone."""
        self._requests.__exit__(None, None, None)
        self._record.flush()
        self._record.tell_error(error)
        if self._requests.name is None:
            self._saves.give_up()
        self._ledger.close(GRACE_S)

    def _tell_stop_request(self) -> None:
        """On the thread that watches for requests: on the store at once, for there may be no later."""
        asked = self._requests
        assert asked.name is not None
        _log.info("stop requested by %s: saving at the next step that all ranks agree on", asked.name)
        request = StopRequested(source=asked.name, within_s=asked.within_s)
        self._record.tell_now(request, unix_s=asked.unix_s)
