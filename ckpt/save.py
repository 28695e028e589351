"""One save of a run: plan → write → prepare → commit, on a thread of its own, from a snapshot.

Nothing here touches live tensors or uses a collective: ranks meet through :mod:`ckpt.engine.group`, with deadlines.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ckpt import catalog
from ckpt.catalog import Catalog
from ckpt.engine.group import Group, Scattered
from ckpt.engine.planner import Replica, Snapshot
from ckpt.engine.writer import ObjectWriter
from ckpt.errors import RankFailed, Refused
from ckpt.format.layout import Attempt, Epoch
from ckpt.policy import Keep
from ckpt.retention import collect_unfinished
from ckpt.state import State, differing_values


@dataclass(frozen=True, slots=True)
class _Share:
    """What a rank has of a state: its plan, digests of its values, and what its plain tensors hold."""

    plan: SavePlan
    values: dict[str, str]
    replicas: dict[str, Replica]


_Told = tuple[Attempt, SavePlan]  # what one rank is told to write, and where
_log = logging.getLogger("ckpt.save")


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed step; times in seconds, ``bytes`` over all ranks, ``stall_s`` is what this rank's training waited."""

    step: int
    attempt: str
    bytes: int
    stall_s: float
    persist_s: float


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
    keep: Keep | None
    deadline_s: float
    grace_s: float
    _counters: dict[int, int] = field(default_factory=dict)  # used by the coordinator only
    _leftovers: bool = True  # whether there may be attempts that nobody finished

    def save(self, step: int, state: State) -> Pending:
        """Copy the state and start writing it; returns after the copy."""
        began = time.monotonic()
        captured = state.capture(self.group.rank)
        digests = state.value_digests(captured)
        snapshot = Snapshot(captured)
        buffers = state.buffers()
        stall_s = time.monotonic() - began
        return Pending(step, lambda: self._persist(step, snapshot, digests, buffers, stall_s))

    def _persist(
        self, step: int, snapshot: Snapshot, digests: dict[str, str], buffers: set[str], stall_s: float
    ) -> Saved:
        began = time.monotonic()
        planned: list[Metadata] = []
        unfinished, self._leftovers = self._leftovers, True

        def plan(all_ranks: list[_Share]) -> _Told | Scattered[_Told]:
            _check_same_values(step, [share.values for share in all_ranks])
            catalog.check_not_superseded(self.catalog.store, self.epoch)
            attempt = Attempt(step, self.epoch, self._counters.get(step, 0))
            self._counters[step] = attempt.counter + 1
            one_copy = _one_copy_of_replicas(step, all_ranks, buffers)
            plans, metadata = snapshot.create_global_plan(one_copy)
            planned.append(metadata)
            writer = ObjectWriter.in_run(self.catalog.store, attempt)
            writer.set_up_storage_writer(True)
            return Scattered((attempt, p) for p in writer.prepare_global_plan(plans))

        attempt, final = self.group.exchange(
            f"step {step}, plan",
            lambda: _Share(snapshot.local_plan, digests, snapshot.replicas() if self.group.size > 1 else {}),
            plan,
            deadline_s=self.deadline_s,
        )
        writer = ObjectWriter.in_run(self.catalog.store, attempt)

        def commit(results: list[Sequence[WriteResult]]) -> tuple[str, int]:
            writer.publish(planned[0], results, world_size=self.group.size)
            assert writer.manifest is not None
            total = sum(r.size_in_bytes for rank in results for r in rank)
            catalog.commit(self.catalog.store, attempt, self.base, writer.manifest, total)
            return str(attempt), total

        name, total = self.group.exchange(
            f"step {step}, write", lambda: writer.write(final, snapshot), commit, deadline_s=self.deadline_s
        )
        saved = Saved(step, name, total, stall_s, time.monotonic() - began)
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
            catalog.retire(self.catalog, self.epoch, self.keep, grace_s=self.grace_s)
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
            hint="make them equal before the save; only random streams and a torch.Generator may differ",
        )


def _one_copy_of_replicas(step: int, shares: list[_Share], buffers: set[str]) -> list[SavePlan]:
    """The ranks' plans, where of replicas that differ only rank 0's are left; refused unless they are buffers.

    DCP writes a replicated tensor from whichever rank has least to write: of replicas that differ, a mixture that no
    rank ever had. Buffers differ in every DDP job with BatchNorm, where rank 0's are the ones that count.
    """
    first = shares[0].replicas
    differing: dict[str, list[int]] = {}
    for r, share in enumerate(shares[1:], start=1):
        for key, mine in share.replicas.items():
            if key in first and mine != first[key]:
                differing.setdefault(key, []).append(r)
    if wrong := [k for k in differing if k not in buffers or any(s.replicas[k][:2] != first[k][:2] for s in shares)]:
        raise Refused(
            f"step {step}: {len(wrong)} tensors differ between ranks, though nothing says that they are sharded",
            facts=[(k, "differs from rank 0 on rank " + ", ".join(map(str, differing[k]))) for k in wrong[:10]],
            hint="a replica has diverged, or a tensor of one rank should be a DTensor or have a name of its own",
        )
    return [
        share.plan
        if r == 0
        else replace(share.plan, items=[i for i in share.plan.items if i.index.fqn not in differing])
        for r, share in enumerate(shares)
    ]
