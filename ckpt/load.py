"""Choose → read → verify → apply: how a start finds its step, the same on all ranks.

Only proven damage (``Damaged``: the same wrong bytes in two fresh reads, a missing object) may lead to an older step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch.distributed.checkpoint.metadata import Metadata

from ckpt import catalog
from ckpt.catalog import Candidate, Catalog, Listing
from ckpt.engine.group import Group
from ckpt.engine.planner import Target, compare_keys
from ckpt.engine.reader import ObjectReader
from ckpt.engine.references import Previous
from ckpt.errors import Damaged, Mismatch, NotFound, ObjectMissing, Refused, Unsafe
from ckpt.format.layout import Attempt, Epoch
from ckpt.format.manifest import Manifest
from ckpt.perrank import ranks
from ckpt.proof import compare, first_differences, live_report, wrong_streams
from ckpt.state import State

MAX_FALLS = 2  # older steps that one start may fall back to by itself
T = TypeVar("T")
_log = logging.getLogger("ckpt.load")


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a start restored. ``step`` is 0 and ``attempt`` None on a fresh run.

    ``absent`` are entries that an adopted step lacks: they are as they were built. ``inexact`` are entries that could
    not be restored exactly, each with the reason (see ``ckpt.PerRank``).
    ``skipped`` are (attempt, reason) of newer steps that could not be used; ``rng`` is "restored", "derived" (other
    number of ranks than then) or "fresh"; ``proof`` says which tensors were proven equal to the saved ones by their
    fingerprints; ``seconds`` has the time of each phase on this rank. ``rolled_back`` is the newest step that counted
    before this start went back to ``step`` as it was asked to; None where it was not.
    """

    step: int
    attempt: str | None
    skipped: tuple[tuple[str, str], ...]
    world_then: int | None
    world_now: int
    rng: str
    proof: str = "nothing to prove"
    seconds: dict[str, float] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    rolled_back: int | None = None
    inexact: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.attempt is None:
            return f"fresh run on {ranks(self.world_now)}"
        worlds = (
            f"{ranks(self.world_then)} then, {self.world_now} now"
            if self.world_then is not None and self.world_then != self.world_now
            else ranks(self.world_now)
        )
        lines = [f"resumed step {self.step} ({self.attempt}, {worlds}, random streams {self.rng}, {self.proof})"]
        if self.rolled_back is not None:
            lines.append(f"  rolled back as asked: steps after it, up to {self.rolled_back}, count no longer")
        if self.absent:
            lines.append(f"  not in the step, left as they were built: {', '.join(self.absent)}")
        lines += [f"  not exact: {what}" for what in self.inexact]
        return "\n".join(lines + [f"  skipped {a}: {why}" for a, why in self.skipped])


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a start goes from: the newest valid step, unless zero (``fresh``) or a step (``start``) is asked for.

    What is asked for is done once for a job: a start that finds the same ``request`` in the newest base record is a
    restart, and goes on from what the job has saved since. ``once`` names the job; ``fresh`` without it is done each
    time.
    """

    fresh: bool = False
    start: int | None = None
    once: str = ""

    @property
    def request(self) -> str | None:
        """The same for all starts of one job; None where nothing is asked for, or each time anew."""
        if self.start is not None:
            return f"start={self.start} {self.once}".rstrip()
        return f"fresh {self.once}" if self.fresh and self.once else None


def _modules(manifest: Manifest) -> list[str]:
    """The entries that are modules: those with tensors and without an optimizer's groups."""
    names = {k.split(".")[0] for k in manifest.tensors}
    return sorted(name for name in names if f"{name}.param_groups" not in manifest.values)


NEWEST = Origin()


