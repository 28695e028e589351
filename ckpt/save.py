"""One save of a run: plan → write → prepare → commit, on a thread of its own, from a snapshot.

Nothing here touches live tensors or uses a collective: ranks meet through :mod:`ckpt.engine.group`, with deadlines.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ckpt import catalog, replicas
from ckpt.catalog import Catalog
from ckpt.engine.group import Group, Scattered
from ckpt.engine.planner import Replica, Snapshot
from ckpt.engine.references import Offer, Previous
from ckpt.engine.writer import ObjectWriter
from ckpt.errors import Damaged, RankFailed, Refused
from ckpt.format.layout import Attempt, Epoch
from ckpt.policy import Keep
from ckpt.proof import check_untorn
from ckpt.replicas import Divergence
from ckpt.retention import collect_unfinished, retire
from ckpt.state import State
from ckpt.values import differing_values


@dataclass(frozen=True, slots=True)
class _Share:
    """What a rank has of a state: its plan, digests of its values, and what its plain tensors hold."""

    plan: SavePlan
    values: dict[str, str]
    replicas: dict[str, Replica]


_Told = tuple[Attempt, SavePlan, Offer]  # what one rank is told to write, where, and what is there already
_log = logging.getLogger("ckpt.save")


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed step; times in seconds, ``bytes`` were written by all ranks, this rank's training waited ``stall_s``.

    ``diverged`` names tensors of which replicas differed, and the ranks; with ``quarantined`` the step is never chosen.
    """

    step: int
    attempt: str
    bytes: int
    stall_s: float
    persist_s: float
    diverged: tuple[str, ...] = ()
    quarantined: bool = False


