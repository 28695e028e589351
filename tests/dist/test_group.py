"""Exchanges between real processes: answers, errors with names, deadlines, a killed rank."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.engine.group import Alone, Scattered, current_group
from ckpt.errors import Damaged, RankFailed, Refused
from tests.dist import gpt
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist


def answers() -> list[Any]:
    group = current_group()
    me = group.rank
    same = [group.exchange("sum", lambda n=n: me + n, sum, deadline_s=20) for n in range(5)]
    own = group.exchange("square", lambda: me, lambda ranks: Scattered(r * r for r in ranks), deadline_s=20)
    side = group.channel("side").exchange("max", lambda: me, max, deadline_s=20)
    left = dist.group.WORLD.get_group_store().num_keys()
    return [same, own, side, left]


def test_every_rank_gets_the_answer() -> None:
    for rank, (same, own, side, _) in enumerate(run_ranks(3, answers)):
        assert same == [3, 6, 9, 12, 15]
        assert own == rank * rank
        assert side == 2


def test_a_group_of_one_needs_no_process_group() -> None:
    group = current_group()
    assert isinstance(group, Alone)
    assert group.exchange("x", lambda: 4, lambda r: Scattered(r), deadline_s=1) == 4


def errors() -> list[str]:
    group = current_group()
    me = group.rank

    def bad() -> None:
        if me in (1, 2):
            raise KeyError(f"from {me}")

    def damaged() -> None:
        if me == 2:
            raise Damaged("wrong bytes", facts=[("object", "x")])

    def decide(_: list[None]) -> None:
        raise Refused("no")

    out = []
    for local, final in ((bad, len), (damaged, len), (lambda: None, decide)):
        try:
            group.exchange("try", local, final, deadline_s=20)
            out.append("no error")
        except ckpt.CkptError as e:
            out.append(f"{type(e).__name__}: {e}")
    return out


def test_an_error_reaches_every_rank_with_names() -> None:
    for first, second, third in run_ranks(3, errors):
        assert first.startswith("RankFailed")
        assert "rank 1 failed: KeyError: 'from 1'" in first
        assert "reported by  ranks 1, 2" in first
        assert second.startswith("Damaged")
        assert "reported by  rank 2" in second
        assert third.startswith("Refused")


def silent() -> tuple[str, float]:
    group = current_group()
    if group.rank == 2:
        time.sleep(4)
        return "late", 0.0
    began = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        group.exchange("meet", lambda: None, len, deadline_s=1.5)
    return str(caught.value), time.monotonic() - began


def test_a_silent_rank_is_named_at_the_deadline() -> None:
    for text, took in run_ranks(3, silent)[:2]:
        assert "no word from rank 2 within 2 s" in text
        assert took < 3.5


def killed_while_saving(url: str) -> tuple[str, float] | None:
    model, optim, sched = gpt.build((3,), seed=1)
    state = ckpt.State(model=model, optim=optim, sched=sched)
    store = ckpt.open(url, deadline_s=3)
    store.resume(state)
    gpt.train(model, optim, sched, 1)
    store.save(1, state).wait()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        store.save(2, state).wait()
    return str(caught.value), time.monotonic() - began


def test_a_rank_killed_in_mid_save_is_named_and_the_last_step_stays(tmp_path: Any) -> None:
    results = run_ranks(3, killed_while_saving, str(tmp_path / "run"))
    for result in (results[0], results[2]):
        text, took = result
        assert "no word from rank 1 within 3 s" in text
        assert took < 6
    assert results[1] is None
    assert ckpt.open(str(tmp_path / "run")).newest_valid() == f"{1:012d}-e00000001-0"