@dataclass(frozen=True, slots=True)
class _Choice:
    epoch: Epoch | None
    candidate: Candidate | None
    metadata: Metadata | None
    skipped: tuple[tuple[str, str], ...]
    rolled_back: int | None = None
    exact: bool = False
    """Asked for by its number: no other will do."""

    def of(self, entries: Collection[str]) -> _Choice:
        """The same step, as if it held only those entries of a state."""
        assert self.candidate is not None
        assert self.metadata is not None
        manifest = self.candidate.manifest

        def mine(table: Mapping[str, T]) -> dict[str, T]:
            return {k: v for k, v in table.items() if k.split(".")[0] in entries}

        manifest = replace(manifest, tensors=mine(manifest.tensors), values=mine(manifest.values))
        return replace(
            self,
            candidate=replace(self.candidate, manifest=manifest),
            metadata=replace(self.metadata, state_dict_metadata=mine(self.metadata.state_dict_metadata)),
        )


class Loader:
    """Loads steps of one run into a state; every method is called by all ranks."""

    def __init__(
        self, catalog_: Catalog, group: Group, *, deadline_s: float, allow_fallback: bool, proof: bool = True
    ) -> None:
        self.catalog, self.group = catalog_, group
        self.deadline_s, self.proof = deadline_s, proof
        self.max_falls = 10**9 if allow_fallback else MAX_FALLS

    def resume(self, state: State, origin: Origin) -> tuple[Resumed, Epoch, Previous | None]:
        """Claim an epoch, restore the step that ``origin`` means, record the base. See ``Checkpoints.resume``."""
        seconds: dict[str, float] = {}
        mark = time.monotonic()

        def begin(_: list[None]) -> _Choice:
            if origin.start is not None and not self._repeats(origin, listing := self.catalog.listing()):
                self.catalog.resolve(origin.start, listing)  # a step that is not there is refused before any claim
            epoch = catalog.claim(self.catalog.store, world_size=self.group.size)
            return self._begin(epoch, origin, self.catalog.listing())

        choice = self.group.exchange("choose a step", lambda: None, begin, deadline_s=self.deadline_s)
        seconds["choose"] = time.monotonic() - mark
        resumed, choice = self._load(state, choice, seconds, fall_back=not choice.exact)
        base = choice.candidate.attempt if choice.candidate else None
        assert choice.epoch is not None
        own = choice.epoch

        def record(_: list[None]) -> None:
            zero = origin.fresh and base is None
            catalog.write_base(self.catalog.store, own, base, fresh=zero, request=origin.request)

        self.group.exchange("record the base", lambda: None, record, deadline_s=self.deadline_s)
        if choice.candidate is None or choice.metadata is None:
            return resumed, own, None
        return resumed, own, Previous(choice.candidate.attempt, choice.candidate.manifest, choice.metadata)

    def load(self, state: State, step: int | None, *, part: bool = False) -> Resumed:
        """Load a step (None: the newest valid one) without claiming the run. See ``Checkpoints.load``."""
        entries = frozenset(state.entries)

        def begin(_: list[None]) -> _Choice:
            if step is None:
                return self._choose(None, self.catalog.listing(), ())
            candidate = self.catalog.candidate(self.catalog.resolve(step))
            return _Choice(None, candidate, self._metadata(candidate), ())

        choice = self.group.exchange("choose a step", lambda: None, begin, deadline_s=self.deadline_s)
        if choice.candidate is None:
            raise NotFound(f"no committed step at {self.catalog.store.url}")
        if not part:
            return self._load(state, choice, {}, fall_back=step is None)[0]
        held = choice.candidate
        try:
            return self._load(state, choice.of(entries), {}, fall_back=False)[0]
        except Mismatch as e:
            e.facts[:0] = [
                ("step", str(held.attempt.step)),
                ("its modules", ", ".join(_modules(held.manifest)) or "none"),
            ]
            raise

    # --- choosing: on the coordinator -------------------------------------------------------------------------

    def _repeats(self, origin: Origin, listing: Listing) -> bool:
        """Whether the newest start was one of the same job, so that what it asks for is done already."""
        return origin.request is not None and origin.request == self.catalog.request_of(listing)

    def _begin(self, epoch: Epoch, origin: Origin, listing: Listing) -> _Choice:
        """The first choice of a start that owns ``epoch``."""
        repeats = self._repeats(origin, listing)
        if origin.fresh and (not repeats or not self.catalog.counted(listing)):
            return _Choice(epoch, None, None, ())
        if origin.start is None or repeats:
            return self._choose(epoch, listing, ())
        catalog.check_not_superseded(self.catalog.store, epoch, listing.epochs)
        newest = self.catalog.resolve(None, listing).step
        candidate = self.catalog.candidate(self.catalog.resolve(origin.start, listing))
        back = newest if newest > origin.start else None
        return _Choice(epoch, candidate, self._metadata(candidate), (), back, exact=True)

    def _choose(self, epoch: Epoch | None, listing: Listing, skipped: tuple[tuple[str, str], ...]) -> _Choice:
        """The newest usable step whose records and sizes are good; damage found on the way is recorded."""
        if epoch is not None:  # else this start would build on what a newer one has written
            catalog.check_not_superseded(self.catalog.store, epoch, listing.epochs)
        url = self.catalog.store.url
        named = dict(skipped)
        usable = [a for a in self.catalog.choices(listing) if str(a) not in named]
        quarantined = [a for a in self.catalog.counted(listing) if a in listing.quarantined and str(a) not in named]
        newest = usable[0] if usable else None
        skipped += tuple((str(a), "quarantined earlier") for a in quarantined if newest is None or a > newest)
        for attempt in usable:
            try:
                candidate = self.catalog.candidate(attempt)
                return _Choice(epoch, candidate, self._metadata(candidate), skipped)
            except Unsafe:
                raise
            except (Damaged, ObjectMissing) as e:
                if self.catalog.gone(attempt):
                    return self._choose(epoch, self.catalog.listing(), skipped)
                if not isinstance(e, Damaged):
                    raise
                skipped = self._fall(attempt, e, epoch, skipped)
        if not self.catalog.saved_nothing(listing):
            raise NotFound(
                f"{url} holds {len(listing.commits)} committed steps and none can be used; not starting from zero",
                facts=[("skipped", f"{a}: {why}") for a, why in skipped],
                hint=f"ckpt ls {url}   |   fresh=True starts over beside them",
            )
        late = "committed by a start that had been overtaken"
        return _Choice(epoch, None, None, skipped + tuple((str(a), late) for a in sorted(listing.commits)))

    def _metadata(self, candidate: Candidate) -> Metadata:
        return ObjectReader.in_run(self.catalog.store, candidate.attempt.prefix, candidate.manifest).read_metadata()

    def _fall(
        self, attempt: Attempt, error: Damaged, epoch: Epoch | None, skipped: tuple[tuple[str, str], ...]
    ) -> tuple[tuple[str, str], ...]:
        """Record proven damage and count the fall; raises when one start has fallen often enough."""
        _log.warning("step %d is damaged and is skipped: %s", attempt.step, error)
        if epoch is not None:  # only a start that owns an epoch writes into the run
            details = [f"{k}: {v}" for k, v in error.facts]
            catalog.quarantine(self.catalog.store, attempt, error.message, details, epoch)
        skipped = (*skipped, (str(attempt), "; ".join([error.message, *(f"{k} {v}" for k, v in error.facts[:4])])))
        if len(skipped) > self.max_falls:
            raise Refused(
                f"{len(skipped)} steps in a row are damaged; something is wrong with the storage, not with one step",
                facts=[("skipped", f"{a}: {why}") for a, why in skipped],
                hint=f"ckpt validate {self.catalog.store.url} --level full   |   allow_fallback=True goes on",
            ) from error
        return skipped

    # --- reading: on every rank -------------------------------------------------------------------------------

    def _load(
        self, state: State, choice: _Choice, seconds: dict[str, float], *, fall_back: bool = True
    ) -> tuple[Resumed, _Choice]:
        """Restore the chosen step, or an older one where its bytes are damaged; which one it was in the end."""
        size = self.group.size
        mark = time.monotonic()
        while choice.candidate is not None:
            now = choice  # bound for the closures below
            flat: dict[str, object] = {}

            def read(now: _Choice = now, flat: dict[str, object] = flat) -> Damaged | None:
                try:
                    flat |= self._read(state, now)
                except Unsafe:
                    raise  # its bytes are proven: it is no damage, and no reason to go back
                except Damaged as e:
                    return e
                return None

            def judge(found: list[Damaged | None], now: _Choice = now) -> _Choice:
                bad = [(r, e) for r, e in enumerate(found) if e is not None]
                if not bad:
                    return now
                error = bad[0][1]
                error.facts = [*error.facts, ("found by", "rank " + ", ".join(str(r) for r, _ in bad))]
                assert now.candidate is not None
                attempt = now.candidate.attempt
                gone = self.catalog.gone(attempt)
                if gone and not fall_back:
                    raise NotFound(f"step {attempt.step} was deleted by retention while it was read") from error
                if not fall_back:
                    raise error
                skipped = now.skipped if gone else self._fall(attempt, error, now.epoch, now.skipped)
                return self._choose(now.epoch, self.catalog.listing(), skipped)

            choice = self.group.exchange("read and verify", read, judge, deadline_s=self.deadline_s)
            if (
                choice.candidate is not None
                and now.candidate is not None
                and choice.candidate.attempt == now.candidate.attempt
            ):
                break
        if choice.candidate is None:
            return Resumed(0, None, choice.skipped, None, size, "fresh", seconds=seconds), choice
        seconds["read"] = time.monotonic() - mark
        attempt, manifest = choice.candidate.attempt, choice.candidate.manifest
        then = manifest.world_size
        mark = time.monotonic()

        def apply() -> str:
            return state.apply(dict(flat), step=attempt.step, rank=self.group.rank, world_then=then, world_now=size)

        rng = self.group.exchange("apply", apply, lambda all_ranks: all_ranks[0], deadline_s=self.deadline_s)
        seconds["apply"] = time.monotonic() - mark
        mark = time.monotonic()
        proof = "not verified (switched off)"
        if self.proof:
            proof = self._prove(state, choice)
            seconds["prove"] = time.monotonic() - mark
        done = Resumed(attempt.step, str(attempt), choice.skipped, then, size, rng, proof, seconds, state.absent,
                       choice.rolled_back, state.inexact)  # fmt: skip
        for what in done.inexact if self.group.rank == 0 else ():
            _log.warning("not exact: %s", what)
        return done, choice

    def _prove(self, state: State, choice: _Choice) -> str:
        """Compare fingerprints over all ranks; where some differ, every rank looks what it holds of them."""
        assert choice.candidate is not None
        assert choice.metadata is not None
        rank, manifest, metadata = self.group.rank, choice.candidate.manifest, choice.metadata
        reader = ObjectReader.in_run(self.catalog.store, choice.candidate.attempt.prefix, manifest)
        reader.set_up_storage_reader(metadata, rank == 0)
        same_world = manifest.world_size == self.group.size
        compared = self.group.exchange(
            "prove",
            lambda: (live_report(state, rank), wrong_streams(state, rank, reader) if same_world else []),
            lambda found: compare(manifest, [report for report, _ in found], [streams for _, streams in found]),
            deadline_s=self.deadline_s,
        )
        if compared.differing or compared.streams:

            def refuse(found: list[list[str]]) -> None:
                raise compared.refusal(found)

            self.group.exchange(
                "compare again",
                lambda: first_differences(state, rank, compared.differing, reader),
                refuse,
                deadline_s=self.deadline_s,
            )
        return str(compared)

    def _read(self, state: State, choice: _Choice) -> dict[str, object]:
        assert choice.candidate is not None
        assert choice.metadata is not None
        flat, left_out = state.target(choice.candidate.manifest, self.group.rank, self.group.size)
        compare_keys(flat, choice.metadata, left_out)
        # what nobody needs on this number of ranks is verified all the same: a resumed step is good as a whole
        checked_only = sorted(left_out)[self.group.rank :: self.group.size]
        flat |= dict.fromkeys(checked_only)
        planner = Target(flat)
        planner.set_up_planner(flat, choice.metadata, self.group.rank == 0)
        reader = ObjectReader.in_run(self.catalog.store, choice.candidate.attempt.prefix, choice.candidate.manifest)
        reader.set_up_storage_reader(choice.metadata, self.group.rank == 0)
        reader.read(planner.finish_plan(planner.create_local_plan()), planner)
        return {k: v for k, v in planner.flat.items() if k not in checked_only}
