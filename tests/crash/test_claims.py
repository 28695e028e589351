"""Starts that race for an epoch, at every interleaving of their calls, with a conditional put and without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ckpt import catalog
from ckpt.format.layout import Epoch
from ckpt.store import conditional_put_works
from ckpt.store.memory import MemoryStore
from tests.crash.explore import Explorer, Scripted, State
from tests.crash.histories import laboratory


def claims(store: Scripted, told: list[Any]) -> None:
    told.append(catalog.claim(store, world_size=1))


def wrong(state: State) -> str | None:
    got: dict[int, Epoch] = {n: p.told[0] for n, p in enumerate(state.places) if p.ended}
    if len(set(got.values())) != len(got):
        return f"two starts hold one epoch: {got}"
    if late := [(i, j) for i, j in state.order if j in got and not got[j] > got[i]]:
        return f"a start that began after another had ended does not outrank it: {late} {got}"
    if missing := [e for e in got.values() if e.claim_key not in dict(state.objects)]:
        return f"{missing[0]} is held and not recorded"
    return None


@pytest.mark.parametrize("conditional", [True, False], ids=["conditional put", "condition ignored"])
@pytest.mark.parametrize("starts", [2, 3])
def test_no_two_starts_hold_one_epoch(starts: int, conditional: bool) -> None:
    explorer = Explorer([claims] * starts, wrong, conditional)
    with laboratory() as patch:
        patch.setattr(catalog, "conditional_put_works", lambda _: conditional)
        patch.setattr(catalog, "secrets", SimpleNamespace(token_hex=lambda n: f"{explorer.running + 1:0{2 * n}x}"))
        assert explorer.run(State(frozenset())) is None
    print(f"{starts} starts, conditional {conditional}: {explorer.states} states")


@pytest.mark.parametrize("broken", ["won when lost", "no random id"])
def test_a_weaker_claim_is_found(broken: str) -> None:
    conditional = broken == "won when lost"
    explorer = Explorer([claims] * 2, wrong, conditional)
    with laboratory() as patch:
        patch.setattr(catalog, "conditional_put_works", lambda _: True)
        patch.setattr(catalog, "secrets", SimpleNamespace(token_hex=lambda n: f"{explorer.running + 1:0{2 * n}x}"))
        if conditional:
            patch.setattr(Scripted, "put_if_absent", lambda self, key, data: self._call("create", key, data) or True)
        found = explorer.run(State(frozenset()))
    assert found is not None
    assert "one epoch" in found
    print(f"{broken}: {found}")


def test_a_store_that_ignores_the_condition_is_found_out() -> None:
    assert conditional_put_works(MemoryStore("memory://conditional"))
    assert not conditional_put_works(MemoryStore("memory://not conditional", conditional_put=False))
