"""Entries that differ by rank, in one process: the user's random streams, and loaders that keep their own position."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import ckpt
from ckpt.errors import Mismatch, Refused
from tests.unit.ckpt.test_state import roundtrip

stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

STREAMS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "torch": (lambda n: torch.Generator().manual_seed(n), lambda g: torch.randn(5, generator=g).tolist()),
    "python": (random.Random, lambda g: (g.random(), g.gauss(0, 1), g.getrandbits(70))),
    "RandomState": (np.random.RandomState, lambda g: (g.rand(), g.randn())),
    **{
        kind.__name__: (
            lambda n, kind=kind: np.random.Generator(kind(n)),
            lambda g: (g.random(), g.normal(), g.integers(0, 2**31, dtype=np.int32)),
        )
        for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
    },
}


@pytest.mark.parametrize("kind", STREAMS)
def test_the_users_random_streams_go_on_where_they_were(tmp_path: Path, kind: str) -> None:
    make, draw = STREAMS[kind]
    a, b = make(1), make(2)
    draw(a)  # half of a pair of normal numbers may be left over
    roundtrip(tmp_path, ckpt.State(noise=a), ckpt.State(noise=b))
    assert [draw(b) for _ in range(3)] == [draw(a) for _ in range(3)]


def test_another_kind_of_stream_is_refused_by_name(tmp_path: Path) -> None:
    saved, target = np.random.Generator(np.random.PCG64(1)), np.random.Generator(np.random.MT19937(1))
    with pytest.raises(Mismatch, match="noise: what was saved does not fit a Generator"):
        roundtrip(tmp_path, ckpt.State(noise=saved), ckpt.State(noise=target))


def test_a_stream_without_a_state_is_refused() -> None:
    with pytest.raises(Refused, match="SystemRandom has no state_dict"):
        ckpt.State(noise=random.SystemRandom())


@pytest.mark.parametrize("obj", [nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters())])
def test_what_must_be_sharded_is_not_marked(obj: Any) -> None:
    with pytest.raises(Refused, match="is no per-rank entry"):
        ckpt.State(x=ckpt.PerRank(obj))


def test_marked_plain_data_are_read_and_set(tmp_path: Path) -> None:
    a, b = ckpt.State(seen=ckpt.PerRank({"n": 3})), ckpt.State(seen=ckpt.PerRank(None))
    roundtrip(tmp_path, a, b)
    assert b["seen"] == {"n": 3}
    b["seen"] = 4
    assert b["seen"] == 4


# --- loaders ----------------------------------------------------------------------------------------------------------


class Numbers(IterableDataset[int]):
    """An endless count; each worker takes every n-th number. It can say where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        while True:
            self.at += 1
            yield first + (self.at - 1) * step

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Unstated(IterableDataset[int]):
    """Forty numbers through a shuffle buffer that nobody can look into."""

    def __iter__(self) -> Iterator[int]:
        yield from random.Random(1).sample(range(40), 40)


OPEN: list[Any] = []


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """No worker process is left to whenever garbage is collected, where torchdata may wait 5 s for each."""
    yield
    while OPEN:
        if hasattr(OPEN[-1]._iterator, "_shutdown_workers"):
            OPEN[-1]._iterator._shutdown_workers()
        OPEN.pop()


def loader(data: Any, workers: int, **more: Any) -> Any:
    OPEN.append(stateful_dataloader.StatefulDataLoader(data, batch_size=3, num_workers=workers, **more))
    return OPEN[-1]


