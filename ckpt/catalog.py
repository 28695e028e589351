"""Which steps of a run count, which one to resume from, and what may be deleted.

The rules (DESIGN of the format, ckpt/FORMAT.md): an epoch is the fencing token of one start; its base record names
the attempt it builds on. What counts follows attempts back from the newest epoch that has a base, not step numbers:
a late commit of a stale writer, or of a branch that was rolled back from, is never chosen.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ckpt.errors import Damaged, Incomplete, NotFound, ObjectMissing, Refused, StorageError, Superseded
from ckpt.format import layout
from ckpt.format.digest import digest
from ckpt.format.layout import Attempt, Epoch
from ckpt.format.manifest import (
    Base,
    Claim,
    Commit,
    Manifest,
    Mark,
    dump,
    load_base,
    load_commit,
    load_manifest,
    load_mark,
    utc_now,
)
from ckpt.store import conditional_put_works
from ckpt.store.contract import Store

Needs = dict[Attempt, frozenset[Attempt]]  # whose data an attempt refers to


@dataclass(frozen=True, slots=True)
class Listing:
    """What one look at a run's records showed. Marks were listed before commits, commits before epochs."""

    commits: frozenset[Attempt]
    epochs: frozenset[Epoch]
    with_base: frozenset[Epoch]
    quarantined: frozenset[Attempt]
    retiring: frozenset[Attempt]

    @property
    def newest_epoch(self) -> Epoch | None:
        """The newest claimed epoch, with or without a base."""
        return max(self.epochs, default=None)

    @property
    def empty(self) -> bool:
        """Nothing was ever committed or based here."""
        return not (self.commits or self.with_base)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A counted step whose records and object sizes have been checked (not its bytes)."""

    attempt: Attempt
    commit: Commit
    manifest: Manifest


@dataclass(slots=True)
class Catalog:
    """The records of one run. Reading is safe from any process at any time; base records are kept once read."""

    store: Store
    _bases: dict[Epoch, tuple[Attempt | None, Base]] = field(default_factory=dict)
    _references: dict[Attempt, frozenset[Attempt]] = field(default_factory=dict)

    def listing(self) -> Listing:
        """List the run's records, in an order in which something to choose is always seen.

        Marks come first: one that is made later is for a step older than the newest that is listed after it. Then
        commits, then epochs, and both again while a commit's epoch is not listed yet.
        """
        quarantined, retiring = attempts_in(self.store, layout.QUARANTINE), attempts_in(self.store, layout.RETIRE)
        for _ in range(5):
            commits = attempts_in(self.store, layout.COMMITS)
            keys = [parsed for e in self.store.list(layout.EPOCHS) if (parsed := layout.parse_epoch_key(e.key))]
            epochs = frozenset(e for e, is_base in keys if not is_base)
            if all(c.epoch in epochs for c in commits):
                break
        return Listing(
            commits=commits, epochs=epochs, with_base=frozenset(e for e, is_base in keys if is_base),
            quarantined=quarantined, retiring=retiring,
        )  # fmt: skip

    def base_of(self, epoch: Epoch) -> Attempt | None:
        """The attempt that an epoch builds on, or None for a start from zero. Raises ``Damaged`` for a bad record."""
        return self._base(epoch)[0]

    def request_of(self, listing: Listing) -> str | None:
        """What the job of the newest start asked for."""
        newest = max(listing.with_base, default=None)
        return None if newest is None else self._base(newest)[1].request

    def rolled_back_to(self, epoch: Epoch) -> Attempt | None:
        """What an epoch builds on, where its start was asked to go back to that step; else None."""
        base, record = self._base(epoch)
        asked = base is not None and (record.request or "").partition(" ")[0] == f"start={base.step}"
        return base if asked else None

    def _base(self, epoch: Epoch) -> tuple[Attempt | None, Base]:
        """What an epoch builds on, and the record that says so."""
        if epoch not in self._bases:
            where = f"{self.store.url}/{epoch.base_key}"
            record = load_base(self.store.get(epoch.base_key), where)
            attempt = layout.parse_attempt(record.attempt) if record.attempt is not None else None
            if record.attempt is not None and (attempt is None or attempt.epoch >= epoch):
                raise Damaged(f"{where} names {record.attempt!r}, which no older epoch can have written")
            self._bases[epoch] = attempt, record
        return self._bases[epoch]

    def counted(self, listing: Listing) -> list[Attempt]:
        """The committed attempts that count, newest first, whether usable or not."""
        return counted(listing.commits, listing.with_base, self.base_of)

    def usable(self, listing: Listing) -> list[Attempt]:
        """The counted attempts that are neither quarantined nor being retired, newest first.

        A base record of an epoch after the retirement, naming the attempt, voids the retirement.
        """
        live = [a for a in self.counted(listing) if a not in listing.quarantined]
        return [a for a in live if a not in listing.retiring or self._voided(a, listing)]

    def choices(self, listing: Listing) -> list[Attempt]:
        """What to try in turn: the usable attempts, and after them those that are being retired but still committed.

        The latter are better than nothing where no other is whole: the writer that marked them may have been
        superseded before it deleted anything.
        """
        usable = self.usable(listing)
        return usable + [a for a in self.counted(listing) if a not in usable and a not in listing.quarantined]

    def saved_nothing(self, listing: Listing) -> bool:
        """Whether starting from zero loses no step that was ever reported.

        So it is where nothing was committed, and where the newest start began with nothing, without being asked to,
        and added nothing: a commit that is there all the same came late, from a start that it had overtaken.
        """
        newest = max(listing.with_base, default=None)
        if newest is None:
            return not listing.commits
        nothing_ever = not listing.commits and all(self.base_of(e) is None for e in listing.with_base)
        base, record = self._base(newest)
        return nothing_ever or (base is None and not record.fresh and not self.counted(listing))

    def _voided(self, attempt: Attempt, listing: Listing) -> bool:
        """Whether a start after the retirement builds on the attempt."""
        try:
            mark = load_mark(self.store.get(attempt.retire_key), attempt.retire_key)
        except ObjectMissing:
            return False
        by = layout.parse_epoch_key(f"{layout.EPOCHS}{(mark.epoch or '')[1:]}.json")
        return by is not None and any(e > by[0] and self.base_of(e) == attempt for e in listing.with_base)

    def candidate(self, attempt: Attempt) -> Candidate:
        """Read an attempt's commit and manifest, and compare every object's presence and size.

        Raises ``Damaged`` or ``Incomplete`` for proven damage (unless the step is ``gone``), ``Unsupported`` for a
        newer format, ``ObjectMissing`` where there is no commit record.
        """
        try:
            return self._candidate(attempt)
        except Damaged:  # one wrong answer is no proof: a fault on the way would be wrong in another way
            return self._candidate(attempt)

    def _candidate(self, attempt: Attempt) -> Candidate:
        where = f"{self.store.url}/{attempt.commit_key}"
        commit = load_commit(self.store.get(attempt.commit_key), where)
        if commit.attempt != str(attempt) or commit.step != attempt.step:
            raise Damaged(f"{where} speaks of {commit.attempt}, step {commit.step}")
        if commit.quarantined:
            raise Damaged(f"step {attempt.step} was quarantined when it was committed",
                          facts=[("see", f"{self.store.url}/{attempt.quarantine_key}")])  # fmt: skip
        key = attempt.prefix + layout.MANIFEST
        try:
            data = self.store.get(key)
        except ObjectMissing:
            raise Incomplete(f"step {attempt.step}: {self.store.url}/{key} is missing") from None
        if (found := digest(data)) != commit.manifest_digest:
            raise Damaged(
                f"step {attempt.step}: the manifest is not the one that was committed",
                facts=[
                    ("object", f"{self.store.url}/{key}"),
                    ("expected", commit.manifest_digest),
                    ("found", found),
                ],
            )
        manifest = load_manifest(data, f"{self.store.url}/{key}")
        if (manifest.attempt, manifest.step) != (str(attempt), attempt.step):
            raise Damaged(f"{self.store.url}/{key} is of another attempt: {manifest.attempt}, step {manifest.step}")
        if facts := manifest.differing_objects(attempt.prefix, self.store.list):
            raise Incomplete(
                f"step {attempt.step}: {len(facts)} of {len(manifest.objects)} objects differ from the commit",
                facts=facts[:20],
            )
        return Candidate(attempt, commit, manifest)

    def needs(self, commits: Iterable[Attempt], marks: Mapping[Attempt, Mark] | None = None) -> Needs:
        """Whose data each attempt needs besides its own: all that are committed, usable or not, and retired ones.

        ``marks`` are retire records that were read already.
        """
        needs: dict[Attempt, frozenset[Attempt]] = {}
        for a in commits:
            with contextlib.suppress(ObjectMissing):  # retired since it was listed
                needs[a] = self.refers_to(a)
        for a in attempts_in(self.store, layout.RETIRE) - needs.keys():  # listed last: no retired step is missed
            with contextlib.suppress(ObjectMissing):  # its data are gone
                needs[a] = named_in((marks or {}).get(a) or load_mark(self.store.get(a.retire_key), a.retire_key))
        return needs

    def refers_to(self, attempt: Attempt) -> frozenset[Attempt]:
        """What a commit record says that the step needs besides its own data; read once. Raises ``ObjectMissing``."""
        if attempt not in self._references:
            for last in (False, True):
                try:
                    record = load_commit(self.store.get(attempt.commit_key), attempt.commit_key)
                except Damaged:
                    if last:  # nobody can load the step any more
                        return frozenset()
                else:
                    self._references[attempt] = named_in(record)
                    break
        return self._references[attempt]

    def gone(self, attempt: Attempt) -> bool:
        """Whether its commit record was deleted: retention took the step while somebody looked at it."""
        return all(e.key != attempt.commit_key for e in self.store.list(attempt.commit_key))

    def newest_valid(self) -> Attempt | None:
        """The first of the ``choices`` whose records and sizes are good, or None."""
        for _ in range(20):
            for attempt in self.choices(self.listing()):
                try:
                    return self.candidate(attempt).attempt
                except (Damaged, ObjectMissing) as e:
                    if self.gone(attempt):
                        break  # look again: there is a newer one
                    if not isinstance(e, Damaged):
                        raise
            else:
                return None
        raise StorageError(f"{self.store.url}: steps are deleted faster than they can be read")

    def resolve(self, step: int | None = None, listing: Listing | None = None) -> Attempt:
        """The newest usable attempt, or the usable one of a given step. Raises ``NotFound``."""
        listing = listing or self.listing()
        usable = self.usable(listing)
        for a in usable:
            if step is None or a.step == step:
                return a
        if listing.empty and step is None:
            raise NotFound(
                f"no committed step at {self.store.url}",
                hint="check the URL; a run writes its first step when it saves",
            )
        what = "no usable step" if step is None else f"step {step} is not a usable step"
        have = ", ".join(str(a.step) for a in usable[:8]) or "none"
        raise NotFound(f"{what} at {self.store.url}", facts=[("usable steps", have)], hint=f"ckpt ls {self.store.url}")


def counted(
    commits: Collection[Attempt], with_base: Collection[Epoch], base_of: Callable[[Epoch], Attempt | None]
) -> list[Attempt]:
    """The committed attempts that count, newest first. Pure, given ``base_of``.

    Newest epoch with a base → its commits above the base → the base attempt → its epoch's commits at or below it → …
    """
    out: list[Attempt] = []
    epoch, cap = max(with_base, default=None), None
    while epoch is not None:
        base = base_of(epoch) if epoch in with_base else None
        mine = (a for a in commits if a.epoch == epoch)
        out += sorted(
            (a for a in mine if (cap is None or a <= cap) and (base is None or a.step > base.step)),
            reverse=True,
        )
        epoch, cap = (base.epoch, base) if base is not None else (None, None)
    return out


# --- what writers do ------------------------------------------------------------------------------------------


def claim(store: Store, *, world_size: int) -> Epoch:
    """Take the next epoch of the run; on return the claim is durable and this start outranks all older ones."""
    nonce = "" if conditional_put_works(store) else secrets.token_hex(4)
    for _ in range(100):
        taken = [p[0] for e in store.list(layout.EPOCHS) if (p := layout.parse_epoch_key(e.key))]
        epoch = Epoch(max((e.number for e in taken), default=0) + 1, nonce)
        record = Claim(epoch=str(epoch), writer=secrets.token_hex(8), host=socket.gethostname(), pid=os.getpid(),
                       world_size=world_size, created=utc_now())  # fmt: skip
        if store.put_if_absent(epoch.claim_key, dump("claim", record)):
            return epoch
    raise StorageError(f"{store.url}: 100 starts in a row took the next epoch first")


def write_base(
    store: Store, epoch: Epoch, base: Attempt | None, *, fresh: bool = False, request: str | None = None
) -> None:
    """Record what an epoch builds on, and what was asked for; from now on readers follow this epoch."""
    record = Base(epoch=str(epoch), attempt=str(base) if base else None, created=utc_now(), fresh=fresh,
                  request=request)  # fmt: skip
    if not store.put_if_absent(epoch.base_key, dump("base", record)):
        raise StorageError(f"{store.url}/{epoch.base_key} exists already")


def check_not_superseded(store: Store, epoch: Epoch, seen: Iterable[Epoch] | None = None) -> None:
    """Raise ``Superseded`` if a newer epoch has been claimed; ``seen`` are those of a listing, else one is made."""
    if seen is None:
        seen = (p[0] for e in store.list(layout.EPOCHS) if (p := layout.parse_epoch_key(e.key)))
    newest = max(seen, default=epoch)
    if newest > epoch:
        raise Superseded(
            f"a newer start of this run has taken over: {newest}, this one is {epoch}",
            hint="stop this job; two jobs must not write one run",
        )


def commit(
    store: Store, attempt: Attempt, base: Attempt | None, manifest: bytes, total_bytes: int,
    references: tuple[str, ...] = (), *, quarantined: bool = False,
) -> None:  # fmt: skip
    """Make an attempt count: manifest, fence, commit record, fence. Coordinator only.

    ``quarantined``: its quarantine record was written; a reader that listed those before sees it here.

    On return the step is durable and reported. ``Superseded`` means that it must not be reported.
    """
    store.put(attempt.prefix + layout.MANIFEST, [manifest])
    check_not_superseded(store, attempt.epoch)
    record = Commit(attempt=str(attempt), step=attempt.step, base=str(base) if base else None,
                    manifest_digest=digest(manifest), manifest_bytes=len(manifest), total_bytes=total_bytes,
                    created=utc_now(), references=references, quarantined=quarantined)  # fmt: skip
    if not store.put_if_absent(attempt.commit_key, dump("commit", record)):
        raise Refused(f"{store.url}/{attempt.commit_key} exists already")
    check_not_superseded(store, attempt.epoch)


def quarantine(store: Store, attempt: Attempt, reason: str, details: Iterable[str], epoch: Epoch | None) -> None:
    """Record that an attempt must not be chosen any more, and why. Proven damage only; the data stay."""
    mark = Mark(attempt=str(attempt), reason=reason, epoch=str(epoch) if epoch else None, created=utc_now(),
                details=tuple(details))  # fmt: skip
    store.put_if_absent(attempt.quarantine_key, dump("mark", mark))


def named_in(record: Commit | Mark) -> frozenset[Attempt]:
    """The attempts that a record refers to."""
    return frozenset(a for name in record.references if (a := layout.parse_attempt(name)) is not None)


def attempts_in(store: Store, folder: str) -> frozenset[Attempt]:
    """The attempts that have a record in a folder such as ``retire/``; one listing."""
    return frozenset(a for e in store.list(folder) if (a := layout.parse_record_key(e.key, folder)) is not None)


def describe_state(attempt: Attempt, listing: Listing, live: Collection[Attempt], why: Mapping[Attempt, str]) -> str:
    """One of the four words for an attempt: committed, partial, damaged, unknown."""
    if attempt in listing.quarantined or attempt in why:
        return "damaged"
    if attempt in live:
        return "committed"
    return "unknown" if attempt in listing.commits else "partial"
