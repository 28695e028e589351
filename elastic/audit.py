"""What a training script keeps that its State does not: named before it is lost, by a look at the loop's variables."""

from __future__ import annotations

import gc
import keyword
import logging
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import ckpt
from ckpt.parts import canonical
from ckpt.rng import is_stream

DEPTH = 3  # lists, dicts and attributes within each other that are looked into
MAX_FRAMES = 10
MAX_OBJECTS = 20_000  # bounds the time on scripts that keep large data in their variables
MAX_ITEMS = 200  # of one list or dict
_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device,
           type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)  # fmt: skip
_log = logging.getLogger("elastic")


def unregistered(state: ckpt.State, frame: types.FrameType, *, log: bool) -> tuple[str, ...]:
    """Name what decides how training goes on, is kept in the variables of a loop, and is in no entry of ``state``.

    Optimizers, schedulers (the only one of an optimizer of the state wherever it is kept), gradient scalers, averages
    of models, random streams, metrics and iterators over data: "name (kind): what is lost → what to write". ``frame``
    is the loop's; those that called it are looked at, too, up to the one that has the state. Reads only; takes a few
    milliseconds. ``log`` has it warned about on the logger "elastic". What it does not name may still be missing.
    """
    look = _Look(state)
    for scope in (scope for f in _frames(frame, state) for scope in (f.f_locals, f.f_globals)):
        for name, value in list(scope.items()):
            if not name.startswith("__"):
                look.at(value, name, DEPTH)
    look.at_schedulers()
    look.found += _buffers_of_one_rank(state)
    if look.found and log:
        _log.warning("not saved with the State, so not restored:%s", "".join(f"\n  {what}" for what in look.found))
    return tuple(look.found)


def _frames(frame: types.FrameType, state: ckpt.State) -> list[types.FrameType]:
    frames: list[types.FrameType] = []
    at: types.FrameType | None = frame
    while at is not None and len(frames) < MAX_FRAMES:
        frames.append(at)
        if any(v is state for scope in (at.f_locals, at.f_globals) for v in list(scope.values())):
            return frames
        at = at.f_back
    return frames[:1]


class _Look:
    def __init__(self, state: ckpt.State) -> None:
        self.found: list[str] = []
        entries = state.entries.values()
        self._taken = {*state.entries, "rng", "run"}  # the latter two are a State's own
        self._known, self._scheduled = {id(state), id(torch.default_generator)}, set[int]()
        for entry in entries:
            self._know(entry)
        modules = [m for m in entries if isinstance(m, torch.nn.Module)]
        self._optimizers = [o for o in entries if isinstance(o, torch.optim.Optimizer)]
        self._params = {id(p) for m in modules for p in m.parameters()}
        self._shapes = {frozenset(_shapes(m)) for m in modules} - {frozenset()}
        self._visited = 0
        for entry in entries:
            for value in _saved_with(entry):
                self._mark(value, DEPTH)

    def _mark(self, value: Any, depth: int) -> None:
        if isinstance(value, _LEAVES) or id(value) in self._known:
            return
        self._know(value)
        if depth and not isinstance(value, torch.nn.Module):
            for inner, _ in _inside(value, ""):
                self._mark(inner, depth - 1)

    def _know(self, value: Any) -> None:
        self._known.add(id(value))
        if isinstance(value, LRScheduler):
            self._scheduled.add(id(getattr(value, "optimizer", None)))

    def at(self, value: Any, name: str, depth: int) -> None:
        """Judge one object, and what is in it."""
        if isinstance(value, _LEAVES) or self._visited >= MAX_OBJECTS:
            return
        self._visited += 1
        known = id(value) in self._known
        self._know(value)
        if not known and (why := self._why(value)):
            self.found.append(f"{name} ({_kind(value)}): {why}{self._remedy(value, name)}")
        elif depth and (not known or isinstance(value, torch.nn.Module)):
            for inner, path in _inside(value, name):
                self.at(inner, path, depth - 1)

    def at_schedulers(self) -> None:
        """Schedulers of the state's optimizers that are kept where the frame does not reach."""
        out_of_sight = [
            o for o in self._optimizers if hasattr(o.step, "_wrapped_by_lr_sched") and id(o) not in self._scheduled
        ]
        if not out_of_sight:  # what follows goes over all objects of the process
            return
        holders = gc.get_referrers(*out_of_sight)
        owners = [h for h in holders if isinstance(h, LRScheduler)]
        dicts = [h for h in holders if type(h) is dict and any(h.get("optimizer") is o for o in out_of_sight)]
        owners += [h for h in (gc.get_referrers(*dicts) if dicts else ()) if isinstance(h, LRScheduler)]
        inner = {id(s) for o in owners for s in getattr(o, "_schedulers", ())}
        for scheduler in owners:
            if id(scheduler) not in self._known | inner:
                self._known.add(id(scheduler))
                self.found.append(
                    f"a scheduler ({_kind(scheduler)}): the learning rate begins anew → ckpt.State(…, sched=…)"
                )

    def _why(self, value: Any) -> str:
        if isinstance(value, torch.optim.Optimizer):
            return "its moments and steps begin anew"
        if isinstance(value, (LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)):
            return "the learning rate begins anew"
        if isinstance(value, torch.amp.GradScaler):
            return "the scale of the loss begins anew" if value.is_enabled() else ""
        if is_stream(value):
            return "the random stream begins anew"
        if all(callable(getattr(type(value), name, None)) for name in ("update", "compute", "reset")):
            return "what it has summed up is lost"
        if isinstance(value, torch.nn.Module):
            return self._why_module(value)
        return "its position is lost" if _is_data(value) else ""

    def _remedy(self, value: Any, name: str) -> str:
        """What to write so that it is saved, under the variable's own name where the State has no such entry."""
        if _is_data(value):
            return " → ckpt.State(…, data=loader), batches from run.steps"
        saves = all(callable(getattr(value, f, None)) for f in ("state_dict", "load_state_dict"))
        if not (saves or is_stream(value)):
            return " → give it state_dict and load_state_dict, and a place in the State"
        last = re.findall(r"[^\W\d]\w*", name)[-1]
        key = f"{last}2" if last in self._taken or keyword.iskeyword(last) else last
        written = "…" if re.search(r"…|\.\d", name) else name  # modules in a Sequential have no name in python
        return f" → ckpt.State(…, {key}={written})"

    def _why_module(self, module: torch.nn.Module) -> str:
        if any(id(p) in self._params for p in module.parameters()):
            return ""  # a wrapper, or a part, of one that is in the State
        if isinstance(module, AveragedModel):
            return "the average of weights begins anew"
        if frozenset(_shapes(module)) in self._shapes:
            return "as large as a module of the State (an average of it?), it begins anew"
        return ""


