"""Check a checkpoint against what was recorded when it was written. Reads only; no torch.

``quick``: commit record, manifest and its digest, presence and size of every object. ``full``: besides, every block
of every object is read and hashed, and the indexes, ``.metadata`` and the manifest are held against each other.
All damage is reported, not only the first; what proves nothing (a store that fails) is raised.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import xxhash

from ckpt.errors import CkptError, Damaged, Incomplete, ObjectMissing, Unsupported
from ckpt.format import dcpmeta, layout
from ckpt.format.blocks import Item
from ckpt.format.digest import digest, digest_all
from ckpt.format.manifest import Manifest, ObjectRecord, load_commit, load_manifest
from ckpt.store.contract import Store
from ckpt.tools.agreement import Places, contradiction, is_place
from ckpt.tools.report import Coverage, Finding, Level, Progress, Report, Verdict
from ckpt.tools.scrub import Piece, Scrub, cut, within_budget
from ckpt.tools.stream import WINDOW_BYTES, Reading, Stopped, Stream

DIFFER = "stored bytes differ from what was saved"
MAX_FINDINGS = 200  # reported in full; the rest is counted


def validate(
    store: Store,
    prefix: str,
    *,
    level: Level,
    attempt: layout.Attempt | None = None,
    progress: Progress | None = None,
    scrub: Scrub | None = None,
) -> Report:
    """Check one folder; ``attempt`` for one that a run has committed, whose commit record is checked too.

    ``scrub``: only the pieces that its budget allows, and it remembers which were good.
    """
    return check(store, prefix, level=level, attempt=attempt, progress=progress, scrub=scrub)[0]


def check(
    store: Store,
    prefix: str,
    *,
    level: Level,
    attempt: layout.Attempt | None = None,
    progress: Progress | None = None,
    scrub: Scrub | None = None,
) -> tuple[Report, Manifest | None]:
    """Do what ``validate`` does, and give the manifest too: None where damage or a newer format keeps it unread."""
    job = _Check(store, prefix, attempt, progress or Progress(), scrub)
    began = time.monotonic()
    manifest, reason = None, None
    try:
        manifest = job.run(level)
    except Unsupported as e:
        reason = e.message
    if scrub is not None and job.coverage is not None:
        if job.coverage.left:
            reason = reason or f"{job.coverage.left} of {job.coverage.pieces} pieces are left for another time"
        job.hints += [scrub.problem] if scrub.problem else []
    verdict: Verdict = "bad" if job.total else "not verified" if reason else "good"
    return Report(
        where=job.where, attempt=str(attempt) if attempt else None, step=job.step, level=level, verdict=verdict,
        reason=reason, findings=tuple(sorted(job.findings, key=lambda f: (f.object, f.span or (0, 0)))),
        findings_total=job.total, hints=tuple(job.hints), objects=job.objects, bytes=job.stored,
        bytes_hashed=job.bytes_hashed, blocks_hashed=job.blocks_hashed, seconds=time.monotonic() - began,
        tensors_proven=job.tensors, values_decoded=job.values, unverified=tuple(job.unverified),
        ranks=tuple(sorted({o.rank for o in manifest.objects})) if manifest else (), coverage=job.coverage,
    ), manifest  # fmt: skip


@dataclass
class _Check:
    store: Store
    prefix: str
    attempt: layout.Attempt | None
    progress: Progress
    scrub: Scrub | None = None
    findings: list[Finding] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    total: int = 0
    step: int | None = None
    objects: int = 0
    stored: int = 0
    bytes_hashed: int = 0
    blocks_hashed: int = 0
    tensors: int = 0  # proven by their fingerprints
    values: int = 0  # decoded
    unverified: list[str] = field(default_factory=list)
    coverage: Coverage | None = None
    manifest_digest: str = ""
    blind: bool = False  # a record is missing or wrong (and reported), so its absence in others says nothing
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.step = self.attempt.step if self.attempt else None

    @property
    def where(self) -> str:
        return f"{self.store.url.rstrip('/')}/{self.prefix}".rstrip("/")

    def key(self, name: str) -> str:
        """Key of an object that the manifest names."""
        return layout.object_key(self.prefix, name)

    def add(self, finding: Finding) -> None:
        with self.lock:
            self.total += 1
            if len(self.findings) < MAX_FINDINGS:
                self.findings.append(finding)

    def hint(self, text: str) -> None:
        with self.lock:
            self.hints.append(text)

    def run(self, level: Level) -> Manifest | None:
        manifest = self._manifest()
        if manifest is None:
            return None
        self.step, self.objects, self.stored = manifest.step, len(manifest.objects), manifest.total_bytes
        whole = self._presence(manifest)
        if level == "full":
            self._contents(manifest, whole)
        elif level == "load" and not self.total:
            from ckpt.tools.loading import load_check  # torch

            load_check(self, manifest)
        return manifest

    # --- quick ----------------------------------------------------------------------------------------------

    def _manifest(self) -> Manifest | None:
        """The manifest that was committed, or None where damage keeps it from being read."""
        name, a = layout.MANIFEST, self.attempt
        want = None
        if a is not None:
            try:
                commit = load_commit(self.store.get(a.commit_key), a.commit_key)
            except ObjectMissing:
                return self._lost("the commit record is missing", a.commit_key)
            except Damaged as e:
                return self._lost(e.message, a.commit_key)
            if (commit.attempt, commit.step) != (str(a), a.step):
                return self._lost("the commit record is of another attempt", a.commit_key, str(a),
                                  f"{commit.attempt}, step {commit.step}")  # fmt: skip
            want = commit.manifest_digest
        try:
            data = self._twice(name, lambda d: want is None or digest(d) == want)
            if want is not None and (found := digest(data)) != want:
                return self._lost("the manifest is not the one that was committed", name, f"xxh3-128 {want}", found)
            manifest = load_manifest(data, name)
            self.manifest_digest = digest(data)
        except ObjectMissing:
            return self._lost("the manifest is missing", name)
        except Damaged as e:
            return self._lost(e.message, name)
        if a is not None and (manifest.attempt, manifest.step) != (str(a), a.step):
            return self._lost("the manifest is of another attempt", name, str(a),
                              f"{manifest.attempt}, step {manifest.step}")  # fmt: skip
        return manifest

    def _lost(self, what: str, name: str, expected: str | None = None, found: str | None = None) -> Manifest | None:
        """Report damage of a record that all the rest hangs on; rank 0 writes these."""
        self.add(Finding(what=what, object=name, rank=0, expected=expected, found=found))
        return None

    def _presence(self, manifest: Manifest) -> dict[str, ObjectRecord]:
        """The objects that are there in the right size: nothing else is ever read."""
        there = manifest.sizes_there(self.prefix, self.store.list)
        whole = {}
        for o in manifest.objects:
            size = there.pop(o.name, None)
            if size == o.bytes:
                whole[o.name] = o
            else:
                self.blind = True
                self.add(Finding(what="the object is missing" if size is None else "the object has another size",
                                 object=o.name, rank=o.rank, expected=f"{o.bytes} bytes",
                                 found="nothing" if size is None else f"{size} bytes"))  # fmt: skip
        if layout.METADATA not in {o.name for o in manifest.objects}:
            self.add(Finding(what="the manifest does not name it, so nothing can be loaded", object=layout.METADATA))
        if manifest.references and not self.prefix:
            self.hint("it refers to objects of other steps: look at it in its run, or export it there")
        extra = [name for name in there if name != layout.MANIFEST and layout.split_name(name)[0] is None]
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            self.hint(f"objects that the manifest does not name: {min(extra)}{more}")
        return whole

    # --- full -----------------------------------------------------------------------------------------------

    def _contents(self, manifest: Manifest, whole: dict[str, ObjectRecord]) -> None:
        if self.scrub is None:
            self.progress.expect(sum(o.bytes for o in whole.values() if layout.split_name(o.name)[0] is None))
        places = self._metadata(manifest, whole.get(layout.METADATA))
        elements: dict[str, int] = {}
        done = {layout.METADATA}
        pieces: list[Piece] = []
        with Reading(self.stop) as reading:

            def start(record: ObjectRecord, items: list[Item]) -> None:
                if self.scrub is None and layout.split_name(record.name)[0] is None:
                    reading.start(lambda: self._object(record, items))
                else:  # of an object that is referred to, what this step does not need is not its own
                    pieces.extend(cut(record, items))

            indexes = [o for o in whole.values() if layout.index_rank(o.name) is not None]
            for record in indexes:
                done.add(record.name)
                by_object = self._index(record, manifest, places, elements)
                for name, items in by_object.items():
                    if name in whole and name not in done:
                        done.add(name)
                        start(whole[name], items)
            for record in whole.values():
                if record.name not in done:
                    start(record, [])
                    if not self.blind and layout.data_rank(record.name) is not None and record.bytes:
                        self.add(Finding(what="no index covers the object", object=record.name, rank=record.rank))
            for work in self.within_budget({p.name: (p.span[1] - p.span[0], partial(self._piece, p)) for p in pieces}):
                reading.start(work)
        self.end_budget()
        if self.scrub is not None:
            self.unverified.append("the digest of each object as a whole; of its blocks, those of this part")
        if not self.blind:
            self._crosscheck(manifest, places or {}, elements)

    def within_budget(self, pieces: dict[str, tuple[int, Callable[[], bool]]]) -> Iterator[Callable[[], None]]:
        """What to do of the pieces, by name with their bytes; each says if it is good. ``end_budget`` comes last."""
        return within_budget(self.scrub, self.manifest_digest, pieces, self.progress.expect)

    def end_budget(self) -> None:
        """All of it is done: note how much of the step it was."""
        self.coverage = self.scrub.end() if self.scrub is not None else None

    def _metadata(self, manifest: Manifest, record: ObjectRecord | None) -> Places | None:
        """Where ``.metadata`` says that everything lies; None where it cannot be read."""
        if record is None or (data := self._small(record)) is None:
            return None
        try:
            contents = dcpmeta.read_contents(data, layout.METADATA)
        except Damaged as e:
            self.blind = True
            self.add(Finding(what=e.message, object=record.name, rank=record.rank))
            return None
        recorded = {k: (t.dtype, t.shape) for k, t in manifest.tensors.items()}
        if contents.tensors != recorded or set(contents.values) != manifest.values.keys():
            odd = sorted(
                k for k in contents.tensors.keys() | recorded.keys() if contents.tensors.get(k) != recorded.get(k)
            )
            odd += sorted(set(contents.values) ^ manifest.values.keys())
            self.add(Finding(what="the manifest and DCP's metadata differ in what the step holds", object=record.name,
                             rank=record.rank, item=", ".join(odd[:3]), found=f"{len(odd)} entries"))  # fmt: skip
        return contents.places

    def _index(
        self, record: ObjectRecord, manifest: Manifest, places: Places | None, elements: dict[str, int]
    ) -> dict[str, list[Item]]:
        """One rank's items by object, held against ``.metadata`` and the manifest; empty where it is damaged."""
        if (data := self._small(record)) is None:
            return {}
        rank = layout.index_rank(record.name)
        try:
            index = manifest.load_index(data, record.name, record.name)
        except Damaged as e:
            self.blind = True
            self.add(Finding(what=e.message, object=record.name, rank=record.rank))
            return {}
        by_object: dict[str, list[Item]] = {}
        for item in index.items:
            if layout.split_name(record.name)[0] is not None and not is_place(item, places):
                continue  # of the step that is referred to, and not of this one
            by_object.setdefault(item.object, []).append(item)
            if item.dtype is not None:
                elements[item.fqn] = elements.get(item.fqn, 0) + math.prod(item.shape)
            if wrong := contradiction(item, manifest, places):
                self.blind = True
                name = item.fqn if item.offsets is None else f"{item.fqn} at {item.offsets}"
                self.add(Finding(what=wrong, object=record.name, rank=record.rank, item=name))
        spoken_for = {index.rank, *(r for name in by_object if (r := layout.data_rank(name)) is not None)}
        if spoken_for != {rank}:
            self.blind = True
            ranks = ", ".join(f"rank {r}" for r in sorted(spoken_for))
            self.add(Finding(what="the index speaks for another rank", object=record.name, rank=record.rank,
                             expected=f"rank {rank}", found=ranks))  # fmt: skip
        return by_object

    def _crosscheck(self, manifest: Manifest, places: Places, elements: dict[str, int]) -> None:
        """What only shows once all records were read; where one could not be, that has been reported."""
        for (fqn, _), (name, start, length) in sorted(places.items(), key=lambda p: p[1]):
            self.add(Finding(what="no index has it, so its bytes are unproven", object=name, item=fqn,
                             rank=layout.data_rank(name), span=(start, start + length)))  # fmt: skip
        for fqn, tensor in manifest.tensors.items():
            if (have := elements.get(fqn, 0)) != (want := math.prod(tensor.shape)):
                self.add(Finding(what="the stored chunks do not make up the tensor", object=layout.METADATA, item=fqn,
                                 expected=f"{want} elements", found=f"{have} elements"))  # fmt: skip

    # --- bytes ----------------------------------------------------------------------------------------------

    def _object(self, record: ObjectRecord, items: list[Item]) -> None:
        """Hash one object from front to end: its blocks, and the whole where blocks are not all the proof there is."""
        whole = xxhash.xxh3_128()
        # commit, manifest and index prove the digests of all blocks: of a large object, they are proof enough
        both = self.attempt is None or not items or record.bytes <= WINDOW_BYTES
        seen = whole.update if both else lambda _: None
        stream = Stream(self.store, self.key(record.name), record.bytes, seen, self.advance)
        intact = True
        try:
            for item in items:  # items and their blocks follow one another without holes
                for n in range(item.block_count):
                    lo, hi = item.block_range(n)
                    if (found := digest_all(stream.take(hi - lo))) != item.digests[n]:
                        intact = False
                        self._block_again(record, item, n, found)
            digest_all(stream.take(record.bytes - stream.at))
        except (ObjectMissing, Incomplete) as e:
            self._changed(record, e)
            return
        with self.lock:
            self.bytes_hashed += record.bytes
            self.blocks_hashed += sum(i.block_count for i in items)
        if both and intact and (found := whole.hexdigest()) != record.digest:
            self.add(Finding(what=DIFFER, object=record.name, rank=record.rank,
                             expected=f"xxh3-128 {record.digest}", found=found))  # fmt: skip

    def _piece(self, piece: Piece) -> bool:
        """Hash some blocks of an object; True where all are good."""
        record, (lo, hi) = piece.record, piece.span
        if not piece.blocks:
            before = self.total
            self._object(record, [])
            return self.total == before
        stream = Stream(self.store, self.key(record.name), hi, lambda _: None, self.advance, at=lo)
        intact = True
        try:
            for item, n in piece.blocks:
                lo, hi = item.block_range(n)
                if (found := digest_all(stream.take(hi - lo))) != item.digests[n]:
                    intact = self._block_again(record, item, n, found) and intact
        except (ObjectMissing, Incomplete) as e:
            self._changed(record, e)
            return False
        with self.lock:
            self.bytes_hashed += piece.span[1] - piece.span[0]
            self.blocks_hashed += len(piece.blocks)
        return intact

    def _changed(self, record: ObjectRecord, e: CkptError) -> None:
        what = f"the object changed while it was read: {e.message}"
        self.add(Finding(what=what, object=record.name, rank=record.rank))

    def advance(self, n: int) -> None:
        if self.stop.is_set():
            raise Stopped("another read failed")
        self.progress.advance(n)

    def _block_again(self, record: ObjectRecord, item: Item, n: int, first: str) -> bool:
        """Tell a fault on the way from damage at rest, which is False: only wrong twice is proof."""
        lo, hi = item.block_range(n)
        stream = Stream(self.store, self.key(record.name), hi, lambda _: None, lambda _: None, at=lo)
        second = digest_all(stream.take(hi - lo))
        if second == item.digests[n]:
            self.hint(f"{record.name}: block {n} of {item.fqn} was wrong once and right when read again")
            return True
        self.add(Finding(
            what=DIFFER, object=record.name, rank=record.rank, item=item.fqn, block=n, span=(lo, hi),
            expected=f"xxh3-128 {item.digests[n]}", found=" and ".join(dict.fromkeys([first, second])),
        ))  # fmt: skip
        return False

    def _small(self, record: ObjectRecord) -> bytes | None:
        """An object that is read whole, proven against its digest; None (and a finding) where it is damaged."""
        try:
            data = self._twice(record.name, lambda d: digest(d) == record.digest, max_bytes=max(record.bytes, 1))
        except ObjectMissing:
            self.blind = True
            self.add(Finding(what="the object has gone since it was listed", object=record.name, rank=record.rank))
            return None
        self.advance(len(data))
        with self.lock:
            self.bytes_hashed += len(data)
        if (found := digest(data)) == record.digest:
            return data
        self.blind = True
        self.add(Finding(what=DIFFER, object=record.name, rank=record.rank,
                         expected=f"xxh3-128 {record.digest}", found=found))  # fmt: skip
        return None

    def _twice(self, name: str, good: Callable[[bytes], bool], max_bytes: int = 1 << 28) -> bytes:
        data = self.store.get(self.key(name), max_bytes=max_bytes)
        return data if good(data) else self.store.get(self.key(name), max_bytes=max_bytes)
