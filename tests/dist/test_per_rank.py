"""Entries that differ by rank, on real ranks: each gets its own back; on another number of ranks, what is said."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import CkptError, Refused
from tests.dist.gpt import world
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist


class Place:
    """A loader that counts for itself, far apart on each rank."""

    def __init__(self) -> None:
        self.at = 1000 * rank()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def streams(seed: int) -> dict[str, Any]:
    """A stream of each kind that differs by rank, and one that is the same on all ranks."""
    mine = seed + rank()
    return {
        "torch": torch.Generator().manual_seed(mine),
        "numpy": np.random.default_rng(mine),
        "python": random.Random(mine),
        "shared": np.random.RandomState(seed),
    }


def draw(of: dict[str, Any]) -> dict[str, float]:
    return {
        "torch": torch.rand((), generator=of["torch"]).item(),
        "numpy": float(of["numpy"].random()),
        "python": of["python"].random(),
        "shared": float(of["shared"].random_sample()),
    }


def save_streams(url: str) -> dict[str, float]:
    made = streams(1)
    draw(made)
    with ckpt.open(url) as store:
        state = ckpt.State(**made)
        store.resume(state)
        store.save(1, state).wait()
    return draw(made)


def load_streams(url: str) -> tuple[dict[str, float], tuple[str, ...]]:
    made = streams(50)
    resumed = ckpt.open(url).load(ckpt.State(**made))
    return draw(made), resumed.inexact


def test_streams_come_back_to_their_rank(tmp_path: Path) -> None:
    meant = run_ranks(2, save_streams, str(tmp_path))
    assert meant[0]["torch"] != meant[1]["torch"]
    assert run_ranks(2, load_streams, str(tmp_path)) == [(m, ()) for m in meant]


@pytest.mark.parametrize("now", [1, 3])
def test_on_another_number_of_ranks_streams_are_derived_and_shared_ones_stay_shared(tmp_path: Path, now: int) -> None:
    meant = run_ranks(2, save_streams, str(tmp_path))
    first, second = (run_ranks(now, load_streams, str(tmp_path)) for _ in range(2))
    assert first == second  # whoever loads the step
    assert {got["shared"] for got, _ in first} == {meant[0]["shared"]}
    for kind in ("torch", "numpy", "python"):
        drawn = [got[kind] for got, _ in first]
        assert len({*drawn, *(m[kind] for m in meant)}) == now + 2
        assert all(
            any(w.startswith(f"{kind}: saved on 2 ranks, here {now}: derived") for w in said) for _, said in first
        )
    assert not any(w.startswith("shared") for _, said in first for w in said)


def save_place(url: str, mark: bool) -> str:
    place = Place()
    place.at += 7
    try:
        with ckpt.open(url) as store:
            state = ckpt.State(data=ckpt.PerRank(place) if mark else place)
            store.resume(state)
            store.save(1, state)
    except Refused as error:
        return str(error)
    return ""


def load_place(url: str, approximate: bool = False) -> tuple[Any, ...]:
    place = Place()
    try:
        resumed = ckpt.open(url).load(ckpt.State(data=ckpt.PerRank(place, approximate=approximate)))
    except CkptError as error:
        return error.code, str(error)
    return place.at, resumed.inexact


def test_what_differs_unmarked_is_refused_with_the_mark_to_set(tmp_path: Path) -> None:
    for text in run_ranks(2, save_place, str(tmp_path), False):
        assert "differs from rank 0 on rank 1" in text
        assert "ckpt.State(…, data=ckpt.PerRank(…))" in text


def test_a_position_comes_back_to_its_rank_and_fits_no_other_number_of_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, save_place, str(tmp_path), True) == ["", ""]
    assert run_ranks(2, load_place, str(tmp_path)) == [(7, ()), (1007, ())]
    for now in (1, 3):
        for code, text in run_ranks(now, load_place, str(tmp_path)):
            assert code == "C-M"
            choices = ("start on 2 ranks", "ckpt.PerRank(data, approximate=True)", "elastic.ElasticSampler")
            for part in (
                "data: every rank has its own position",
                "saved on",
                "2 ranks",
                "1 rank" if now == 1 else f"{now} ranks",
                *choices,
            ):
                assert part in text


@pytest.mark.parametrize(("now", "places"), [(1, [7]), (3, [7, 1007, 2000])])
def test_approximate_goes_on_and_says_so_on_every_rank(tmp_path: Path, now: int, places: list[int]) -> None:
    run_ranks(2, save_place, str(tmp_path), True)
    got = run_ranks(now, load_place, str(tmp_path), True)
    assert [at for at, _ in got] == places
    assert len({said for _, said in got}) == 1
    (what,) = got[0][1]
    went_on = {1: "here 1: 1 rank goes on where it was", 3: "here 3: 2 ranks go on where they were"}
    assert what.startswith(f"data: saved on 2 ranks, {went_on[now]}")
    assert what.endswith("samples may be missed or repeated")


def test_a_world_of_one_is_a_world(tmp_path: Path) -> None:
    assert world() == 1
    assert save_place(str(tmp_path), True) == ""
    assert load_place(str(tmp_path)) == (7, ())
