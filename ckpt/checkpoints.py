"""The checkpoints of one run: the explicit layer for loops that ``elastic.Run`` cannot own."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Self

from ckpt.catalog import Catalog
from ckpt.engine.group import Group, current_group
from ckpt.errors import Refused
from ckpt.load import NEWEST, Loader, Origin, Resumed
from ckpt.policy import Keep
from ckpt.replicas import Policy
from ckpt.save import Pending, Saved, Saver
from ckpt.state import State
from ckpt.store import open_store, refuse_object
from ckpt.store.contract import Store

DEADLINE_S = 600.0
GRACE_S = 600.0
MAX_STEP = 10**12  # what a name on the store has digits for


class Checkpoints:
    """The checkpoints of one run, as ``ckpt.open`` returns them.

    ``resume`` comes first: it claims the run for this start, so that an older job that still lives can no longer
    commit. Then ``save`` as often as wanted; a save is durable when its ``Pending`` says so, or after ``wait``.
    All methods but ``newest_valid`` are called by all ranks in the same order, on one thread.
    """

    def __init__(
        self,
        store: Store,
        group: Group,
        *,
        keep: Keep | None,
        deadline_s: float,
        grace_s: float,
        origin: Origin = NEWEST,
        allow_fallback: bool,
        proof: bool = True,
        incremental: bool = False,
        replicas: str = "raise",
        verify_snapshot: bool = False,
    ) -> None:
        self.store, self.url = store, store.url
        self._group, self._origin = group, origin
        self._catalog = Catalog(store)
        self._loader = Loader(self._catalog, group, deadline_s=deadline_s, allow_fallback=allow_fallback, proof=proof)
        self._settings: dict[str, Any] = {
            "keep": keep, "deadline_s": deadline_s, "grace_s": grace_s, "incremental": incremental,
            "replicas": Policy.parse(replicas), "verify_snapshot": verify_snapshot,
        }  # fmt: skip
        self._saver: Saver | None = None
        self._pending: Pending | None = None
        self._last_step = -1

    @property
    def epoch(self) -> str | None:
        """The epoch that ``resume`` claimed, such as "e00000007"; None before."""
        return str(self._saver.epoch) if self._saver else None

    def resume(self, state: State) -> Resumed:
        """Restore the newest valid step into ``state``, or start fresh where nothing was ever saved.

        Every block is verified before it reaches a tensor. Damaged steps are skipped, at most two without
        ``allow_fallback``, and reported. Raises ``NotFound`` where steps exist and none can be used, ``Mismatch``
        naming what differs from the state in memory, ``NotProven`` where the restored tensors have other fingerprints
        than the saved ones, ``StorageError`` for anything that proves no damage.
        After an error the content of ``state`` is undefined.
        """
        if self._saver is not None:
            raise Refused("this run was resumed already; open it again to go back to a saved step")
        resumed, epoch, previous = self._loader.resume(state, self._origin)
        base = previous.attempt if previous else None
        held = previous if self._group.rank == 0 else None
        self._saver = Saver(self._catalog, self._group.channel("save"), epoch, base, held, **self._settings)
        return resumed

    def load(self, state: State, step: int | None = None, *, part: bool = False) -> Resumed:
        """Restore a step (None: the newest valid one) read-only: nothing is claimed or written.

        ``part``: of what the step holds, only the entries that ``state`` has, and no random streams. A damaged newest
        step is then an error.
        """
        return self._loader.load(state, step, part=part)

    def save(self, step: int, state: State) -> Pending:
        """Copy ``state`` and commit it as ``step`` (completed steps) in the background; returns after the copy.

        Waits for the save before, if that is still being written, and raises its error, unless its ``Pending`` has
        raised it already. A save that failed leaves the run as it was: go on and save again. The same step may be saved
        again; the newer attempt counts.
        """
        if self._saver is None:
            raise Refused(
                "this run was not resumed, so a save could bury steps that are there already",
                hint="call resume(state) first; open(url, fresh=True) starts over beside what is there",
            )
        if type(step) is not int or not 0 <= step < MAX_STEP:
            raise Refused(f"save({step!r}): a step is a count of completed steps, from 0 to {MAX_STEP - 1}")
        base = self._saver.base.step if self._saver.base else -1
        if step <= base or step < self._last_step:
            raise Refused(
                f"save({step}) would not count: this start builds on step {base}, and has saved step {self._last_step}"
                if base >= 0
                else f"save({step}) would not count: step {self._last_step} is saved already",
                hint="steps of one start go up; open(url, fresh=True) starts over beside what is there",
            )
        if self._pending is not None and not self._pending.told:
            self.wait()
        self._last_step = step
        self._pending = self._saver.save(step, state)
        return self._pending

    def wait(self) -> Saved | None:
        """Wait until the save in flight is durable; None if there is none. Raises what made it fail."""
        pending, self._pending = self._pending, None
        return pending.wait() if pending else None

    def newest_valid(self) -> str | None:
        """Name of the newest usable attempt whose records and sizes are good, or None. Any process, any time."""
        attempt = self._catalog.newest_valid()
        return str(attempt) if attempt else None

    def close(self) -> None:
        """Wait for the save in flight; raises what made it fail."""
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()


def open(  # noqa: A001 (ckpt.open is how it is called)
    url: str | os.PathLike[str],
    *,
    keep: Keep | None = None,
    fresh: bool = False,
    start: int | None = None,
    once: str = "",
    allow_fallback: bool = False,
    proof: bool = True,
    incremental: bool = False,
    replicas: str = "raise",
    verify_snapshot: bool = False,
    deadline_s: float = DEADLINE_S,
    grace_s: float = GRACE_S,
    client: str | None = None,
    **storage_options: Any,
) -> Checkpoints:
    """Open the run at ``url`` (a path, ``file://``, ``s3://``, ``gs://``, ``az://``, ``memory://`` or any fsspec URL).

    Called by all ranks after the process group is set up; without one this process is the only rank. ``keep`` is
    the retention policy (None: keep all); data of retired steps are deleted ``grace_s`` seconds later, so that
    readers can finish. ``proof`` compares the fingerprint of every restored tensor, where it lives, with the saved one.
    ``incremental`` refers to tensors whose bytes the step before holds already instead of writing them: such a step is
    read by torchrelay, and by plain DCP only in place on a file system, since it needs the data of older ones, which
    are kept as long; one damaged object damages all steps that refer to it.
    ``replicas`` says what a save does where replicas of a tensor differ between ranks: "raise" (the step is not
    committed), "warn" (what most ranks hold is saved), "quarantine" (the same, and the step is never chosen), or "off";
    "raise:10" compares at every tenth save.
    ``verify_snapshot`` compares the copy that a save makes with the live tensors before it returns: for tests and
    drills, since that adds the time of two fingerprints to the stall (each 0.15 to 0.3 s a GiB and core).
    ``fresh`` starts from zero beside existing steps; ``start`` rolls back to that step, and what was saved after it no
    longer counts. A restart does not do it again: one that asks for the same ``start``, or for ``fresh`` with the same
    ``once`` (a name of the job; without it each start is fresh), goes on from what the job has saved since.
    ``deadline_s`` bounds every wait for other ranks. ``client`` forces "obstore" or "fsspec"; ``storage_options`` are
    fsspec's (endpoint_url, key, secret, …).

    Raises ``AccessDenied``, ``NoContainer`` or ``Unreachable`` at once where the store cannot be used.
    """
    url = os.fspath(url)
    if fresh and start is not None:
        raise Refused(f"fresh=True begins at zero, start={start} at a step: give one of them")
    group = current_group()
    if url.startswith("memory:") and group.size > 1:
        raise Refused(f"{url} lives in one process and {group.size} ranks would each have their own",
                      hint="use a path on a shared disk or an object store")  # fmt: skip
    store = open_store(url, client=client, **storage_options)

    def probe(_: list[None]) -> None:
        if not store.list("epochs/"):
            refuse_object(url, client=client, **storage_options)

    group.exchange("open the run", lambda: None, probe, deadline_s=deadline_s)
    return Checkpoints(
        store,
        group,
        keep=keep,
        deadline_s=deadline_s,
        grace_s=grace_s,
        origin=Origin(fresh=fresh, start=start, once=once),
        allow_fallback=allow_fallback,
        proof=proof,
        incremental=incremental,
        replicas=replicas,
        verify_snapshot=verify_snapshot,
    )
