"""Which steps of a run a validation covers, and which step is the newest good one. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ckpt.errors import NotFound
from ckpt.format.layout import Attempt
from ckpt.tools.foreign import validate_foreign
from ckpt.tools.gather import quarantine_reason
from ckpt.tools.report import Level, Progress, Report, Verdict, overall
from ckpt.tools.scrub import Budget, Scrub
from ckpt.tools.target import Place, select
from ckpt.tools.validate import validate


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Reports in the order in which they were made. ``newest_good`` was checked at ``newest_good_level``."""

    where: str
    level: Level
    reports: tuple[Report, ...]
    newest_good: int | None = None
    newest_good_level: Level | None = None
    is_run: bool = False

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all."""
        return overall(self.reports)


def survey(
    place: Place, *, step: int | None, level: Level, every: bool, progress: Progress, each: Callable[[Report], None],
    budget: Budget | None = None,
) -> Survey:  # fmt: skip
    """Validate what an address means; ``each`` hears of every report as it is made.

    A run without a step: the newest usable step, and older ones until one is good. ``every``: all that count.
    ``budget``: in pieces, with what earlier validations found good; without one nothing at all is written.
    Raises ``NotFound`` where there is nothing to validate, ``Damaged`` where a base record leaves unknown what counts.
    """
    if place.kind != "run":
        if place.kind == "folder":
            scrub = Scrub(place.store, None, level, budget) if budget else None
            report = validate(place.store, place.prefix, level=level, progress=progress, scrub=scrub)
        else:
            report = validate_foreign(place.store, place.prefix, place.name, level, progress)
        each(report)
        return Survey(where=place.where, level=level, reports=(report,))
    assert place.listing is not None
    catalog = place.catalog
    usable = catalog.usable(place.listing)
    one = step is not None or place.attempt is not None
    if one:
        plan: Sequence[Attempt] = [select(place, step)]
    elif every:
        plan = [a for a in catalog.counted(place.listing) if a in usable or a in place.listing.quarantined]
    else:
        plan = usable
    if not plan:
        raise NotFound(f"no usable step at {place.store.url}", facts=[("committed", str(len(place.listing.commits)))],
                       hint=f"ckpt ls {place.store.url} --all")  # fmt: skip
    reports: dict[Attempt, Report] = {}
    for attempt in plan:
        reports[attempt] = _report(place, attempt, level, progress, budget)
        each(reports[attempt])
        verdict = reports[attempt].verdict
        if not every and (verdict == "good" or (budget is not None and verdict != "bad")):
            break
    good, proof = _newest_good(place, usable, reports, level, look=one)
    return Survey(
        where=place.store.url, level=level, reports=tuple(reports.values()), is_run=True,
        newest_good=good.step if good else None, newest_good_level=proof if good else None,
    )  # fmt: skip


def _report(place: Place, attempt: Attempt, level: Level, progress: Progress, budget: Budget | None) -> Report:
    assert place.listing is not None
    if attempt not in place.listing.commits:
        return Report(
            where=f"{place.store.url}/{attempt.prefix}".rstrip("/"),
            attempt=str(attempt),
            step=attempt.step,
            level=level,
            verdict="not verified",
            reason="this attempt was never committed: it may be unfinished",
        )
    scrub = Scrub(place.store, attempt, level, budget) if budget else None
    report = validate(place.store, attempt.prefix, level=level, attempt=attempt, progress=progress, scrub=scrub)
    if report.verdict == "bad" and place.catalog.gone(attempt):
        return replace(report, verdict="not verified", reason="the step was retired while it was checked", findings=(),
                       findings_total=0)  # fmt: skip
    if attempt in place.listing.quarantined:
        reason = f"quarantined, so never chosen: {quarantine_reason(place.store, attempt)}"
        report = replace(report, hints=(*report.hints, reason))
    return report


def _newest_good(
    place: Place, usable: Sequence[Attempt], reports: dict[Attempt, Report], level: Level, *, look: bool
) -> tuple[Attempt | None, Level]:
    """The newest good one of what was checked; ``look`` takes a quick look at the others too."""
    for a in usable:
        if a in reports:
            if reports[a].verdict == "good":
                seen = reports[a].coverage
                return a, "quick" if seen is not None and seen.subset is not None else level
        elif look and validate(place.store, a.prefix, level="quick", attempt=a).verdict == "good":
            return a, "quick"
    return None, level
