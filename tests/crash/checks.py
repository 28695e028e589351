"""What must be true of a run's storage after any history, as a reader who comes now would find it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from ckpt import retention
from ckpt.catalog import Catalog
from ckpt.checkpoints import Checkpoints
from ckpt.engine.group import Alone
from ckpt.errors import CkptError, NotFound, RankFailed, StorageError, Superseded
from ckpt.format import layout
from ckpt.format.layout import Attempt, Epoch, parse_attempt
from tests.crash.jobs import Content, Job, number_of
from tests.crash.world import Died, World

EXPECTED = (Died, RankFailed, StorageError, Superseded)  # how a job may end whose storage or process failed


@dataclass(slots=True)
class Checker:
    """Follows one history and collects what it violates."""

    world: World
    keep: int
    damaged: set[Attempt] = field(default_factory=set)
    absent: set[Attempt] = field(default_factory=set)  # of the damaged ones those of which an object is missing
    survivor: Attempt | None = None  # damage struck in mid-history: the newest step that was good and usable then
    old: frozenset[Attempt] = frozenset()  # what had been committed by then
    reported: dict[Attempt, int] = field(default_factory=dict)
    owners: dict[Epoch, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def key(self) -> Hashable:
        """Equal for checkers that would judge alike."""
        known = frozenset(self.reported.items()), frozenset(self.owners.items())
        return self.keep, frozenset(self.damaged), self.survivor, self.old, known

    def copy(self) -> Checker:
        return replace(self, damaged=set(self.damaged), reported=dict(self.reported), owners=dict(self.owners),
                       violations=[])  # fmt: skip

    def take(self, other: Checker, found: list[str]) -> None:
        """Know what another checker knew after it had found this."""
        self.damaged, self.survivor, self.old = other.damaged, other.survivor, other.old
        self.reported, self.owners = other.reported, other.owners
        self.violations += found

    def before(self) -> bool:
        """Whether there is anything to resume, as a start that begins now must find."""
        return bool(self.world.truth.line())

    def can_resume(self) -> bool:
        """Whether a good step is left at all: with ``keep`` 1, damage to the newest step may leave none."""
        if not self.damaged or not self.before():
            return True
        catalog = Catalog(self.world.store)
        try:
            return any(a not in self.damaged for a in catalog.usable(catalog.listing()))
        except CkptError:
            return True

    def rots(self, attempt: Attempt) -> None:
        """Damage strikes a step in mid-history; what a start can fall back to is what was usable at that moment."""
        self.damaged.add(attempt)
        self.old = frozenset(self.world.truth.commits)
        catalog = Catalog(self.world.store)
        usable = catalog.usable(catalog.listing())
        self.survivor = next((a for a in usable if a not in self.damaged), None)

    def ran(self, job: Job, *, had_steps: bool, undisturbed: bool, can_resume: bool = True,
            also: tuple[type[Exception], ...] = ()) -> None:  # fmt: skip
        """Judge how a job went: what it restored, and whether one that nothing disturbed did all of its work."""
        who = f"start {job.number}"
        self.reported |= job.reported
        for o in job.outcomes:
            if o.resumed is None or o.epoch is None:
                continue
            epoch = layout.parse_epoch_key(f"{layout.EPOCHS}{o.epoch[1:]}.json")
            assert epoch is not None
            if self.owners.setdefault(epoch[0], job.number) != job.number:
                self._bad(f"{who} has epoch {o.epoch}, which start {self.owners[epoch[0]]} has too")
            if o.resumed.attempt is None and had_steps:
                self._bad(f"{who} began from zero and there were steps")
            if o.resumed.attempt is not None:
                attempt = parse_attempt(o.resumed.attempt)
                assert attempt is not None
                self._content(who, attempt, o.loaded)
        for e in job.errors:
            if undisturbed and not (isinstance(e, NotFound) and not can_resume):
                self._bad(f"{who}, which nothing disturbed, failed: {type(e).__name__}: {e}")
            elif not isinstance(e, (*EXPECTED, *((NotFound,) if not can_resume else ()), *also)):
                self._bad(f"{who} failed with {type(e).__name__}: {e}")

    def look(self, when: str) -> None:
        """Judge the storage as a reader finds it."""
        try:
            self._look(when)
        except CkptError as e:
            self._bad(f"{when}: a reader fails: {type(e).__name__}: {e}")

    def _look(self, when: str) -> None:
        store, line = self.world.store, self.world.truth.line()
        catalog = Catalog(store)
        usable = catalog.usable(catalog.listing())
        if off := [a for a in usable if a not in line]:
            self._bad(f"{when}: {off[0]} counts and is not what the newest start builds on")
        if torn := [a for a in usable if a in self.world.truth.collected]:
            self._bad(f"{when}: {torn[0]} counts, and its data were deleted before it was committed")
        if odd := [e for e, base in self.world.truth.bases.items() if base is not None and base.epoch >= e]:
            self._bad(f"{when}: the base record of {odd[0]} names a step of a newer start")
        if lost := [a for a in self.reported if a not in line and a not in self.damaged]:
            self._bad(f"{when}: {lost[0]} was reported committed and does not count")
        window = self._to_keep(line)
        if lost := [a for a in window if a not in usable]:
            self._bad(f"{when}: {lost[0]} was committed, is to be kept and cannot be used")
        whole = []
        for a in usable:
            if a in self.damaged:
                continue
            try:
                catalog.candidate(a)
                whole.append(a)
            except CkptError as e:  # but for a commit record that a late retry wrote again after the deletion
                if a in window or store.list(a.prefix):
                    self._bad(f"{when}: {a} counts and is torn: {e}")
        reader = Checkpoints(store, Alone(), keep=None, deadline_s=1.0, grace_s=0.0, allow_fallback=True)
        newest = reader.newest_valid()
        if newest is None and window:
            self._bad(f"{when}: there is no valid step")
        if newest is not None and (bad := self._misplaced(newest, line, window)):
            self._bad(f"{when}: the newest valid step {newest} is {bad}")
        for a in whole[: self.keep + 1]:
            content = Content()
            reader.load(content.state, None if a is whole[0] else a.step)
            if a is whole[0] or [b.step for b in whole].count(a.step) == 1:
                self._content(when, a, content.numbers())

    def _to_keep(self, line: list[Attempt]) -> list[Attempt]:
        """The attempts that must be usable: the newest of each of the newest ``keep`` steps."""
        newest = {a.step: a for a in reversed(line)}  # of one step the newest attempt is the first in the line
        window = [a for a in line if newest[a.step] is a][: self.keep]
        if self.old:  # what was older than the damaged step may have been retired rightly
            good = [a for a in line if a not in self.damaged]
            window = [a for a in good[:1] if a == self.survivor or a not in self.old]
        return [a for a in window if a not in self.damaged]

    def _misplaced(self, newest: str, line: list[Attempt], window: list[Attempt]) -> str | None:
        attempt = parse_attempt(newest)
        assert attempt is not None
        if attempt.quarantine_key in self.world.store.objects:
            return "in quarantine"
        if attempt in self.absent:
            return "without an object that it needs"
        if attempt not in line:
            return "not of the newest start's line"
        newer = [a for a in line[: line.index(attempt)] if a not in self.damaged]
        if newer and not (self.old and newer[0] not in window):
            return f"older than {newer[0]}"
        return None

    def _content(self, when: str, attempt: Attempt, numbers: set[int]) -> None:
        if len(numbers) != 1:
            self._bad(f"{when}: {attempt} is a mix of {sorted(map(number_of, numbers))}")
            return
        (number,) = numbers
        start, step = number_of(number)
        owner = self.owners.get(attempt.epoch, start)
        if step != attempt.step or owner != start or self.reported.get(attempt, number) != number:
            self._bad(f"{when}: {attempt} holds what start {start} saved as step {step}")

    def tidy(self, *, grace: bool) -> None:
        """After a whole job that retained: no more steps than are to be kept, and no data that nobody finished."""
        if self.violations:
            return
        catalog = Catalog(self.world.store)
        if len(usable := catalog.usable(catalog.listing())) > self.keep:
            self._bad(f"{len(usable)} steps are kept, {self.keep} should be")
        listing, keys = catalog.listing(), [e.key for e in self.world.store.list(layout.STEPS)]
        held = retention.held(catalog.needs(listing.commits)).keys()
        data = {a for k in keys if (a := layout.parse_step_key(k))}
        if not grace and (idle := listing.retiring - listing.commits - held):
            self._bad(f"the data of {min(idle)} are kept, which nobody refers to")
        if left := data - listing.commits - listing.retiring:
            self._bad(f"the data of {min(left)} are left, which nobody finished")

    def _bad(self, what: str) -> None:
        self.violations.append(what)
