"""Entries that differ by rank by design: random streams that a user made, and loaders that count by rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ckpt.engine.planner import Atomic, StateDict
from ckpt.errors import Mismatch
from ckpt.parts import Part, Tensors
from ckpt.rng import reseed, set_stream, stream_state
from ckpt.values import value_digest


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks an entry of a State as different on every rank by design: ``State(..., data=ckpt.PerRank(loader))``.

    Every rank saves and restores its own. Random streams that the user made (``torch.Generator``, ``random.Random``,
    numpy's ``Generator`` and ``RandomState``) and torchdata's loaders are taken so by themselves; everything else that
    differs between ranks needs this mark, and is refused by the first save without it.

    On another number of ranks such an entry fits nowhere, which is a ``Mismatch``. With ``approximate`` the run goes on
    all the same: ranks that the step has take up their state, others begin as they were built. Random streams always
    go on: where they were the same on all ranks they stay so, otherwise they are derived from what rank 0 saved, the
    step and the rank. ``Resumed.inexact`` says what became of each.
    """

    obj: Any
    approximate: bool = False


def rank_key(rank: int) -> str:
    """How a per-rank entry is named."""
    return f"rank{rank:05d}"


def ranks(n: int) -> str:
    """``1 rank``, ``2 ranks``."""
    return "1 rank" if n == 1 else f"{n} ranks"


class Stream:
    """A source of random numbers that the user made."""

    def __init__(self, name: str, stream: Any) -> None:
        self.name, self.stream = name, stream

    def capture(self) -> Atomic:
        """See ``Part``."""
        return Atomic(stream_state(self.stream))

    def target(self, saved: Tensors) -> StateDict:
        """See ``Part``."""
        return {"": None}

    def apply(self, loaded: StateDict) -> None:
        """See ``Part``."""
        try:
            set_stream(self.stream, loaded[""])
        except (LookupError, RuntimeError, TypeError, ValueError) as e:
            raise Mismatch(f"{self.name}: what was saved does not fit a {type(self.stream).__name__}: {e}",
                           hint="make the same kind of generator as when the step was saved") from e  # fmt: skip


class Loader:
    """A data loader that keeps its own position: it fits the number of worker processes that it was saved with."""

    def __init__(self, name: str, obj: Any, marked: PerRank) -> None:
        self.obj, self.name, self.approximate = obj, name, marked.approximate
        self.inexact = ""

    def capture(self) -> Atomic:
        """See ``Part``."""
        state = self.obj.state_dict()
        return Atomic({"workers": self.obj.num_workers, "inexact": _inexact(self.obj, state), "state": state})

    def target(self, saved: Tensors) -> StateDict:
        """See ``Part``."""
        return {"": None}

    def apply(self, loaded: StateDict) -> None:
        """See ``Part``."""
        then, now = loaded[""]["workers"], self.obj.num_workers
        self.inexact = loaded[""]["inexact"]
        if then == now:
            self.obj.load_state_dict(loaded[""]["state"])
        elif self.approximate:
            self.inexact = f"saved with {then} workers, here {now}: it begins as it was built"
        else:
            raise Mismatch(
                f"{self.name}: the position of a {type(self.obj).__name__} fits only as many workers as then",
                facts=[("saved with", f"num_workers={then}"), ("here", f"num_workers={now}")],
                hint=f"num_workers={then}; or ckpt.PerRank(loader, approximate=True), which begins it anew",
            )


def _inexact(loader: Any, state: Any) -> str:
    """Why a loader that is resumed from this state may not give what it would have given; empty where it does."""
    if loader.num_workers and not getattr(loader, "in_order", True):
        return "in_order=False: its batches come in the order in which workers happen to end"
    dataset = getattr(loader, "dataset", None)
    if _drops_its_buffer(dataset):
        return "the state of a shuffled Hugging Face data set leaves out its buffer: those samples are missed"
    if isinstance(dataset, torch.utils.data.IterableDataset) and not _says_where(state):
        return (
            "its dataset has no state_dict: it is read again up to here, and may give other samples (a shuffle buffer)"
        )
    return ""


