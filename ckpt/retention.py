"""What goes from a run's storage: steps that a keep policy retires, and attempts that nobody finished."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

from ckpt.catalog import Catalog, Needs, attempts_in, check_not_superseded, quarantine
from ckpt.errors import ObjectMissing
from ckpt.format import layout
from ckpt.format.layout import Attempt, Epoch
from ckpt.format.manifest import Mark, dump, load_mark, utc_now
from ckpt.policy import Keep

ABANDONED = "abandoned: its writer never committed it"
UPLOAD_S = 86_400.0  # an upload in parts that began so long ago has no writer any more


def plan_retention(usable: list[Attempt], keep: Keep) -> list[Attempt]:
    """The attempts to retire: all that the policy does not keep, never the newest. Pure.

    A policy sees each step once; of several attempts at one step the newest is kept.
    """
    newest: dict[int, Attempt] = {}
    for a in usable:
        newest.setdefault(a.step, a)
    kept = {newest[step] for step in keep.choose(list(newest))}
    return [a for n, a in enumerate(usable) if n > 0 and a not in kept]


def held(needs: Needs) -> dict[Attempt, Attempt]:
    """The attempts whose data must stay, with the newest that needs them. Pure."""
    return {b: a for a in sorted(needs) for b in needs[a] if b != a}


def retire(catalog: Catalog, epoch: Epoch, keep: Keep, *, grace_s: float) -> list[Attempt]:
    """Apply a keep policy for the writer that owns ``epoch``; returns the attempts whose data were deleted now.

    Retire record → fence → commit record deleted → data deleted once the record is older than ``grace_s`` seconds,
    so that a reader which chose the step just before can finish, and once no other step refers to them. Interrupted
    anywhere, the next call goes on.
    """
    store = catalog.store
    for a in plan_retention(catalog.usable(catalog.listing()), keep):
        with contextlib.suppress(ObjectMissing):  # another has retired it since
            references = tuple(sorted(map(str, catalog.refers_to(a))))
            mark = Mark(attempt=str(a), reason="retired by the keep policy", epoch=str(epoch), created=utc_now(),
                        references=references)  # fmt: skip
            store.put(a.retire_key, [dump("mark", mark)])
    retiring = {a: load_mark(store.get(a.retire_key), a.retire_key) for a in attempts_in(store, layout.RETIRE)}
    if not retiring:
        return []
    check_not_superseded(store, epoch)
    # a retirement that a base record of a later epoch voided is usable again: it stays, its mark goes
    listing = catalog.listing()
    usable = set(catalog.usable(listing))
    store.delete([a.retire_key for a in retiring if a in usable])
    gone = [a for a in retiring if a not in usable]
    store.delete([a.commit_key for a in gone])
    old = sorted((a for a in gone if _age_s(retiring[a]) >= grace_s), reverse=True)  # those that refer come first
    needs = catalog.needs(listing.commits - set(gone), retiring) if old else {}
    deleted = []
    for a in old:
        if a not in held(needs):
            for prefix in (a.prefix, a.scrub_prefix):
                store.delete([e.key for e in store.list(prefix)])
            store.delete([a.retire_key])
            needs.pop(a, None)
            deleted.append(a)
    return deleted


def _age_s(mark: Mark) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(mark.created)).total_seconds()


def unfinished(catalog: Catalog, epoch: Epoch, *, own: bool) -> list[Attempt]:
    """Attempts of epochs before ``epoch`` that have data and no commit record, oldest first; nothing is changed.

    ``own`` adds those of ``epoch`` itself: only its writer can tell, between two saves, that none is being written.
    """
    # data first: what is committed between the listings is seen as committed
    folders = {a for e in catalog.store.list(layout.STEPS) if (a := layout.parse_step_key(e.key)) is not None}
    candidates = {a for a in folders if a.epoch < epoch or (own and a.epoch == epoch)}
    if not candidates:
        return []
    listing = catalog.listing()
    retiring = attempts_in(catalog.store, layout.RETIRE)
    # a retired step loses its commit record before its data; its readers have their time
    left = candidates - listing.commits - listing.retiring - retiring
    return sorted(left - held(catalog.needs(listing.commits)).keys()) if left else []


def collect_unfinished(catalog: Catalog, epoch: Epoch, *, own: bool) -> list[Attempt]:
    """Delete the data of unfinished attempts; returns whose. For the writer of ``epoch``, or with ``own=False``.

    Quarantine record → fence → deletion: a commit record that is still on its way then names an attempt that is not
    to be used. No such commit can have been reported, as ``epoch`` is newer. The quarantine records stay. Raises
    ``Superseded``, with nothing deleted, where a newer epoch is claimed. Interrupted anywhere, the next call goes on.
    """
    store = catalog.store
    found = unfinished(catalog, epoch, own=own)
    for a in found:
        quarantine(store, a, ABANDONED, (), epoch)
    if found:
        check_not_superseded(store, epoch)
    for a in found:
        store.delete([e.key for e in store.list(a.prefix)])
    if (abort_uploads := getattr(store, "abort_uploads", None)) is not None:  # what only S3-like stores have
        abort_uploads(layout.STEPS, older_s=UPLOAD_S)
    return found
