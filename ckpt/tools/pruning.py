"""What a keep policy would remove from a run, and removing it. No torch.

Pruning is not writing: it acts with the newest epoch that has resumed, and claims none, as a claim stops the job.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from ckpt.catalog import Catalog, Listing
from ckpt.errors import Damaged, NotFound, ObjectMissing, Refused, StorageError, Superseded, Unsupported
from ckpt.format import layout
from ckpt.format.layout import Attempt, Epoch
from ckpt.format.manifest import Claim, load_mark
from ckpt.policy import Keep, reasons
from ckpt.retention import collect_unfinished, held, plan_retention, retire, unfinished
from ckpt.store.contract import Store
from ckpt.tools.gather import quarantine_reason, read_claim
from ckpt.tools.target import Place

Fate = Literal["keep", "retire", "delete"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One attempt: what becomes of it, why, and the bytes of its objects as they are listed.

    "retire": its commit record goes, and its data after the grace period. "delete": it is retired, and its data go now.
    """

    attempt: Attempt
    fate: Fate
    why: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All attempts, newest first. ``starting`` is a claim that has not resumed, which forbids to apply the plan."""

    epoch: Epoch
    lines: tuple[Line, ...]
    starting: Epoch | None
    claim: Claim | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What was done: attempts that were retired now, and those whose data were deleted now."""

    retired: tuple[Attempt, ...]
    deleted: tuple[Attempt, ...]
    waiting: tuple[Attempt, ...]


def plan(place: Place, keep: Keep, grace_s: float, *, abandoned: bool = False) -> Plan:
    """What ``apply`` would do now; nothing is changed. ``abandoned``: what older starts left unfinished goes, too.

    Raises ``NotFound`` where no start has resumed, ``Damaged`` where the newest usable step is: what is older may be
    all that there is.
    """
    if place.kind != "run" or place.attempt is not None:
        raise Refused(f"{place.where} is one checkpoint, not a run: there is nothing to choose from",
                      hint="give the URL of a run")  # fmt: skip
    cat = place.catalog
    folders: dict[Attempt, int] = {}  # before the records: what is committed meanwhile is then seen as committed
    for entry in place.store.list(layout.STEPS):
        if (a := layout.parse_step_key(entry.key)) is not None:
            folders[a] = folders.get(a, 0) + entry.size
    listing = cat.listing()
    epoch = max(listing.with_base, default=None)
    if epoch is None:
        raise NotFound(f"no start of the run at {place.store.url} has resumed or saved anything: nothing to prune",
                       hint=f"ckpt ls {place.store.url} --all")  # fmt: skip
    usable = cat.usable(listing)
    _check_newest(cat, usable)
    lost = set(unfinished(cat, epoch, own=False)) if abandoned else set()
    lines = _lines(place.store, cat, listing, usable, folders, keep, grace_s, lost)
    newest = listing.newest_epoch
    starting = newest if newest is not None and newest > epoch else None
    return Plan(epoch=epoch, lines=tuple(sorted(lines, key=lambda x: x.attempt, reverse=True)), starting=starting,
                claim=read_claim(place.store, starting) if starting else None)  # fmt: skip


def _check_newest(cat: Catalog, usable: list[Attempt]) -> None:
    """The newest step must be whole by its records, else an older one is the one that must not go."""
    if not usable:
        return
    try:
        cat.candidate(usable[0])
    except Unsupported:
        raise
    except (Damaged, ObjectMissing) as e:
        if not cat.gone(usable[0]):
            hint = f'ckpt quarantine {cat.store.url}@{usable[0].step} --reason "damaged", then prune again'
            raise Damaged(f"the newest step, {usable[0].step}, is damaged; nothing older is removed: {e.message}",
                          facts=e.facts, hint=hint) from e  # fmt: skip


