"""Which step a restart would resume from, and the marks by which people change that. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckpt import catalog
from ckpt.catalog import Catalog, Listing
from ckpt.errors import Damaged, NotFound, ObjectMissing, Refused, StorageError, Unsupported
from ckpt.format.layout import Attempt
from ckpt.format.manifest import utc_now
from ckpt.tools.gather import quarantine_reason
from ckpt.tools.report import Finding, Level, Progress, Report
from ckpt.tools.target import Place, select
from ckpt.tools.validate import validate


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """The newest valid step, checked at ``level``; ``skipped`` are newer ones with the reason, newest first."""

    attempt: Attempt
    report: Report
    level: Level
    skipped: tuple[tuple[Attempt, str], ...]


def newest_valid(place: Place, level: Level, progress: Progress | None = None) -> Newest:
    """Walk what a restart would try, from the newest down, to the first that is good at a level.

    Raises ``NotFound`` where no step is, ``Unsupported`` where a newer format keeps that from being known.
    """
    if place.kind != "run" or place.attempt is not None:
        raise Refused(f"{place.where} is one checkpoint, not a run: there is nothing to choose from",
                      hint=f"ckpt validate {place.where}")  # fmt: skip
    for _ in range(20):
        found = _walk(place, place.catalog.listing(), level, progress or Progress())
        if found is not None:
            return found
    raise StorageError(f"{place.store.url}: steps are deleted faster than they can be read",
                       hint=f"ckpt ls {place.store.url}")  # fmt: skip


def _walk(place: Place, listing: Listing, level: Level, progress: Progress) -> Newest | None:
    """The newest good step, or None where one was retired meanwhile: there is a newer one then."""
    cat = place.catalog
    skipped: list[tuple[Attempt, str]] = []
    choices = cat.choices(listing)
    for a in choices:
        report = validate(place.store, a.prefix, level=level, attempt=a, progress=progress)
        if report.verdict == "good":
            marked = [(q, f"quarantined: {quarantine_reason(place.store, q)}") for q in cat.counted(listing)
                      if q in listing.quarantined and q > a]  # fmt: skip
            return Newest(attempt=a, report=report, level=level,
                          skipped=tuple(sorted([*skipped, *marked], reverse=True)))  # fmt: skip
        if cat.gone(a):
            return None
        if report.verdict == "not verified":
            raise Unsupported(f"step {a.step}: {report.reason}", facts=_facts(skipped),
                              hint="install a torchrelay that knows it; the step is not damaged")  # fmt: skip
        skipped.append((a, "; ".join(map(finding_text, report.findings[:3]))))
    skipped += [(a, f"quarantined: {quarantine_reason(place.store, a)}") for a in cat.counted(listing)
                if a in listing.quarantined]  # fmt: skip
    raise NotFound(
        f"no valid step at {place.store.url}",
        facts=[("committed", str(len(listing.commits))), *_facts(sorted(skipped, reverse=True))],
        hint=f"ckpt ls {place.store.url} --all",
    )


def finding_text(f: Finding) -> str:
    """A damage in a few words."""
    return f"{f.object}: {f.what}"


def _facts(skipped: list[tuple[Attempt, str]]) -> list[tuple[str, str]]:
    more = [("skipped", f"and {len(skipped) - 8} more")] if len(skipped) > 8 else []
    return [("skipped", f"{a}: {why}") for a, why in skipped[:8]] + more


# --- quarantine -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """What a mark, or its lifting, has changed. ``newest`` is the newest valid step now (quick), None where none is."""

    attempt: Attempt
    reason: str
    newest: Attempt | None
    counts: bool


def put_mark(place: Place, step: int | None, reason: str, *, force: bool) -> Marked:
    """Record that a step must not be chosen any more; its data stay. Durable on return.

    Raises ``Refused`` where it is marked already, and, without ``force``, where no other step would be left.
    """
    attempt, cat = _meant(place, step, lift=False), place.catalog
    listing = cat.listing()
    if attempt in listing.quarantined:
        raise Refused(f"step {attempt.step} is quarantined already",
                      facts=[("reason", quarantine_reason(place.store, attempt))],
                      hint=f"ckpt quarantine {place.store.url}@{attempt.step} --lift")  # fmt: skip
    others = next(_good(cat, listing, without=attempt), None)
    if others is None and attempt in cat.choices(listing) and not force:
        raise Refused(
            f"step {attempt.step} is the only usable step of the run: without it a restart has nothing to resume from",
            facts=[("attempt", str(attempt))],
            hint=f"ckpt quarantine {place.store.url}@{attempt.step} --reason … --force",
        )
    catalog.quarantine(place.store, attempt, reason, [f"by hand, {utc_now()}"], None)
    return Marked(attempt=attempt, reason=reason, newest=others, counts=attempt in cat.counted(listing))


def lift_mark(place: Place, step: int | None, *, force: bool, progress: Progress | None = None) -> Marked:
    """Delete a step's quarantine record, after a full validation unless ``force``. Durable on return.

    Raises ``NotFound`` where there is no mark, ``Damaged`` naming what is wrong with the step.
    """
    attempt, cat = _meant(place, step, lift=True), place.catalog
    if attempt not in cat.listing().quarantined:
        raise NotFound(f"step {attempt.step} is not quarantined", facts=[("attempt", str(attempt))],
                       hint=f"ckpt ls {place.store.url} --all")  # fmt: skip
    reason = quarantine_reason(place.store, attempt)
    if not force:
        report = validate(place.store, attempt.prefix, level="full", attempt=attempt, progress=progress)
        if report.verdict == "not verified":
            raise Unsupported(f"step {attempt.step} cannot be checked: {report.reason}",
                              hint="install a torchrelay that knows it, or lift the mark with --force")  # fmt: skip
        if report.verdict == "bad":
            raise Damaged(
                f"step {attempt.step} is damaged: the mark stays",
                facts=[("damage", finding_text(f)) for f in report.findings[:8]],
                hint=f"ckpt validate {place.store.url}@{attempt.step} --level full",
            )
    place.store.delete([attempt.quarantine_key])
    listing = cat.listing()
    return Marked(attempt=attempt, reason=reason, newest=next(_good(cat, listing), None),
                  counts=attempt in cat.counted(listing))  # fmt: skip


def _meant(place: Place, step: int | None, *, lift: bool) -> Attempt:
    if place.kind != "run":
        raise Refused(f"{place.where} is a folder outside a run: nothing chooses it, so nothing can be marked",
                      hint="give the URL of a run with @STEP")  # fmt: skip
    if step is None and place.attempt is None:
        raise Refused(f"which step of {place.store.url}?", hint=f"ckpt quarantine {place.store.url}@STEP")
    assert place.listing is not None
    marked = sorted(a for a in place.listing.quarantined if a.step == step and lift)
    return marked[-1] if marked and place.attempt is None else select(place, step)


def _good(cat: Catalog, listing: Listing, without: Attempt | None = None) -> Iterator[Attempt]:
    """What a restart would find good, newest first."""
    for a in cat.choices(listing):
        if a != without:
            try:
                cat.candidate(a)
            except (Damaged, ObjectMissing):
                continue
            yield a
