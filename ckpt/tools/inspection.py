"""What one checkpoint holds, read from its records alone. No torch; no tensor data are read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ckpt.catalog import describe_state
from ckpt.errors import Damaged, NotFound, Unsupported
from ckpt.foreign.safetensors import INDEX
from ckpt.format import layout
from ckpt.format.layout import Attempt
from ckpt.format.manifest import Manifest, ObjectRecord
from ckpt.tools.describe import Entry, entries, per_rank_groups
from ckpt.tools.foreign import plain_entries, safetensors_entries
from ckpt.tools.gather import quarantine_reason
from ckpt.tools.report import Report
from ckpt.tools.target import Place, select
from ckpt.tools.validate import check

_NEWER = "install a torchrelay that knows it; the step is not damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """One checkpoint. ``state`` is one of the four words; ``bytes`` are of all objects; None is *not known*."""

    where: str
    kind: str  # "step", "folder", "plain DCP" or "safetensors"
    what: str
    state: str
    step: int | None = None
    attempt: str | None = None
    counts: bool = False
    notes: tuple[str, ...] = ()
    base: str | None = None
    created: str | None = None
    world_size: int | None = None
    bytes: int | None = None
    checksums: str = "not verified (there are none)"
    fingerprint: str | None = None
    writer: dict[str, str] = field(default_factory=dict)
    references: tuple[str, ...] = ()
    per_rank: dict[str, int] = field(default_factory=dict)
    entries: tuple[Entry, ...] = ()
    objects: tuple[ObjectRecord, ...] = ()


def inspect(place: Place, step: int | None) -> Inspection:
    """Describe what an address means.

    Raises ``Damaged`` where the records themselves cannot be believed, ``Unsupported`` for a newer format. Missing
    or resized objects only make the state "damaged".
    """
    if place.kind == "plain DCP":
        return _foreign(place)
    if place.kind == "safetensors":
        return _safetensors(place)
    return _folder(place) if place.kind == "folder" else _attempt(place, select(place, step))


def _attempt(place: Place, attempt: Attempt) -> Inspection:
    assert place.listing is not None
    catalog, listing = place.catalog, place.listing
    counted, usable = catalog.counted(listing), catalog.usable(listing)
    base = catalog.base_of(attempt.epoch) if attempt.epoch in listing.with_base else None
    seen = Inspection(
        where=f"{place.store.url}/{attempt.prefix}".rstrip("/"), kind="step", what="a step of a run", state="partial",
        step=attempt.step, attempt=str(attempt), counts=attempt in counted, base=str(base) if base else "a fresh start",
    )  # fmt: skip
    if attempt not in listing.commits:
        there = place.store.list(attempt.prefix)
        if not there:
            raise NotFound(
                f"{seen.where} holds nothing and was never committed", hint=f"ckpt ls {place.store.url} --all"
            )
        return replace(seen, bytes=sum(e.size for e in there), notes=("never committed: unfinished or abandoned",))
    report, manifest = check(place.store, attempt.prefix, level="quick", attempt=attempt)
    if report.findings and catalog.gone(attempt):
        raise NotFound(f"step {attempt.step} was retired while it was read", hint=f"ckpt ls {place.store.url}")
    manifest = _believable(report, manifest)
    bad = {attempt: report.findings[0].what} if report.findings else {}
    notes = [*_problem(report)]
    if attempt in listing.quarantined:
        notes.append(f"quarantined: {quarantine_reason(place.store, attempt)}")
    elif attempt not in counted:
        notes.append("off the line that counts: never chosen")
    elif attempt not in usable:
        notes.append("being retired")
    elif attempt == usable[0] and not bad:
        notes.append("newest valid")
    state = describe_state(attempt, listing, counted, bad)
    return _with_content(replace(seen, state=state, notes=tuple(notes)), manifest)


def _folder(place: Place) -> Inspection:
    report, manifest = check(place.store, place.prefix, level="quick")
    manifest = _believable(report, manifest)
    what = "a folder that ckpt.ObjectWriter wrote, outside a run"
    if manifest.attempt is not None:
        what = f"the folder of {manifest.attempt}, copied out of its run"
    seen = Inspection(where=place.where, kind="folder", what=what, step=manifest.step, attempt=manifest.attempt,
                      state="damaged" if report.findings else "committed", notes=_problem(report))  # fmt: skip
    return _with_content(seen, manifest)


def _foreign(place: Place) -> Inspection:
    entries, stored = plain_entries(place.store, place.prefix)
    return Inspection(
        where=place.where, kind="plain DCP", state="unknown", what="a plain DCP checkpoint, not written by torchrelay",
        notes=("it has no manifest, so nothing tells whether it is whole",), entries=entries, bytes=stored,
        checksums="torch's CRC-32 where there is one; only validate --level full reads them",
    )  # fmt: skip


def _safetensors(place: Place) -> Inspection:
    entries, stored, files, fault = safetensors_entries(place.store, place.prefix, place.name)
    alone = place.name != INDEX
    what = "a safetensors file" if alone else f"{files} safetensors files with an index"
    note = "it has no checksums" if fault is None else f"{fault.object}: {fault.what}"
    return Inspection(
        where=f"{place.where}/{place.name}" if alone else place.where, kind="safetensors", what=what,
        state="damaged" if fault else "unknown", notes=(note,), entries=entries, bytes=stored,
    )  # fmt: skip


def _with_content(seen: Inspection, manifest: Manifest) -> Inspection:
    return replace(
        seen, created=manifest.created, world_size=manifest.world_size, bytes=manifest.total_bytes,
        checksums="XXH3-128 of every block; only validate --level full reads them all",
        fingerprint=manifest.fingerprint, writer=manifest.writer, references=manifest.references,
        per_rank=per_rank_groups(manifest), entries=tuple(entries(manifest)), objects=manifest.objects,
    )  # fmt: skip


def _believable(report: Report, manifest: Manifest | None) -> Manifest:
    if manifest is not None:
        return manifest
    if report.reason is not None:
        raise Unsupported(report.reason, hint=_NEWER)
    f = report.findings[0]
    facts = [("object", f"{report.where}/{f.object}" if f.object == layout.MANIFEST else f.object),
             ("expected", f.expected), ("found", f.found)]  # fmt: skip
    raise Damaged(f.what, facts=[(k, v) for k, v in facts if v is not None], hint="ckpt ls, then @ an older step")


def _problem(report: Report) -> tuple[str, ...]:
    if not report.findings:
        return ()
    f = report.findings[0]
    more = f" and {report.findings_total - 1} more" if report.findings_total > 1 else ""
    return (f"{f.object}: {f.what}{more}",)