class Pending:
    """A save that is being written. Any thread may ask."""

    def __init__(self, step: int, work: Callable[[], Saved]) -> None:
        self.step = step
        self._work = work
        self._saved: Saved | None = None
        self._error: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name=f"ckpt-save-{step}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._saved = self._work()
        except BaseException as e:  # whatever it was, the thread that trains must hear of it
            self._error = e
        finally:
            del self._work  # it holds the copy of the state

    def done(self) -> bool:
        """Whether the save has ended, well or not. Never blocks."""
        return not self._thread.is_alive()

    def ends_within(self, timeout_s: float) -> bool:
        """Whether the save ends in that time, well or not; waits for it."""
        self._thread.join(timeout_s)
        return self.done()

    def wait(self, timeout_s: float | None = None) -> Saved:
        """Wait until the step is durable and committed. Raises what made it fail, on every rank the same."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RankFailed(f"step {self.step}: the save has not ended within {timeout_s} s")
        self._told = True
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved

    @property
    def told(self) -> bool:
        """Whether somebody has heard by ``wait`` how the save ended."""
        return self._told


@dataclass(slots=True)
class Saver:
    """Saves steps of one run in one epoch. ``save`` is called by all ranks, on the thread that trains."""

    catalog: Catalog
    group: Group
    epoch: Epoch
    base: Attempt | None
    previous: Previous | None  # the resumed step, later the newest committed one; used by the coordinator only
    keep: Keep | None
    deadline_s: float
    grace_s: float
    incremental: bool = False
    replicas: replicas.Policy = replicas.Policy("raise")  # noqa: RUF009 (frozen)
    verify_snapshot: bool = False
    _counters: dict[int, int] = field(default_factory=dict)  # used by the coordinator only
    _leftovers: bool = True  # whether there may be attempts that nobody finished
    _saves: int = 0
    _equal: int | None = None  # the step at which all replicas were last seen equal

    def __post_init__(self) -> None:
        self._equal = self.base.step if self.base else None

    def save(self, step: int, state: State) -> Pending:
        """Copy the state and start writing it; returns after the copy."""
        began = time.monotonic()
        self._saves += 1
        captured = state.capture(self.group.rank)
        digests = state.value_digests(captured)
        snapshot = Snapshot(captured)
        if self.verify_snapshot:
            check_untorn(step, captured, snapshot)
        buffers = state.buffers()
        compared = self.group.size > 1 and self.replicas.due(self._saves)
        stall_s = time.monotonic() - began
        return Pending(step, lambda: self._persist(step, snapshot, digests, buffers, compared, stall_s))

    def _persist(
        self, step: int, snapshot: Snapshot, digests: dict[str, str], buffers: set[str], compared: bool, stall_s: float
    ) -> Saved:
        began = time.monotonic()
        planned: list[tuple[Metadata, list[Divergence]]] = []
        unfinished, self._leftovers = self._leftovers, True

        def plan(all_ranks: list[_Share]) -> _Told | Scattered[_Told]:
            _check_same_values(step, [share.values for share in all_ranks])
            catalog.check_not_superseded(self.catalog.store, self.epoch)
            attempt = Attempt(step, self.epoch, self._counters.get(step, 0))
            self._counters[step] = attempt.counter + 1
            wrong, keepers = self._diverged(step, all_ranks, buffers, compared)
            plans, metadata = snapshot.create_global_plan(replicas.one_copy([s.plan for s in all_ranks], keepers))
            planned.append((metadata, wrong))
            writer = ObjectWriter.in_run(self.catalog.store, attempt)
            writer.set_up_storage_writer(True)
            final = writer.prepare_global_plan(plans)
            return Scattered((attempt, p, offer) for p, offer in zip(final, self._offers(final), strict=True))

        attempt, final, offer = self.group.exchange(
            f"step {step}, plan",
            lambda: _Share(snapshot.local_plan, digests, snapshot.replicas() if compared else {}),
            plan,
            deadline_s=self.deadline_s,
        )
        writer = ObjectWriter.in_run(self.catalog.store, attempt)

        def commit(results: list[Sequence[WriteResult]]) -> tuple[str, int, tuple[str, ...]]:
            metadata, wrong = planned[0]
            total = sum(r.size_in_bytes for rank in results for r in rank)
            try:
                writer.publish(metadata, results, world_size=self.group.size)
                self._commit(attempt, writer, metadata, wrong, total)
            except Damaged:
                catalog.check_not_superseded(self.catalog.store, self.epoch)  # a newer start deletes what we leave
                self.previous = None  # what was referred to may be lost: the next save writes all
                raise
            return str(attempt), total, tuple(f"{d.key}: {d}" for d in wrong)

        name, total, diverged = self.group.exchange(
            f"step {step}, write", lambda: writer.write(final, snapshot, offer), commit, deadline_s=self.deadline_s
        )
        quarantined = bool(diverged) and self.replicas.action == "quarantine"
        saved = Saved(step, name, total, stall_s, time.monotonic() - began, diverged, quarantined)
        _log.info(
            "step %d committed: %d bytes in %.2f s, training waited %.3f s",
            step,
            total,
            saved.persist_s,
            stall_s,
        )
        self._leftovers = self._retain(unfinished)
        self._warn_of_a_full_disk(total)
        return saved

    # --- on the coordinator -----------------------------------------------------------------------------------

    def _diverged(
        self, step: int, shares: list[_Share], buffers: set[str], compared: bool
    ) -> tuple[list[Divergence], dict[str, int]]:
        """Tensors of which replicas differ and should not, and which rank's copy of a tensor is written.

        Buffers differ in every DDP job with BatchNorm, where rank 0's are the ones that count. Raises ``Refused``.
        """
        keepers = replicas.first_holders([s.plan for s in shares], buffers)
        if not compared:
            return [], keepers
        found = replicas.compare([share.replicas for share in shares])
        wrong = [d for d in found if d.key not in buffers or not d.alike]
        if not wrong:
            self._equal = step
        elif self.replicas.action == "raise" or not all(d.alike for d in wrong):
            raise replicas.refusal(step, wrong, self._equal)
        for d in wrong:
            _log.warning("step %d, %s: %s; last equal: %s", step, d.key, d, replicas.last_equal(self._equal))
        return wrong, {d.key: d.keeper for d in wrong} | keepers

    def _offers(self, plans: Sequence[SavePlan]) -> list[Offer]:
        """What each rank may refer to: of the newest usable step, so that no retention takes it meanwhile."""
        if self.incremental and self.previous is not None:
            listing = self.catalog.listing()
            if self.catalog.usable(listing)[:1] == [self.previous.attempt]:
                return [self.previous.offer(p, listing.quarantined) for p in plans]
        return [Offer()] * len(plans)

    def _commit(
        self, attempt: Attempt, writer: ObjectWriter, metadata: Metadata, wrong: list[Divergence], total: int
    ) -> None:
        assert writer.manifest is not None
        assert writer.record is not None
        bad = bool(wrong) and self.replicas.action == "quarantine"
        if self.previous is not None and writer.record.references:
            self.previous.check(metadata, writer.record)
        if bad:
            details = [*(f"{d.key}: {d}" for d in wrong), f"last equal: {replicas.last_equal(self._equal)}"]
            catalog.quarantine(self.catalog.store, attempt, "replicas differ", details, self.epoch)
        catalog.commit(
            self.catalog.store, attempt, self.base, writer.manifest, total, writer.record.references, quarantined=bad
        )
        if not bad:
            self.previous = Previous(attempt, writer.record, metadata)

    def _warn_of_a_full_disk(self, step_bytes: int) -> None:
        """A step is written before an old one goes, so there must be room for one more."""
        free_bytes = getattr(self.catalog.store, "free_bytes", None)  # only a local disk can tell
        if self.group.rank == 0 and free_bytes is not None and (free := free_bytes()) < step_bytes:
            _log.warning(
                "the next save will fail: a step takes %d bytes and %s has %d left",
                step_bytes, self.catalog.store.url, free,
            )  # fmt: skip

    def _retain(self, unfinished: bool) -> bool:
        """Retention runs after the commit and never fails a save; returns whether unfinished attempts may be left."""
        if self.keep is None or self.group.rank != 0:
            return unfinished
        try:
            retire(self.catalog, self.epoch, self.keep, grace_s=self.grace_s)
            if unfinished and (gone := collect_unfinished(self.catalog, self.epoch, own=True)):
                _log.info("deleted the data of %d attempts that nobody finished", len(gone))
            return False
        except Exception as e:  # a policy is somebody else's code
            _log.warning("old steps were not deleted: %s", e)
            return unfinished


def _check_same_values(step: int, per_rank: list[dict[str, str]]) -> None:
    if differing := differing_values(per_rank):
        raise Refused(
            f"step {step}: {len(differing)} values are not the same on all ranks, so one of them would be lost",
            facts=[(d.key, "differs from rank 0 on rank " + ", ".join(map(str, d.ranks))) for d in differing[:10]],
            hint="make them equal before the save; or, where they differ by design: "
            f"ckpt.State(…, {differing[0].key.split('.')[0]}=ckpt.PerRank(…))",
        )