def _lines(
    store: Store, cat: Catalog, listing: Listing, usable: list[Attempt], folders: dict[Attempt, int], keep: Keep,
    grace_s: float, lost: Collection[Attempt],
) -> list[Line]:  # fmt: skip
    going = set(plan_retention(usable, keep))
    why = reasons(keep, list(dict.fromkeys(a.step for a in usable)))
    counted = cat.counted(listing)
    needed = held(cat.needs(listing.commits)) if listing.retiring else {}
    lines = []
    for a in folders.keys() | listing.commits | listing.retiring:
        fate: Fate = "keep"
        if a in going:
            newer = any(b.step == a.step and b > a for b in usable)
            fate, text = "retire", "a newer attempt of the step is kept" if newer else "no policy keeps it"
        elif a in usable:
            text = ", ".join(why.get(a.step, ("newest",)))
        elif a in lost:
            fate, text = "delete", "unfinished: its start is over and never committed it"
        elif a in listing.quarantined:
            text = f"quarantined: {quarantine_reason(store, a)}"
        elif a in listing.retiring:
            age_s = _retired_s(store, a)
            if a in needed:
                text = f"retired {_ago(age_s)}: step {needed[a].step} refers to its data"
            elif age_s >= grace_s:
                fate, text = "delete", f"retired {_ago(age_s)}"
            else:
                text = f"retired {_ago(age_s)}: readers have {_ago(grace_s - age_s, 'more')}"
        elif a in listing.commits:
            text = "off the line that counts" if a not in counted else "being retired"
        else:
            text = "unfinished: never committed"
        lines.append(Line(attempt=a, fate=fate, why=text, bytes=folders.get(a, 0)))
    return lines


def _retired_s(store: Store, attempt: Attempt) -> float:
    try:
        created = load_mark(store.get(attempt.retire_key), attempt.retire_key).created
    except ObjectMissing:
        return 0.0  # finished by another since it was listed
    return (datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds()


def _ago(seconds: float, word: str = "ago") -> str:
    return f"{seconds / 60:.0f} min {word}" if seconds >= 60 else f"{seconds:.0f} s {word}"


def apply(place: Place, found: Plan, keep: Keep, grace_s: float, *, abandoned: bool = False) -> Done:
    """Retire what the policy does not keep, and delete what was retired ``grace_s`` seconds ago or before.

    ``abandoned`` also deletes what starts before the one that counts left unfinished.

    On return the retirements are durable. Raises ``Superseded``, with nothing deleted, where a start is in progress;
    interrupted anywhere, the next call (or the running job) goes on. The policy is applied to what is there now.
    """
    if found.starting is not None:
        raise _in_progress(place, found)
    for _ in range(3):
        before = place.catalog.listing()
        try:
            deleted = retire(place.catalog, found.epoch, keep, grace_s=grace_s)
        except ObjectMissing:  # the running job finished a retirement that this one had listed
            time.sleep(0.1)
            continue
        if abandoned:
            deleted = [*deleted, *collect_unfinished(place.catalog, found.epoch, own=False)]
        after = place.catalog.listing()
        retired = (after.retiring | {a for a in deleted if a in before.commits}) - before.retiring
        return Done(retired=tuple(sorted(retired)), deleted=tuple(deleted), waiting=tuple(sorted(after.retiring)))
    raise StorageError(f"{place.store.url}: retired steps disappear while they are read; another prune is at work",
                       hint=f"ckpt ls {place.store.url} --all")  # fmt: skip


def _in_progress(place: Place, found: Plan) -> Superseded:
    claim = found.claim
    facts = [("claim", f"{found.starting} ({place.store.url}/{found.starting.claim_key if found.starting else ''})")]
    if claim is not None:
        age_s = (datetime.now(UTC) - datetime.fromisoformat(claim.created)).total_seconds()
        facts += [
            ("by", f"{claim.host}, pid {claim.pid}, {claim.world_size} rank{'s' * (claim.world_size != 1)}"),
            ("claimed", _ago(age_s)),
        ]
    return Superseded(
        f"a start of this run is in progress: {found.starting} is claimed and has not chosen a step yet",
        facts=facts,
        hint="prune again once it has resumed; if that job is dead, start the run again: the next start settles it",
    )
