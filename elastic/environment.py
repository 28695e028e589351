"""What decides the bits of a step besides its state: versions, devices, flags. Each start records it, and compares."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from elastic.ledger.events import Event, RunStarted

_log = logging.getLogger("elastic")


def fingerprint() -> dict[str, str]:
    """The environment of this process as text by name, for ``RunStarted.versions``. Main thread, after the set-up."""
    cudnn = torch.backends.cudnn
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": _deterministic(),
        "float32 matmul": _matmul_precision(),
    }
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        device = torch.get_device_module(kind)
        found["device"] = device.get_device_name() if hasattr(device, "get_device_name") else str(kind)
    if torch.cuda.is_available():
        found |= {
            "cuda": str(torch.version.cuda),
            "cudnn": str(cudnn.version()),  # type: ignore[no-untyped-call]
            "cudnn mode": " ".join(name for name in ("deterministic", "benchmark") if getattr(cudnn, name)),
            "cudnn tf32": "on" if cudnn.allow_tf32 else "off",
            "cublas workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "not set"),
        }
    return found


def changes(then: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """What differs between two environments, in words; what only one of them recorded is no difference. Pure."""
    return tuple(f"{k}: {then[k]} then, {now[k]} now" for k in sorted(then.keys() & now.keys()) if then[k] != now[k])


def warn_of_changes(events: Iterable[Event], attempt: str | None) -> tuple[str, ...]:
    """Compare with the start that saved the restored ``attempt``, whose events these are among; warn of differences.

    Training goes on, but no longer bit for bit. Returns what differs. Called on rank 0.
    """
    if attempt is None:
        return ()
    epoch = attempt.partition("-")[2].rpartition("-")[0]
    then = next((e.data.versions for e in events if e.epoch == epoch and isinstance(e.data, RunStarted)), {})
    found = changes(then, fingerprint())
    if found:
        _log.warning("the environment is not the one that saved the step, so bits may differ: %s", "; ".join(found))
    return found


def _deterministic() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn only" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by the newer names
        return str(getattr(torch.backends, "fp32_precision", "unknown"))
