"""Which steps count: ``catalog.counted`` against what truly happened, and the histories that break weaker rules.

A *ghost* remembers every commit with its parent for ever; what counts must be the ancestors of what the newest
epoch with a base has done, whatever stale writers commit and however often a run is rolled back.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import catalog, retention
from ckpt.catalog import Catalog, counted
from ckpt.errors import Damaged, NotFound, Superseded
from ckpt.format.layout import Attempt, Epoch
from ckpt.format.manifest import Base, Manifest, Mark, dump
from ckpt.policy import Latest
from ckpt.retention import plan_retention
from ckpt.store import open_store
from ckpt.store.contract import Store

# --- the rule, against the truth ------------------------------------------------------------------------------


@dataclass
class Ghost:
    """What happened, with nothing forgotten."""

    parents: dict[Attempt, Attempt | None] = field(default_factory=dict)
    bases: dict[Epoch, Attempt | None] = field(default_factory=dict)
    tips: dict[Epoch, Attempt | None] = field(default_factory=dict)

    def line(self) -> list[Attempt]:
        """Ancestors of what the newest epoch with a base has done, newest first."""
        if not self.bases:
            return []
        at, out = self.tips[max(self.bases)], []
        while at is not None:
            out.append(at)
            at = self.parents[at]
        return out


@st.composite
def histories(draw: st.DrawFn) -> Ghost:
    """Starts, roll-backs and commits of old and new writers in any order."""
    ghost = Ghost()
    claims = 0
    for _ in range(draw(st.integers(1, 14))):
        if not ghost.bases or draw(st.integers(0, 2)) == 0:
            claims += draw(st.integers(1, 2))  # some claims never get a base
            epoch = Epoch(claims, draw(st.sampled_from(["", "0000000a", "0000000b"])))
            base = draw(st.sampled_from([None, *ghost.line()]))
            ghost.bases[epoch] = ghost.tips[epoch] = base
        else:
            epoch = draw(st.sampled_from(sorted(ghost.bases)))
            tip = ghost.tips[epoch]
            again = tip is not None and tip.epoch == epoch and draw(st.integers(0, 3)) == 0
            if again and tip is not None:
                new = Attempt(tip.step, epoch, tip.counter + 1)
            else:
                new = Attempt((tip.step if tip else 0) + draw(st.integers(1, 3)), epoch, draw(st.integers(0, 1)))
            ghost.parents[new], ghost.tips[epoch] = tip, new
    return ghost


@settings(max_examples=400)
@given(histories())
def test_what_counts_is_the_line_of_the_newest_base(ghost: Ghost) -> None:
    line = ghost.line()
    assert counted(ghost.parents.keys(), ghost.bases.keys(), ghost.bases.__getitem__) == line
    # retention has taken some: the rest still counts, in the same order
    left = [a for a in ghost.parents if hash((a.step, a.epoch.number)) % 3]
    kept = [a for a in line if a in left]
    assert counted(left, ghost.bases.keys(), ghost.bases.__getitem__) == kept


@given(histories())
def test_no_step_twice_unless_saved_again(ghost: Ghost) -> None:
    line = counted(ghost.parents.keys(), ghost.bases.keys(), ghost.bases.__getitem__)
    assert [a.step for a in line] == sorted((a.step for a in line), reverse=True)
    assert len(set(line)) == len(line)


def test_commits_of_an_epoch_at_or_below_its_base_do_not_count() -> None:
    """No writer makes them; a reader that met them would go back behind the step on which the epoch builds."""
    base, below, at = Attempt(20, Epoch(1)), Attempt(10, Epoch(2)), Attempt(20, Epoch(2))
    above = Attempt(30, Epoch(2))
    bases = {Epoch(1): None, Epoch(2): base}
    assert counted([base, below, at, above], bases.keys(), bases.__getitem__) == [above, base]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), unique=True), st.integers(1, 5))
def test_retention_keeps_the_newest_attempt_of_each_of_the_newest_steps(
    saves: list[tuple[int, int]], keep: int
) -> None:
    usable = [Attempt(s, Epoch(1), c) for s, c in sorted(saves, reverse=True)]
    left = [a for a in usable if a not in plan_retention(usable, Latest(keep))]
    newest_of_each = [a for a in usable if a == max(b for b in usable if b.step == a.step)]
    assert left == newest_of_each[:keep]


# --- the histories, with the real parts -----------------------------------------------------------------------


class Job:
    """One start of a run: claims, chooses, writes its base, saves steps ten apart."""

    def __init__(self, store: Store, *, back: int = 0) -> None:
        self.store = store
        self.epoch = catalog.claim(store, world_size=1)
        self.back = back
        self.at: Attempt | None = None

    def choose(self) -> Job:
        usable = Catalog(self.store).usable(Catalog(self.store).listing())
        self.at = usable[self.back] if len(usable) > self.back else None
        return self

    def base(self) -> Job:
        catalog.write_base(self.store, self.epoch, self.at)
        return self

    def write(self) -> tuple[Attempt, bytes]:
        attempt = Attempt((self.at.step if self.at else 0) + 10, self.epoch)
        manifest = dump("manifest", Manifest(
            step=attempt.step, attempt=str(attempt), created="2026-11-30T00:00:00Z", world_size=1, objects=(),
            tensors={}, values={}))  # fmt: skip
        return attempt, manifest

    def save(self) -> Attempt:
        attempt, manifest = self.write()
        catalog.commit(self.store, attempt, self.at, manifest, 0)
        self.at = attempt
        return attempt

    def retire(self, keep: int) -> list[Attempt]:
        return retention.retire(Catalog(self.store), self.epoch, Latest(keep), grace_s=0)


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


def steps(store: Store) -> list[int]:
    found = Catalog(store)
    return [a.step for a in found.usable(found.listing())]


def test_a_run_and_its_restarts(store: Store) -> None:
    first = Job(store).choose().base()
    first.save(), first.save()
    second = Job(store).choose().base()
    second.save()
    assert steps(store) == [30, 20, 10]
    assert Catalog(store).resolve().epoch == second.epoch


def test_a_claim_alone_changes_nothing_for_readers(store: Store) -> None:
    job = Job(store).choose().base()
    job.save()
    Job(store), Job(store)
    assert steps(store) == [10]
    with pytest.raises(Superseded):
        job.save()
    assert steps(store) == [10]


def test_a_commit_that_lands_after_the_choice_is_never_chosen(store: Store) -> None:
    old = Job(store).choose().base()
    old.save()
    attempt, manifest = old.write()
    new = Job(store).choose().base()
    # the old writer passed its first fence before the claim: its commit record lands, its second fence stops it
    store.put(attempt.prefix + "manifest.json", [manifest])
    store.put_if_absent(attempt.commit_key, b"{}")
    assert steps(store) == [10]
    assert new.save().step == 20
    assert [str(a) for a in Catalog(store).counted(Catalog(store).listing())] == [
        str(new.at),
        str(Attempt(10, old.epoch)),
    ]
    listing = Catalog(store).listing()
    assert catalog.describe_state(attempt, listing, Catalog(store).counted(listing), {}) == "unknown"


def test_the_fence_before_the_commit_stops_a_stale_writer(store: Store) -> None:
    old = Job(store).choose().base()
    old.save()
    Job(store)
    with pytest.raises(Superseded):
        old.save()
    assert len(Catalog(store).listing().commits) == 1


def test_a_step_is_not_reported_when_a_claim_came_between(store: Store) -> None:
    old = Job(store).choose().base()

    class Late:
        """The store of the old writer: a new start claims just before its commit record is put."""

        url = store.url

        def put_if_absent(self, key: str, data: bytes) -> bool:
            if key.startswith("commits/"):
                Job(store)
            return store.put_if_absent(key, data)

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

    old.store = Late()
    with pytest.raises(Superseded):
        old.save()
    assert len(Catalog(store).listing().commits) == 1  # it is there, and the next start may find it
    assert steps(store) == [10]


def test_rolled_back_branches_are_never_chosen_again(store: Store) -> None:
    first = Job(store).choose().base()
    for _ in range(3):
        first.save()
    second = Job(store, back=2).choose().base()  # back to 10
    assert steps(store) == [10]
    second.save()
    third = Job(store, back=1).choose().base()  # back to 10 again: 20 of the second branch is off the line too
    assert steps(store) == [10]
    third.save(), third.save()
    found = Catalog(store).usable(Catalog(store).listing())
    assert [(a.step, a.epoch) for a in found] == [(30, third.epoch), (20, third.epoch), (10, first.epoch)]


def test_rolling_back_over_several_epochs(store: Store) -> None:
    """The smallest-step rule would let 20 of the first branch count again; following attempts does not."""
    first = Job(store).choose().base()
    first.save(), first.save()  # 10, 20
    second = Job(store, back=1).choose().base()  # on 10
    second.save(), second.save()  # 20', 30'
    third = Job(store, back=1).choose().base()  # on 20'
    found = Catalog(store).usable(Catalog(store).listing())
    assert [(a.step, a.epoch) for a in found] == [(20, second.epoch), (10, first.epoch)]
    assert third.at == found[0]


def test_a_fresh_start_beside_old_steps(store: Store) -> None:
    Job(store).choose().base().save()
    fresh = Job(store).base()
    assert steps(store) == []
    fresh.save()
    assert [a.epoch for a in Catalog(store).usable(Catalog(store).listing())] == [fresh.epoch]


def test_retention_of_a_superseded_writer_deletes_nothing(store: Store) -> None:
    old = Job(store).choose().base()
    for _ in range(3):
        old.save()
    Job(store)
    with pytest.raises(Superseded):
        old.retire(1)
    assert len(Catalog(store).listing().commits) == 3


def test_a_base_on_a_step_that_is_being_retired_voids_the_retirement(store: Store) -> None:
    old = Job(store).choose().base()
    for _ in range(2):
        old.save()
    back = Job(store, back=1).choose()  # has chosen 10, has not said so yet
    # the old writer marked 10 before the claim: it may delete only after it has looked at the epochs
    mark = Mark(
        attempt=str(Attempt(10, old.epoch)), reason="keep", epoch=str(old.epoch), created="2026-11-30T00:00:00Z"
    )
    store.put(Attempt(10, old.epoch).retire_key, [dump("mark", mark)])
    assert steps(store) == [20]
    back.base()
    assert steps(store) == [10]
    with pytest.raises(Superseded):
        old.retire(1)
    assert back.retire(1) == []  # it clears the void mark and keeps the step it builds on
    assert not Catalog(store).listing().retiring
    assert back.save().step == 20
    assert steps(store) == [20, 10]


def test_a_retired_step_is_not_chosen_even_before_it_is_deleted(store: Store) -> None:
    job = Job(store).choose().base()
    for _ in range(3):
        job.save()
    assert retention.retire(Catalog(store), job.epoch, Latest(1), grace_s=3600) == []
    assert steps(store) == [30]
    assert store.list("steps/000000000010/")
    assert len(retention.retire(Catalog(store), job.epoch, Latest(1), grace_s=0)) == 2
    assert not store.list("steps/000000000010/")


def test_quarantined_steps_are_skipped_and_stay_named(store: Store) -> None:
    job = Job(store).choose().base()
    job.save()
    bad = job.save()
    catalog.quarantine(store, bad, "a bit", ["block 3"], job.epoch)
    assert steps(store) == [10]
    listing = Catalog(store).listing()
    assert catalog.describe_state(bad, listing, Catalog(store).counted(listing), {}) == "damaged"


@pytest.mark.parametrize("named", ["000000000020-e00000002-0", "000000000020-e00000009-0", "nonsense"])
def test_a_base_that_no_older_epoch_can_have_written_is_damage(named: str, store: Store) -> None:
    Job(store).choose().base().save()
    second = Job(store)
    store.put(
        second.epoch.base_key,
        [dump("base", Base(epoch=str(second.epoch), attempt=named, created="2026-11-30T00:00:00Z"))],
    )
    with pytest.raises(Damaged, match="no older epoch"):
        Catalog(store).counted(Catalog(store).listing())


def test_nothing_there_is_said_in_two_ways(store: Store) -> None:
    with pytest.raises(NotFound, match="no committed step"):
        Catalog(store).resolve()
    Job(store).choose().base().save()
    with pytest.raises(NotFound, match="step 7 is not a usable step"):
        Catalog(store).resolve(7)


def test_a_manifest_of_another_attempt_is_no_candidate(store: Store) -> None:
    job = Job(store).choose().base()
    job.save()
    _, other = job.write()
    attempt = Attempt(10, job.epoch, 1)
    catalog.commit(store, attempt, None, other, 0)
    with pytest.raises(Damaged, match="another attempt"):
        Catalog(store).candidate(attempt)
