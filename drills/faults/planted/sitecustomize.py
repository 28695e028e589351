"""Flips one bit of the restored model, in the target's own process. Started by Python itself, see faults/memory.py.

It is on the path of every Python process of the drilled run, so until a restore happens it costs one import hook
and loads nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

EVIDENCE = os.environ.get("TORCHRELAY_FLIP", "")
OURS = "ckpt.checkpoints"
PLAIN = "torch.distributed.checkpoint.state_dict_loader"


def wrap_checkpoints(module: Any) -> None:
    """After ``Checkpoints.resume`` with a step above 0: flip in the first module of the state."""
    resume = module.Checkpoints.resume

    def resume_then_flip(self: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        resumed = resume(self, state, *args, **kwargs)
        if resumed.step > 0:
            flip(parameters(state))
        return resumed

    module.Checkpoints.resume = resume_then_flip


def wrap_dcp_load(module: Any) -> None:
    """After a plain ``dcp.load``: flip in the first floating-point tensor of what was loaded."""
    load = module.load

    def load_then_flip(state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        result = load(state_dict, *args, **kwargs)
        if OURS not in sys.modules:  # the toolkit's own use of DCP is not the restore of a plain target
            flip(tensors(state_dict))
        return result

    module.load = load_then_flip


WRAPPERS: dict[str, Callable[[ModuleType], None]] = {OURS: wrap_checkpoints, PLAIN: wrap_dcp_load}


def parameters(state: Any) -> Iterator[tuple[str, Any]]:
    """Named parameters of the modules found in ``state``, in the order in which it holds them."""
    import torch

    queue, seen = [(state, 0)], set()
    while queue:
        value, depth = queue.pop(0)
        if id(value) in seen or depth > 4:
            continue
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            yield from value.named_parameters()
        elif isinstance(value, dict):
            queue += [(v, depth + 1) for v in value.values()]
        elif isinstance(value, (list, tuple)):
            queue += [(v, depth + 1) for v in value]
        else:
            names = [*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())]
            queue += [(getattr(value, n, None), depth + 1) for n in names]


def tensors(state_dict: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Named tensors of a state dict, nested ones with dotted names; those of a model first."""
    import torch

    for key, value in sorted(state_dict.items(), key=lambda kv: not str(kv[0]).startswith("model")):
        if isinstance(value, torch.Tensor):
            yield str(key), value
        elif isinstance(value, dict):
            yield from ((f"{key}.{name}", tensor) for name, tensor in tensors(value))


def flip(candidates: Iterator[tuple[str, Any]]) -> None:
    """Flip the middle bit of the mantissa of the largest element of the first usable candidate, once a job."""
    import torch

    if os.environ.get("RANK", "0") != "0":
        return
    for name, tensor in candidates:
        local = getattr(tensor, "_local_tensor", tensor).detach()
        middle = {2: (3, torch.int16), 4: (11, torch.int32), 8: (26, torch.int64)}.get(local.element_size())
        if middle is None or not local.is_floating_point() or not local.numel() or not local.is_contiguous():
            continue
        bits, whole = middle
        at = int(local.abs().reshape(-1).argmax())  # a tiny element could be rounded away by the next update
        try:
            fd = os.open(EVIDENCE, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return
        flat = local.view(-1)
        before = flat[at].item()
        with torch.no_grad():
            flat.view(whole)[at] ^= 1 << bits
        index = [int(i) for i in torch.unravel_index(torch.tensor(at), local.shape)]
        evidence = {"tensor": name, "index": index, "bit": bits, "before": before, "after": flat[at].item(),
                    "pid": os.getpid(), "t": time.time()}  # fmt: skip
        with os.fdopen(fd, "w") as f:
            json.dump(evidence, f)
        return


class _AfterImport(importlib.abc.MetaPathFinder):
    """Lets the ordinary finders find a module, and wraps it once it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in WRAPPERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_then_wrap(module: ModuleType) -> None:
            run(module)
            WRAPPERS[fullname](module)

        spec.loader.exec_module = run_then_wrap  # type: ignore[method-assign]
        return spec


def _the_other_one() -> None:
    """Run the sitecustomize that this one hides, if the machine has one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [p for p in sys.path if os.path.abspath(p or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_the_other_one()
if "TORCHRELAY_GATE" in os.environ or "TORCHRELAY_CLOCK" in os.environ:
    importlib.import_module("torchrelay_planted").start()
if EVIDENCE:
    sys.meta_path.insert(0, _AfterImport())
