"""A reader stands still at any call while a start resumes, saves and deletes old steps: it finds the old or the new."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ckpt import catalog
from ckpt.catalog import Catalog, Listing
from ckpt.checkpoints import Checkpoints
from ckpt.engine.group import Alone
from ckpt.format import layout
from ckpt.format.layout import Attempt, parse_attempt
from tests.crash.histories import SCENARIOS, Bench, Scenario, laboratory, start
from tests.crash.jobs import Content, number_of
from tests.crash.world import Fault, FaultStore, World

Read = Callable[[Checkpoints], Attempt | None]


@pytest.fixture(autouse=True)
def lab() -> Iterator[None]:
    with laboratory():
        yield


def newest_valid(run: Checkpoints) -> Attempt | None:
    name = run.newest_valid()
    return parse_attempt(name) if name else None


def load(run: Checkpoints) -> Attempt | None:
    content = Content()
    loaded = run.load(content.state)
    assert loaded.skipped == ()
    (number,) = content.numbers()
    assert number_of(number)[1] == loaded.step
    return parse_attempt(loaded.attempt or "")


def marks_last(self: Catalog) -> Listing:
    store = self.store
    commits = catalog.attempts_in(store, layout.COMMITS)
    epochs = [p for e in store.list(layout.EPOCHS) if (p := layout.parse_epoch_key(e.key))]
    return Listing(
        commits, frozenset(e for e, base in epochs if not base), frozenset(e for e, base in epochs if base),
        catalog.attempts_in(store, layout.QUARANTINE), catalog.attempts_in(store, layout.RETIRE),
    )  # fmt: skip


def read(world: World, how: Read, fault: Fault | None = None, pause: Callable[[], None] | None = None):  # type: ignore[no-untyped-def]
    store = FaultStore(world, 0, fault, pause)
    run = Checkpoints(store, Alone(), keep=None, deadline_s=1, grace_s=0, allow_fallback=False)
    return how(run), store


@pytest.mark.parametrize("saves", [1, 3])
@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s.steps and not s.damage], ids=lambda s: s.name)
@pytest.mark.parametrize("how", [newest_valid, load])
def test_a_reader_finds_the_old_step_or_a_new_one(how: Read, scenario: Scenario, saves: int) -> None:
    prepared = Bench().prepared(scenario, 1)
    old, store = read(prepared.world.fork(), how)
    assert old == prepared.world.truth.line()[0]
    for point in store.trace:
        for page in range(point.pages + 1):
            world = prepared.world.fork()

            def pause(world: World = world) -> None:
                assert not start(world, scenario, 2, 1, saves=saves).run().errors

            found, paused = read(world, how, Fault(point, "pause", page=page), pause)
            assert paused.struck
            new = world.truth.line()[: saves + 1]
            assert found in new, f"at {point}, page {page}"


def test_marks_listed_after_commits_would_hide_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Catalog, "listing", marks_last)
    monkeypatch.setattr(Catalog, "choices", Catalog.usable)
    with pytest.raises(AssertionError, match="at rank 0, call"):
        test_a_reader_finds_the_old_step_or_a_new_one(newest_valid, SCENARIOS[2], 3)
