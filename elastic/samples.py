"""Random numbers of a sample: the same on any number of ranks and workers, in any process, after any restart.

A worker process of a ``DataLoader`` begins its random streams anew with every start, and which worker has a sample
depends on how many there are. So what an augmentation draws is tied here to the sample alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from ckpt.errors import Refused
from elastic.data import Share


@contextmanager
def sample_rng(seed: int, epoch: int, sample: int) -> Iterator[None]:
    """Inside, the random streams of this process are a pure function of the three numbers; after it, what they were.

    These are python's, numpy's global one and torch's for the CPU. For augmentations in a data set of any kind, in the
    main process or in workers, on the thread that draws; not nested. :class:`SeededSamples` does it by itself.
    """
    with _kept():
        _seed(seed, epoch, sample)
        yield


class SeededSamples(Dataset[Any]):
    """A map-style data set in which what a sample draws depends on ``seed``, epoch and sample only.

    Wrap the data set that augments, for a loader over an ``ElasticSampler``, which knows the epoch::

        data = elastic.SeededSamples(Images(...), seed=1)
        loader = DataLoader(data, batch_sampler=elastic.ElasticSampler(data, batch=256, seed=1), num_workers=8)

    Augmentations are then the same bit for bit on any number of ranks and workers and after a restart, and the
    streams of the process, from which dropout draws, are left as they are. They are those of ``sample_rng``. Indexed
    by hand, a sample is the one of epoch 0. Another sampler is ``Refused``: wrap with ``sample_rng`` instead.
    """

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        self.dataset, self.seed = dataset, seed
        if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
            raise Refused(
                f"a {type(dataset).__name__} has no length or cannot be indexed",
                hint="a data set that is iterated draws inside of elastic.sample_rng(seed, epoch, sample)",
            )

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, sample: int) -> Any:
        with sample_rng(self.seed, 0, sample):
            return self.dataset[sample]

    def __getitems__(self, samples: Sequence[int]) -> list[Any]:
        """What a loader asks for: the samples of a batch."""
        if not isinstance(samples, Share):
            raise Refused("only elastic.ElasticSampler says in which epoch a sample is asked for",
                          hint="DataLoader(data, batch_sampler=elastic.ElasticSampler(data, …)); or draw inside of "
                          "elastic.sample_rng(seed, epoch, sample)")  # fmt: skip
        out = []
        with _kept():
            for n, sample in enumerate(samples):
                _seed(self.seed, (samples.slot + n) // len(self), sample)
                out.append(self.dataset[sample])
        return out


@contextmanager
def _kept() -> Iterator[None]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)


def _seed(seed: int, epoch: int, sample: int) -> None:
    mixed = xxhash.xxh3_64_intdigest(f"torchrelay sample {seed} {epoch} {sample}".encode())
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.default_generator.manual_seed(mixed % 2**63)
