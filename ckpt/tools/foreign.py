"""What ``inspect`` and ``validate`` say of checkpoints that others wrote: plain DCP and safetensors. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ckpt.errors import Damaged, Refused
from ckpt.foreign import hub, plain
from ckpt.foreign.safetensors import INDEX
from ckpt.foreign.source import Fault
from ckpt.format import layout
from ckpt.store.contract import Store
from ckpt.tools.describe import Entry, foreign_entries, nbytes
from ckpt.tools.report import Finding, Level, Progress, Report, Verdict

MAX_FINDINGS = 200
NO_CRC = "so nothing proves that its bytes are those that were saved"


def validate_foreign(store: Store, prefix: str, name: str, level: Level, progress: Progress) -> Report:
    """Check safetensors, where ``name`` is the file to open, or else a plain DCP folder."""
    if name:
        return validate_safetensors(store, prefix, name, level)
    return validate_plain(store, prefix, level, progress)


def validate_plain(store: Store, prefix: str, level: Level, progress: Progress) -> Report:
    """Check a plain DCP folder: names, sizes, overlaps, chunks; beyond ``quick`` every CRC-32 that torch stored."""
    began = time.monotonic()
    where = f"{store.url.rstrip('/')}/{prefix}".rstrip("/")
    checked = plain.Checked([])
    objects, stored = 0, 0
    try:
        contents = plain.read_contents(store, prefix)
    except Damaged as e:
        checked.faults.append(Fault(e.message, layout.METADATA))
    else:
        sizes = {e.key.removeprefix(prefix): e.size for e in store.list(prefix)}
        used = {name for name, _, _ in contents.places.values()}
        objects, stored = len(used), sum(sizes.get(name, 0) for name in used)
        faults = list(plain.structure(contents, sizes))
        if level != "quick" and not contents.transformed:
            bad = {f.object for f in faults}
            progress.expect(sum(n for name, _, n in contents.places.values() if name not in bad))
            checked = plain.check_items(store, prefix, contents, bad, progress.advance)
        checked.faults[:0] = faults
        if contents.transformed:
            checked.without += len(contents.transformed)
    verdict, reason = _verdict(checked, level)
    return Report(
        where=where, attempt=None, step=None, level=level, verdict=verdict, reason=reason, objects=objects,
        bytes=stored, bytes_hashed=checked.bytes_read, blocks_hashed=checked.verified,
        findings=findings(checked.faults), findings_total=len(checked.faults), seconds=time.monotonic() - began,
        hints=("a CRC-32 of every item was compared; .metadata itself has none",) if verdict == "good" else (),
    )  # fmt: skip


def _verdict(checked: plain.Checked, level: Level) -> tuple[Verdict, str | None]:
    if checked.faults:
        return "bad", None
    if level == "quick":
        return "not verified", "a plain DCP checkpoint: its bytes were not read (--level full compares torch's CRC-32)"
    if checked.without or not checked.verified:
        count = checked.without + checked.verified
        what = f"{checked.without} of {count} items" if checked.verified else f"its {count} items"
        return "not verified", f"a plain DCP checkpoint: {what} have no checksum, {NO_CRC}"
    return "good", None


def validate_safetensors(store: Store, prefix: str, name: str, level: Level) -> Report:
    """Check headers, offsets, shards and index; the format has no checksums, so that is all that can be known."""
    parts, faults = hub.survey(store, prefix, name)
    reason = f"safetensors has no checksums: the structure is sound, {NO_CRC.removeprefix('so ')}"
    return Report(
        where=_where(store, prefix, name), attempt=None, step=None, level=level,
        verdict="bad" if faults else "not verified", reason=None if faults else reason, findings=findings(faults),
        findings_total=len(faults), objects=len({f for f, _ in parts.values()}),
        bytes=sum(p.end - p.start for _, p in parts.values()),
    )  # fmt: skip


def findings(faults: Iterable[Fault]) -> tuple[Finding, ...]:
    """What a foreign check found, as a validation reports it."""
    found = [
        Finding(what=f.what, object=f.object, item=f.item, span=f.span, expected=f.expected, found=f.found,
                rank=layout.data_rank(f.object)) for f in faults
    ]  # fmt: skip
    return tuple(found[:MAX_FINDINGS])


def plain_entries(store: Store, prefix: str) -> tuple[tuple[Entry, ...], int]:
    """The entries of a plain DCP folder, and the bytes of its files."""
    contents = plain.read_contents(store, prefix)
    used = {name for name, _, _ in contents.places.values()}
    stored = sum(e.size for e in store.list(prefix) if e.key.removeprefix(prefix) in used)
    return tuple(foreign_entries(contents)), stored


def safetensors_entries(store: Store, prefix: str, name: str) -> tuple[tuple[Entry, ...], int, int, Fault | None]:
    """The tensors of a set, their bytes, its number of files, and the first thing that is wrong."""
    parts, faults = hub.survey(store, prefix, name)
    found = [
        Entry(name=k, kind="tensor", dtype=p.dtype, shape=p.shape, bytes=nbytes(p.dtype, p.shape))
        for k, (_, p) in sorted(parts.items())
    ]
    files = len({f for f, _ in parts.values()})
    return tuple(found), sum(e.bytes or 0 for e in found), files, faults[0] if faults else None


def find_safetensors(store: Store, prefix: str) -> str | None:
    """What to open of a folder of safetensors; None where there is none. Raises ``Refused`` where it is not clear."""
    name = hub.find(store, prefix)
    if name is None and (files := hub.candidates(store, prefix)):
        raise Refused(f"{store.url} holds {len(files)} safetensors files and no {INDEX}",
                      facts=[("files", ", ".join(files[:5]))], hint="give the URL of one of them")  # fmt: skip
    return name


def _where(store: Store, prefix: str, name: str) -> str:
    return f"{store.url.rstrip('/')}/{prefix}{'' if name == INDEX else name}".rstrip("/")
