"""The random streams of one process: python, numpy's global one, torch's CPU one and every accelerator's."""

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


def _device_count() -> int:
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _devices() -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator())
