"""The handshake over a real store, ranks as threads."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product

import pytest
import torch.distributed as dist

import elastic
from ckpt.errors import RankFailed, Refused, Superseded
from elastic import membership
from elastic.membership import join


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def start(pool: ThreadPoolExecutor, store: dist.Store, rank: int, world: int, timeout_s: float = 20) -> Future[str]:
    return pool.submit(join, store, rank, world, timeout_s=timeout_s)


def test_all_ranks_of_a_generation_get_one_token_and_the_next_generation_another(store: dist.Store) -> None:
    tokens = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [0]):
        with ThreadPoolExecutor(4) as pool:
            here = {f.result() for f in [start(pool, store, r, len(order)) for r in order]}
        assert len(here) == 1
        tokens += here
    assert len(set(tokens)) == 3


@pytest.mark.parametrize("late", [0.0, 0.15])
def test_ranks_that_read_the_token_of_the_dead_generation_join_the_new_one(store: dist.Store, late: float) -> None:
    with ThreadPoolExecutor(4) as pool:
        old = {f.result() for f in [start(pool, store, r, 4) for r in range(4)]}
        followers = [start(pool, store, r, 4) for r in (3, 1, 2)]
        time.sleep(late)  # they have joined the dead generation by now
        new = {f.result() for f in [start(pool, store, 0, 4), *followers]}
    assert len(old) == len(new) == 1
    assert old != new


def test_an_answer_is_for_the_process_that_joined_not_for_its_predecessor(store: dist.Store) -> None:
    with ThreadPoolExecutor(4) as pool:
        token = {f.result() for f in [start(pool, store, r, 2) for r in range(2)]}.pop()
        orphan = start(pool, store, 1, 2, timeout_s=0.5)  # a new rank 1, while rank 0 of its generation never comes
        with pytest.raises(RankFailed, match="rank 0 of 2 did not come"):
            orphan.result()
    assert store.get("leader").decode() == token


def test_missing_ranks_are_named_on_every_rank(store: dist.Store) -> None:
    with ThreadPoolExecutor(4) as pool:
        # the leader's time is over first, and it tells the others who is missing
        here = [start(pool, store, 0, 5, timeout_s=0.4), *(start(pool, store, r, 5, timeout_s=30) for r in (1, 3))]
        for future in here:
            with pytest.raises(RankFailed, match="rank 2, 4 of 5 did not come"):
                future.result()


def test_a_replaced_rank_0_stops(store: dist.Store) -> None:
    with ThreadPoolExecutor(4) as pool:
        stale = start(pool, store, 0, 3)
        time.sleep(0.1)
        followers = [start(pool, store, r, 3) for r in range(3)]
        with pytest.raises(Superseded):
            stale.result()
        assert len({f.result() for f in followers}) == 1


def test_worlds_of_different_size_do_not_mix(store: dist.Store) -> None:
    with ThreadPoolExecutor(4) as pool:
        stale = start(pool, store, 1, 3, timeout_s=0.6)  # of a world of three that is no more
        with pytest.raises(RankFailed, match="rank 1 of 2 did not come"):
            start(pool, store, 0, 2, timeout_s=0.3).result()
        with pytest.raises(RankFailed):
            stale.result()


def test_alone_nothing_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "RANK", "WORLD_SIZE", "MASTER_")):
            monkeypatch.delenv(name)
    elastic.init()
    assert not dist.is_initialized()
    assert membership.rank_and_world() == (0, 1)
    assert membership.generation() is None


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, world in product(("RANK", "WORLD_SIZE"), ("1", "8")):
        monkeypatch.delenv("RANK", raising=False)
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        monkeypatch.setenv(name, world)
        with pytest.raises(Refused, match=r"MASTER_ADDR, MASTER_PORT is not set"):
            elastic.init()


def test_tasks_of_srun_that_would_train_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    with pytest.raises(Refused, match="srun started 8 tasks"):
        elastic.init()
