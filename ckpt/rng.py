"""Random streams: those of the process (python, numpy's global one, torch's CPU one and every accelerator's), and
those that a user made."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch
import xxhash


class Rng:
    """Captures, restores and derives the random streams of this process. Main thread."""

    def __init__(self) -> None:
        self._last: dict[str, Any] | None = None

    def capture(self) -> dict[str, Any]:
        """All streams as plain data and tensors."""
        name, keys, pos, has_gauss, cached = cast("tuple[str, Any, int, int, float]", np.random.get_state(legacy=True))
        return {
            "python": random.getstate(),
            "numpy": [
                str(name),
                torch.from_numpy(keys.astype(np.int64)),
                int(pos),
                int(has_gauss),
                float(cached),
            ],
            "torch": torch.get_rng_state(),
            "devices": [_devices().get_rng_state(n) for n in range(_device_count())],
            "seed": torch.initial_seed(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Set all streams to what ``capture`` returned; a device that the step does not know keeps its stream."""
        self._last = saved
        version, internal, gauss = saved["python"]
        random.setstate((version, tuple(internal), gauss))
        name, keys, pos, has_gauss, cached = saved["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), pos, has_gauss, cached))
        torch.set_rng_state(saved["torch"])
        for n, state in zip(range(_device_count()), saved["devices"], strict=False):
            _devices().set_rng_state(state, n)

    def derive(self, seed: int, step: int, rank: int) -> None:
        """Start new streams that are a function of (seed of the run, step, rank): for a changed number of ranks."""
        mixed = xxhash.xxh3_64_intdigest(f"torchrelay rng {seed} {step} {rank}".encode())
        random.seed(mixed)
        np.random.seed(mixed % 2**32)
        torch.manual_seed(mixed % 2**63)  # accelerators too
        self._last = self.capture()
        self._last["seed"] = seed

    def again(self) -> None:
        """Restore once more what was restored or derived last; nothing on a fresh run."""
        if self._last is not None:
            self.restore(self._last)


def is_stream(obj: Any) -> bool:
    """Whether an object is a source of random numbers with a state: torch's, numpy's or python's."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return isinstance(obj, kinds) and not isinstance(obj, random.SystemRandom)


def stream_state(stream: Any) -> Any:
    """The state of such a source as plain data."""
    if isinstance(stream, torch.Generator):
        return stream.get_state()
    return stream.getstate() if isinstance(stream, random.Random) else _lists(_numpy_state(stream))


def set_stream(stream: Any, state: Any) -> None:
    """Set such a source to what ``stream_state`` returned for one of its kind."""
    if isinstance(stream, torch.Generator):
        stream.set_state(state)
    elif isinstance(stream, random.Random):
        stream.setstate(state)
    elif isinstance(stream, np.random.Generator):
        stream.bit_generator.state = state
    else:
        stream.set_state(state)


def reseed(stream: Any, seed: int) -> None:
    """Begin such a source anew; ``seed`` has 64 bits."""
    if isinstance(stream, torch.Generator):
        stream.manual_seed(seed % 2**63)
    elif isinstance(stream, np.random.Generator):
        stream.bit_generator.state = type(stream.bit_generator)(seed).state
    else:
        stream.seed(seed if isinstance(stream, random.Random) else seed % 2**32)


def _numpy_state(stream: Any) -> Any:
    return stream.bit_generator.state if isinstance(stream, np.random.Generator) else stream.get_state(legacy=False)


def _lists(state: Any) -> Any:
    if isinstance(state, dict):
        return {k: _lists(v) for k, v in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def _device_count() -> int:
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _devices() -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator())