def take(source: Iterator[Any], n: int) -> list[list[int]]:
    return [next(source).tolist() for _ in range(n)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_loader_goes_on_after_what_was_trained_on(tmp_path: Path, kind: str, workers: int) -> None:
    first, second = (
        loader(list(range(40)), workers, shuffle=True) if kind == "map" else loader(Numbers(), workers)
        for _ in range(2)
    )
    batches = iter(first)
    take(batches, 5)  # the workers have fetched more
    resumed = roundtrip(tmp_path, ckpt.State(data=first), ckpt.State(data=second))
    assert resumed.inexact == ()
    assert take(iter(second), 6) == take(batches, 6)
    manifest = json.loads(next((tmp_path / "run").glob("steps/*/*/manifest.json")).read_text())
    assert manifest["values"]["data.rank00000"]["kind"] == "per_rank"


@pytest.mark.parametrize("then, now", [(0, 2), (2, 0), (1, 2), (2, 1)])  # noqa: PT006
def test_another_number_of_workers_is_refused_or_begins_anew(tmp_path: Path, then: int, now: int) -> None:
    saved = loader(Numbers(), then)
    take(iter(saved), 2)
    with pytest.raises(Mismatch, match="data: the position of a StatefulDataLoader") as caught:
        roundtrip(tmp_path, ckpt.State(data=saved), ckpt.State(data=loader(Numbers(), now)))
    assert caught.value.facts == [("saved with", f"num_workers={then}"), ("here", f"num_workers={now}")]
    anew = loader(Numbers(), now)
    state = ckpt.State(data=ckpt.PerRank(anew, approximate=True))
    resumed = ckpt.open(str(tmp_path / "run")).load(state)
    assert resumed.inexact == (f"data: saved with {then} workers, here {now}: it begins as it was built",)
    assert f"not exact: {resumed.inexact[0]}" in str(resumed)
    assert take(iter(anew), 1) == [[0, 1, 2] if now < 2 else [0, now, 2 * now]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffle_buffer_that_cannot_be_stated_is_reported(tmp_path: Path, workers: int) -> None:
    saved, target = loader(Unstated(), workers), loader(Unstated(), workers)
    take(iter(saved), 2)
    (what,) = roundtrip(tmp_path, ckpt.State(data=saved), ckpt.State(data=target)).inexact
    assert what.startswith("data: its dataset has no state_dict")


def test_a_shuffled_data_set_of_hugging_face_is_reported(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def rows() -> Iterator[dict[str, int]]:
        yield from ({"n": n} for n in range(40))

    def make(shuffled: bool) -> Any:
        data = datasets.IterableDataset.from_generator(rows)
        return loader(data.shuffle(seed=1, buffer_size=8).take(30) if shuffled else data, 0)

    for shuffled in (True, False):
        saved = make(shuffled)
        next(iter(saved))
        said = roundtrip(tmp_path / str(shuffled), ckpt.State(data=saved), ckpt.State(data=make(shuffled))).inexact
        assert [w.partition(" leaves")[0] for w in said] == [
            "data: the state of a shuffled Hugging Face data set"
        ] * shuffled


def test_batches_in_any_order_are_reported(tmp_path: Path) -> None:
    saved, target = (loader(list(range(9)), 2, in_order=False) for _ in range(2))
    take(iter(saved), 1)
    (what,) = roundtrip(tmp_path, ckpt.State(data=saved), ckpt.State(data=target)).inexact
    assert what.startswith("data: in_order=False")


def test_asking_for_a_position_moves_no_random_stream(tmp_path: Path) -> None:
    """torchdata builds an iterator when it is asked before the first batch, and that draws numbers."""
    saved, target = (loader(list(range(40)), 0, shuffle=True) for _ in range(2))
    take(iter(saved), 2)
    torch.manual_seed(5)
    roundtrip(tmp_path, ckpt.State(data=saved), ckpt.State(data=target))
    want = torch.rand(3)
    with ckpt.open(str(tmp_path / "run")) as store:
        store.load(ckpt.State(data=target))
        assert torch.equal(torch.rand(3), want)


def test_a_stream_that_building_an_iterator_draws_from_is_put_back(tmp_path: Path) -> None:
    """A DataLoader draws the seed of its workers from its generator whenever an iterator over it is built."""
    saved, target = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    torch.rand(3, generator=saved)
    state = ckpt.State(g=target)
    roundtrip(tmp_path, ckpt.State(g=saved), state)
    iter(torch.utils.data.DataLoader([1, 2, 3], generator=target))
    assert not torch.equal(target.get_state(), saved.get_state())
    state.restore_rng()
    assert torch.equal(target.get_state(), saved.get_state())
