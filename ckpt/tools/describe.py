"""Listings and manifests as records to show. Pure: what is read from the store is handed in."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from ckpt.catalog import Candidate, Listing, describe_state
from ckpt.errors import CkptError, Damaged
from ckpt.format.dcpmeta import Contents
from ckpt.format.fields import DTYPE_BYTES
from ckpt.format.layout import Attempt, Epoch
from ckpt.format.manifest import Claim, Commit, Manifest

_PER_RANK = re.compile(r"\.rank\d{5}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One attempt in a listing; ``bytes`` are of all objects in its own folder, None where that is not known."""

    step: int
    attempt: str
    state: str
    epoch: str
    bytes: int | None
    world_size: int | None
    created: str | None
    newest_valid: bool
    counts: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was read about the attempts of a run: ``checked`` by attempt, ``folders`` are bytes found under steps/."""

    listing: Listing
    counted: Sequence[Attempt]
    usable: Collection[Attempt]
    checked: Mapping[Attempt, Candidate | CkptError]
    newest_valid: Attempt | None
    folders: Mapping[Attempt, int] = field(default_factory=dict)
    claims: Mapping[Epoch, Claim] = field(default_factory=dict)
    commits: Mapping[Attempt, Commit] = field(default_factory=dict)  # of those whose check failed
    quarantine_reasons: Mapping[Attempt, str] = field(default_factory=dict)
    rolled_back: Collection[Attempt] = ()


def rows(facts: Facts, attempts: Iterable[Attempt]) -> list[Row]:
    """One row per attempt, newest first."""
    bad = {a: e.message for a, e in facts.checked.items() if isinstance(e, Damaged)}
    return [_row(facts, a, bad) for a in sorted(attempts, reverse=True)]


def _row(facts: Facts, a: Attempt, bad: Mapping[Attempt, str]) -> Row:
    seen = facts.checked.get(a)
    known = seen if isinstance(seen, Candidate) else None
    commit = known.commit if known else facts.commits.get(a)
    claim = facts.claims.get(a.epoch)
    size = known.manifest.own_bytes if known else facts.folders.get(a, commit.total_bytes if commit else None)
    return Row(
        step=a.step,
        attempt=str(a),
        state=describe_state(a, facts.listing, facts.counted, bad),
        epoch=str(a.epoch),
        bytes=size,
        world_size=known.manifest.world_size if known else claim.world_size if claim else None,
        created=commit.created if commit else None,
        newest_valid=a == facts.newest_valid,
        counts=a in facts.counted,
        notes=tuple(_notes(facts, a, seen)),
    )


def _notes(facts: Facts, a: Attempt, seen: Candidate | CkptError | None) -> Iterator[str]:
    if a == facts.newest_valid:
        yield "newest valid"
    if a.counter:
        yield f"attempt {a.counter + 1} in this epoch"
    if isinstance(seen, Candidate) and seen.manifest.references:
        yield f"refers to {len(seen.manifest.references)} older"
    if a in facts.listing.quarantined:
        yield f"quarantined: {facts.quarantine_reasons.get(a, 'see the record')}"
    if isinstance(seen, CkptError):
        yield seen.message
    if a in facts.listing.retiring and a not in facts.usable:
        needs = [
            b.step for b, c in facts.checked.items() if isinstance(c, Candidate) and str(a) in c.manifest.references
        ]
        data = f"step {max(needs)} refers to its data" if needs else "its data go after the grace period"
        yield "being retired" if a in facts.listing.commits else f"retired: {data}"
    if a not in facts.listing.commits and a not in facts.listing.retiring:
        yield "never committed"
    elif a in facts.listing.commits and a not in facts.counted:
        yield f"{'rolled back from' if a in facts.rolled_back else 'off the line that counts'}: never chosen"


def lineage(
    with_base: Collection[Epoch], base_of: Callable[[Epoch], Attempt | None]
) -> tuple[tuple[Epoch, Attempt | None], ...]:
    """The epochs that count and what each builds on, newest first; None is a fresh start."""
    out: list[tuple[Epoch, Attempt | None]] = []
    epoch = max(with_base, default=None)
    while epoch is not None:
        base = base_of(epoch) if epoch in with_base else None
        out.append((epoch, base))
        epoch = base.epoch if base is not None else None
    return tuple(out)


# --- one checkpoint -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor or value. A value has no dtype and shape; its ``bytes`` are not in the manifest."""

    name: str
    kind: str  # "tensor", "replicated" or "per_rank"
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    bytes: int | None = None
    fingerprint: str | None = None
    digest: str | None = None


