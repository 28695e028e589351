"""What goes from a run's storage besides the steps that a keep policy retires: attempts that nobody finished."""

from __future__ import annotations

from ckpt.catalog import Catalog, check_not_superseded, held, quarantine
from ckpt.format import layout
from ckpt.format.layout import Attempt, Epoch

ABANDONED = "abandoned: its writer never committed it"
UPLOAD_S = 86_400.0  # an upload in parts that began so long ago has no writer any more


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
    retiring = {
        a for e in catalog.store.list(layout.RETIRE)
        if (a := layout.parse_record_key(e.key, layout.RETIRE)) is not None
    }  # fmt: skip
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
