"""What ``ckpt ls`` reads: records and object sizes of the attempts of a run, several at once. No torch."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from ckpt.catalog import Candidate, Catalog, Listing
from ckpt.errors import CkptError, Damaged, ObjectMissing, Unsupported
from ckpt.format import layout
from ckpt.format.layout import Attempt, Epoch
from ckpt.format.manifest import Claim, Commit, load_claim, load_commit, load_mark
from ckpt.store.contract import Store
from ckpt.tools.describe import Facts, Row, lineage, rows

READS_IN_FLIGHT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run as ``ckpt ls`` shows it. ``problem`` is damage that leaves unknown which steps count."""

    rows: tuple[Row, ...]
    total: int
    hidden: int
    newest_valid: Attempt | None
    lineage: tuple[tuple[Epoch, Attempt | None], ...]
    newest_claim: Claim | None
    problem: Damaged | None = None


def view_run(catalog: Catalog, listing: Listing, *, everything: bool, limit: int) -> RunView:
    """Read and check the newest ``limit`` attempts (0: all); ``everything`` adds those that are not to be used."""
    counted: list[Attempt] = []
    usable: list[Attempt] = []
    line: tuple[tuple[Epoch, Attempt | None], ...] = ()
    problem = None
    try:
        counted, usable = catalog.counted(listing), catalog.usable(listing)
        line = lineage(listing.with_base, catalog.base_of)
    except Damaged as e:
        problem = e
    folders = _folders(catalog.store) if everything or problem else {}
    attempts = {a for a in counted if a in usable or a in listing.quarantined}
    hidden = len((listing.commits | listing.retiring) - attempts)
    if everything or problem:
        attempts |= listing.commits | listing.retiring | folders.keys()
    shown = sorted(attempts, reverse=True)[: limit or None]
    with ThreadPoolExecutor(READS_IN_FLIGHT, thread_name_prefix="ckpt-ls") as pool:
        committed = [a for a in shown if a in listing.commits]
        found = dict(zip(committed, pool.map(lambda a: _check(catalog, a), committed), strict=True))
        shown = [a for a in shown if found.get(a, "") is not None]
        checked = {a: seen for a, seen in found.items() if seen is not None}
        epochs = sorted({a.epoch for a in shown} | ({listing.newest_epoch} if listing.newest_epoch else set()))
        claims = dict(zip(epochs, pool.map(lambda e: read_claim(catalog.store, e), epochs), strict=True))
        bad = [a for a in shown if a in listing.quarantined]
        reasons = dict(zip(bad, pool.map(lambda a: quarantine_reason(catalog.store, a), bad), strict=True))
        failed = [a for a, seen in checked.items() if not isinstance(seen, Candidate)]
        commits = dict(zip(failed, pool.map(lambda a: _commit(catalog.store, a), failed), strict=True))
    newest = _newest(catalog, usable, checked)
    facts = Facts(
        listing=listing, counted=counted, usable=usable, checked=checked, newest_valid=newest, folders=folders,
        claims={e: c for e, c in claims.items() if c}, quarantine_reasons=reasons,
        commits={a: c for a, c in commits.items() if c},
        rolled_back=_rolled_back(catalog, listing, {a for a in committed if a not in counted}),
    )  # fmt: skip
    newest_claim = claims.get(listing.newest_epoch) if listing.newest_epoch else None
    return RunView(
        rows=tuple(rows(facts, shown)), total=len(attempts), hidden=0 if everything else hidden, newest_valid=newest,
        lineage=line, newest_claim=newest_claim, problem=problem,
    )  # fmt: skip


def _rolled_back(catalog: Catalog, listing: Listing, off_line: Collection[Attempt]) -> frozenset[Attempt]:
    """Those that a start left behind when it went back, as it was asked to, to an older step."""
    oldest = min((a.epoch for a in off_line), default=None)
    backs: list[tuple[Epoch, Attempt]] = []
    for epoch in () if oldest is None else sorted(e for e in listing.with_base if e > oldest):
        with suppress(Damaged, ObjectMissing, Unsupported):  # it only tells why
            if (base := catalog.rolled_back_to(epoch)) is not None:
                backs.append((epoch, base))
    return frozenset(a for a in off_line for epoch, base in backs if base < a and base.epoch <= a.epoch < epoch)


def _newest(catalog: Catalog, usable: list[Attempt], checked: dict[Attempt, Candidate | CkptError]) -> Attempt | None:
    """The step that a start would choose; None also where a newer format keeps that from being known."""
    for a in usable:
        seen = checked.get(a) or _check(catalog, a)  # those beyond the limit have not been looked at
        if isinstance(seen, Candidate):
            return a
        if isinstance(seen, Unsupported):
            return None
    return None


def unfinished(store: Store, listing: Listing) -> list[Attempt]:
    """Attempts that have data and no commit record."""
    return sorted(_folders(store).keys() - listing.commits)


def _folders(store: Store) -> dict[Attempt, int]:
    sums: dict[Attempt, int] = {}
    for entry in store.list(layout.STEPS):
        if (a := layout.parse_step_key(entry.key)) is not None:
            sums[a] = sums.get(a, 0) + entry.size
    return sums


def _check(catalog: Catalog, attempt: Attempt) -> Candidate | CkptError | None:
    """The attempt, what is wrong with it, or None where it was retired since it was listed."""
    try:
        return catalog.candidate(attempt)
    except Unsupported as e:
        return e
    except (Damaged, ObjectMissing) as e:
        return None if catalog.gone(attempt) else e


def read_claim(store: Store, epoch: Epoch) -> Claim | None:
    """Who started an epoch; None where that cannot be read."""
    try:
        return load_claim(store.get(epoch.claim_key), epoch.claim_key)
    except (ObjectMissing, Damaged, Unsupported):
        return None  # it only tells who and when


def _commit(store: Store, attempt: Attempt) -> Commit | None:
    try:
        return load_commit(store.get(attempt.commit_key), attempt.commit_key)
    except (ObjectMissing, Damaged, Unsupported):
        return None


def quarantine_reason(store: Store, attempt: Attempt) -> str:
    """Why an attempt is not to be used."""
    try:
        return load_mark(store.get(attempt.quarantine_key), attempt.quarantine_key).reason
    except (ObjectMissing, Damaged, Unsupported) as e:
        return f"its record cannot be read: {e.message}"