def _buffers_of_one_rank(state: ckpt.State) -> Iterator[str]:
    for name, entry in state.entries.items():
        ddp = isinstance(entry, DistributedDataParallel) and not entry.broadcast_buffers
        if ddp and any(b.is_floating_point() for b in entry.buffers()):
            yield f"{name} (DistributedDataParallel(broadcast_buffers=False)): of its buffers rank 0's alone are saved"


def _saved_with(entry: Any) -> Iterable[Any]:
    """What an entry holds and saves with itself, as far as is known: a module saves tensors only."""
    if isinstance(entry, LRScheduler):
        return getattr(entry, "_schedulers", ())
    if isinstance(entry, DataLoader):
        return (entry.dataset,) if hasattr(entry, "state_dict") and hasattr(entry.dataset, "state_dict") else ()
    if isinstance(entry, (torch.nn.Module, torch.optim.Optimizer)):
        return ()
    return (value for value, _ in _inside(entry, ""))


def _inside(value: Any, name: str) -> Iterator[tuple[Any, str]]:
    """What an object holds, each with its name as the script would write it."""
    if isinstance(value, dict):
        for _, (k, v) in zip(range(MAX_ITEMS), list(value.items()), strict=False):
            yield v, f"{name}[{k!r}]" if isinstance(k, (str, int)) else f"{name}[…]"
    elif isinstance(value, (list, tuple, set)):
        for n, v in zip(range(MAX_ITEMS), value, strict=False):
            yield v, f"{name}[{n}]"
    elif isinstance(value, torch.nn.Module):
        for path, module in value.named_modules():
            for k, v in vars(module).items():
                if not k.startswith("_"):
                    yield v, ".".join(part for part in (name, path, k) if part)
    elif not isinstance(value, ckpt.State) and type(value).__module__.partition(".")[0] != "elastic":
        for k, v in getattr(value, "__dict__", {}).items():
            yield v, f"{name}.{k}"


def _kind(value: Any) -> str:
    return "data iterator" if _is_data(value) else type(value).__name__


def _shapes(module: torch.nn.Module) -> Iterable[tuple[str, tuple[int, ...]]]:
    return ((canonical(module, n), tuple(p.shape)) for n, p in module.named_parameters())


def _iterates(value: Any) -> bool:
    """Whether it is an iterator that a loader has made, torchdata's included."""
    homes = {kind.__module__ for kind in type(value).__mro__}
    return hasattr(value, "__next__") and "torch.utils.data.dataloader" in homes


def _is_data(value: Any) -> bool:
    return _iterates(value) or (isinstance(value, types.GeneratorType) and _gives_data(value))


def _gives_data(generator: types.GeneratorType[Any, Any, Any]) -> bool:
    """Whether a generator that has begun, or will, goes over a loader."""
    frame = generator.gi_frame
    return frame is not None and any(isinstance(v, DataLoader) or _iterates(v) for v in frame.f_locals.values())