def entries(manifest: Manifest) -> list[Entry]:
    """Everything in the step, in the order of names."""
    found = [
        Entry(name=k, kind="tensor", dtype=t.dtype, shape=t.shape, bytes=nbytes(t.dtype, t.shape),
              fingerprint=t.fingerprint) for k, t in manifest.tensors.items()
    ] + [Entry(name=k, kind=v.kind, digest=v.digest) for k, v in manifest.values.items()]  # fmt: skip
    return sorted(found, key=lambda e: e.name)


def foreign_entries(contents: Contents) -> list[Entry]:
    """Everything in a plain DCP checkpoint, which says of values neither kind nor digest."""
    found = [
        Entry(name=k, kind="tensor", dtype=d, shape=s, bytes=nbytes(d, s)) for k, (d, s) in contents.tensors.items()
    ]
    return sorted(found + [Entry(name=k, kind="value") for k in contents.values], key=lambda e: e.name)


def matching(found: Iterable[Entry], glob: str | None) -> list[Entry]:
    """Those whose whole name matches the glob, case and all; all of them without a glob."""
    return [e for e in found if glob is None or fnmatchcase(e.name, glob)]


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor's elements."""
    return DTYPE_BYTES[dtype] * math.prod(shape)


@dataclass(frozen=True, slots=True)
class Branch:
    """A node of the tree of names: a group with children, or a leaf with its entry."""

    label: str
    entry: Entry | None
    children: tuple[Branch, ...] = ()
    tensors: int = 0
    values: int = 0
    bytes: int = 0


def tops(found: Sequence[Entry]) -> tuple[Branch, ...]:
    """The first parts of all names, with what is below each."""
    groups: dict[str, list[Branch]] = {}
    for e in found:
        groups.setdefault(e.name.split(".")[0], []).append(_leaf(e.name, e))
    return tuple(replace(_group(label, tuple(leaves)), children=()) for label, leaves in groups.items())


def tree(found: Sequence[Entry]) -> tuple[Branch, ...]:
    """Group entries by the dots in their names; a group of one is joined with its child."""
    return _branches([(e.name.split("."), e) for e in found])


def _branches(parts: list[tuple[list[str], Entry]], depth: int = 0) -> tuple[Branch, ...]:
    groups: dict[str, list[tuple[list[str], Entry]]] = {}
    for path, entry in parts:
        groups.setdefault(path[0], []).append((path[1:], entry))
    return tuple(_branch(label, group, depth) for label, group in groups.items())


def _branch(label: str, group: list[tuple[list[str], Entry]], depth: int) -> Branch:
    if len(group) == 1 or depth >= 50:  # names come from files: their dots must not decide how deep this goes
        own = [_leaf(".".join([label, *path]), entry) for path, entry in group]
        return own[0] if len(own) == 1 else _group(label, tuple(own))
    leaves = [_leaf(label, entry) for path, entry in group if not path]
    below = _branches([(path, entry) for path, entry in group if path], depth + 1)
    if len(below) == 1 and not leaves:
        only = below[0]
        return replace(only, label=f"{label}.{only.label}")
    return _group(label, (*leaves, *below))


def _leaf(label: str, entry: Entry) -> Branch:
    is_tensor = entry.kind == "tensor"
    return Branch(label, entry, tensors=int(is_tensor), values=int(not is_tensor), bytes=entry.bytes or 0)


def _group(label: str, children: tuple[Branch, ...]) -> Branch:
    return Branch(label, None, children, sum(c.tensors for c in children), sum(c.values for c in children),
                  sum(c.bytes for c in children))  # fmt: skip


def per_rank_groups(manifest: Manifest) -> dict[str, int]:
    """How many ranks stored a value of their own, by name without the rank."""
    groups: dict[str, int] = {}
    for name, value in manifest.values.items():
        if value.kind == "per_rank":
            short = _PER_RANK.sub("", name)
            groups[short] = groups.get(short, 0) + 1
    return groups


def bytes_by_dtype(found: Iterable[Entry]) -> dict[str, int]:
    """Bytes of tensors by dtype, the largest first."""
    sums: dict[str, int] = {}
    for e in found:
        if e.dtype is not None:
            sums[e.dtype] = sums.get(e.dtype, 0) + (e.bytes or 0)
    return dict(sorted(sums.items(), key=lambda kv: -kv[1]))