def _drops_its_buffer(dataset: Any) -> bool:
    """Whether it is ``datasets.IterableDataset.shuffle`` somewhere below; it warns of this itself when it is loaded."""
    todo = [getattr(dataset, "_ex_iterable", None)]
    for at in todo:  # grows
        if type(at).__name__ == "BufferShuffledExamplesIterable":
            return True
        todo += [getattr(at, "ex_iterable", None), *getattr(at, "ex_iterables", ())] if at is not None else []
    return False


def _says_where(state: Any) -> bool:
    """Whether a loader's state has one of its dataset, or of the iterator over it, in the terms of torchdata."""
    found = list(_named(state, ("dataset_state", "dataset_iter_state")))
    return not found or any(v is not None for v in found)


def _named(nested: Any, names: tuple[str, ...]) -> Iterator[Any]:
    for key, value in nested.items() if isinstance(nested, Mapping) else ():
        if key in names:
            yield value
        else:
            yield from _named(value, names)


class Own:
    """An entry of which every rank has its own content, under a key of its own."""

    def __init__(self, name: str, part: Part, *, approximate: bool) -> None:
        self.name, self.part, self.approximate = name, part, approximate
        self._how = ""
        self._last: Atomic | None = None

    @property
    def stream(self) -> bool:
        """Whether it is a random stream, which asking for its state does not change."""
        return isinstance(self.part, Stream)

    @property
    def inexact(self) -> str:
        """Why the last load did not give what was saved; empty where it did."""
        return self._how or getattr(self.part, "inexact", "")

    def capture(self, rank: int) -> StateDict:
        """What this rank has of it, under its key."""
        return {rank_key(rank): self.part.capture()}

    def choose(self, saved: Mapping[str, str], *, rank: int, then: int, now: int) -> str | None:
        """Which rank's content this rank takes; None: it stays as it was built. ``saved`` has their digests."""
        self._how = ""
        if then == now:
            return rank_key(rank)
        if self.stream:
            if len(set(saved.values())) > 1:
                self._how = (
                    f"saved on {ranks(then)}, here {now}: derived from the stream of rank 0, the step and the rank"
                )
            return rank_key(0)
        if not self.approximate:
            raise Mismatch(
                f"{self.name}: every rank has its own position in it, which fits no other number of ranks",
                facts=[("saved on", ranks(then)), ("here", ranks(now))],
                hint=f"start on {ranks(then)}; or ckpt.PerRank({self.name}, approximate=True): samples may be missed "
                "or repeated; or elastic.ElasticSampler, which fits any number of ranks",
            )
        self._how = (
            f"saved on {ranks(then)}, here {now}: "
            + (
                "1 rank goes on where it was"
                if min(then, now) == 1
                else f"{min(then, now)} ranks go on where they were"
            )
            + (", the others begin as they were built" if now > then else "")
            + "; samples may be missed or repeated"
        )
        return rank_key(rank) if rank < then else None

    def apply(self, loaded: StateDict, *, step: int, rank: int) -> None:
        """Take over what was loaded below this entry: the key that ``choose`` gave, or nothing."""
        if not loaded:  # a rank that the step does not have
            return
        (value,) = loaded.values()
        if isinstance(self.part, Stream) and self._how:
            mixed = f"torchrelay {self.name} {value_digest(value)} {step} {rank}"
            reseed(self.part.stream, xxhash.xxh3_64_intdigest(mixed.encode()))
        else:
            self.part.apply({"": value})
        if isinstance(self.part, Stream):
            self._last = self.part.capture()

    def again(self) -> None:
        """Set a random stream once more to what the last load gave it; nothing on a fresh run, or for another entry."""
        if self._last is not None:
            self.part.apply({"": self._last.value})
