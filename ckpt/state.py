"""What is in a step: modules, optimizers, schedulers, data position, values, and every rank's random streams.

``State`` turns live objects into a dict that DCP can plan, and a restored dict back into live objects. Each kind
of object is found by what it can do, not by its name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ckpt.engine.planner import Atomic, StateDict
from ckpt.errors import Refused
from ckpt.format.manifest import ADOPTED, Manifest
from ckpt.parts import Module, Optimizer, Part, Plain, Stateful, canonical, keepers
from ckpt.perrank import Loader, Own, PerRank, Stream, rank_key
from ckpt.rng import Rng, is_stream
from ckpt.values import PLAIN, atoms, plain_atoms, value_digest

_log = logging.getLogger("ckpt.state")
RUN = "run"  # the entry of ``keep_aside``
_PER_RANK = re.compile(r"rank\d{5}")


class State:
    """The content of a step, by name: ``State(model=model, optim=optim, sched=sched, data=loader)``.

    Modules, optimizers, anything with ``state_dict``/``load_state_dict``, sources of random numbers (torch's, numpy's,
    python's) and plain data (numbers, text, lists, dicts, tensors) are taken; a loader without a state of its own is
    represented by its batch sampler or sampler. Random streams of every rank (python, numpy, torch, accelerators)
    belong to it under the name ``rng``. All entries but these and what ``ckpt.PerRank`` marks are the same on every
    rank, and a save is refused where they are not.

    Plain data are read back as ``state["name"]``. All ranks build the same State.
    """

    def __init__(self, **entries: Any) -> None:
        if "rng" in entries:
            raise Refused("'rng' is the name of the random streams, which every State holds already")
        if RUN in entries:
            raise Refused(f"{RUN!r} is the name of what the run loop keeps in a step: give the entry another one")
        if bad := [k for k in entries if "." in k]:
            raise Refused(f"entry names have no dots: {', '.join(bad)}")
        self.entries: dict[str, Any] = {k: v.obj if isinstance(v, PerRank) else v for k, v in entries.items()}
        self.rng = Rng()
        modules = {k: v for k, v in entries.items() if isinstance(v, torch.nn.Module)}
        self._parts = {k: _part(k, v, modules) for k, v in entries.items()}
        self._aside: Stateful | None = None
        self._told = set[str]()
        self.absent: tuple[str, ...] = ()  # of an adopted step: entries that the last load left as they were built

    def keep_aside(self, keeper: Any | None) -> None:
        """Save what ``keeper`` knows (``state_dict``, ``load_state_dict``) in every step, beside the training state.

        For run loops; None ends it. It is restored where the step has it; steps without it, and States that keep
        nothing, fit all the same. What it saves is the same on all ranks.
        """
        self._aside = None if keeper is None else Stateful(keeper)

    def __getitem__(self, name: str) -> Any:
        part = self._plain(name)
        return self.entries[name] if part is None else part.value

    def __setitem__(self, name: str, value: Any) -> None:
        part = self._plain(name)
        if part is None:
            raise Refused(f"{name!r} is an object that keeps its own state; only plain data are set like this")
        part.value = value

    def _plain(self, name: str) -> Plain | None:
        part = self._parts[name]
        part = part.part if isinstance(part, Own) else part
        return part if isinstance(part, Plain) else None

    def capture(self, rank: int) -> StateDict:
        """The live state as DCP plans it: nested dicts, values wrapped as ``Atomic``. Copies nothing."""
        out: StateDict = {}
        for name, part in self._parts.items():
            if isinstance(part, Module):
                self._tell_forgotten(name, part)
            out[name] = plain_atoms(part.capture(rank) if isinstance(part, Own) else part.capture(), name)
        out["rng"] = {rank_key(rank): Atomic(self.rng.capture())}
        if self._aside is not None:
            out[RUN] = plain_atoms(self._aside.capture(), RUN)
        return out

    def _tell_forgotten(self, name: str, part: Module) -> None:
        for key in part.forgotten():
            if f"{name}.{key}" not in self._told:
                self._told.add(f"{name}.{key}")
                _log.warning(
                    "%s.%s changes in training and is not saved: register_buffer(…, persistent=True)", name, key
                )

    def capture_tensors(self) -> StateDict:
        """The same of modules and optimizers only. Unlike ``capture`` it asks no loader, which may draw and fetch."""
        return {k: part.capture() for k, part in self._parts.items() if isinstance(part, (Module, Optimizer))}

    def target(self, manifest: Manifest, rank: int, world: int) -> tuple[StateDict, set[str]]:
        """Flat targets for a load, and the keys of the step that are left out on purpose (other ranks' own values).

        Raises ``Mismatch`` for an entry whose content belongs to another number of ranks.
        """
        sizes = {k: torch.Size(t.shape) for k, t in manifest.tensors.items()} | dict.fromkeys(
            manifest.values, torch.Size()
        )
        dtypes = {k: t.dtype for k, t in manifest.tensors.items()}
        flat: StateDict = {}
        left_out: set[str] = set()
        self.absent = self._absent(manifest, sizes)
        for name, part in self._parts.items():
            if name in self.absent:
                continue
            below = {k.removeprefix(f"{name}."): s for k, s in sizes.items() if k.startswith(f"{name}.")}
            if isinstance(part, Own):
                digests = {k: manifest.values[f"{name}.{k}"].digest for k in below if f"{name}.{k}" in manifest.values}
                mine = part.choose(digests, rank=rank, then=manifest.world_size, now=world)
                left_out |= {f"{name}.{k}" for k in below if k != mine}
                flat |= {} if mine is None else {f"{name}.{mine}": None}
                continue
            if isinstance(part, Optimizer):
                part.dtypes = {k.removeprefix(f"{name}."): d for k, d in dtypes.items()}
            flat |= {f"{name}.{k}" if k else name: v for k, v in part.target(below).items()}
        streams = {k for k in manifest.values if k.startswith("rng.")}
        # rank 0's stream holds the run's seed, from which those of a changed world are derived
        own = f"rng.{rank_key(rank if manifest.world_size > rank else 0)}"
        if own in streams:
            flat[own] = None
        if RUN in manifest.values and self._aside is not None:
            flat[RUN] = None
        elif RUN in manifest.values:
            left_out.add(RUN)
        return flat, left_out | (streams - {own})

    def apply(self, flat: StateDict, *, step: int, rank: int, world_then: int, world_now: int) -> str:
        """Put a loaded flat dict into the live objects, random streams last; says how streams were made.

        Returns "restored" where each rank got its own streams, "derived" where the number of ranks changed.
        """
        for name, part in self._parts.items():
            if name in self.absent:
                continue
            loaded = {k.removeprefix(name).removeprefix("."): v for k, v in flat.items()
                      if k == name or k.startswith(f"{name}.")}  # fmt: skip
            if isinstance(part, Own):
                part.apply(loaded, step=step, rank=rank)
            else:
                part.apply(loaded)
        if RUN in flat and self._aside is not None:
            self._aside.apply({"": flat[RUN]})
        saved = next((v for k, v in flat.items() if k.startswith("rng.")), None)
        if saved is None:
            return "not in the step"
        if world_then == world_now:
            self.rng.restore(saved)
            return "restored"
        self.rng.derive(int(saved["seed"]), step, rank)
        return "derived"

    def _absent(self, manifest: Manifest, keys: Iterable[str]) -> tuple[str, ...]:
        """Entries of which an adopted step has nothing at all; a module is never one of them."""
        if ADOPTED not in manifest.writer:
            return ()
        known = {k.split(".")[0] for k in keys}
        return tuple(k for k, part in self._parts.items() if k not in known and not isinstance(part, Module))

    @property
    def inexact(self) -> tuple[str, ...]:
        """What the last load could not restore exactly, and why: "entry: reason". The same on all ranks."""
        return tuple(
            f"{k}: {part.inexact}" for k, part in self._parts.items() if isinstance(part, Own) and part.inexact
        )

    def restore_rng(self) -> None:
        """Set the random streams, the user's too, again to what the last load gave them; no effect on a fresh run.

        For whoever builds a data iterator after the load, since building one draws numbers.
        """
        self.rng.again()
        for part in self._parts.values():
            if isinstance(part, Own):
                part.again()

    def value_digests(self, captured: StateDict) -> dict[str, str]:
        """A digest of every value that must be the same on all ranks, from what ``capture`` returned."""
        own = {"rng", *(name for name, part in self._parts.items() if isinstance(part, Own))}
        return {
            k: value_digest(v.value)
            for k, v in atoms(captured)
            if not (k.split(".")[0] in own and _PER_RANK.fullmatch(k.split(".")[-1]))
        }

    def own_values(self, rank: int) -> dict[str, Any]:
        """The random streams of this rank as they are now, the process's and the user's, by their keys in a step."""
        own = {k: part.capture(rank) for k, part in self._parts.items() if isinstance(part, Own) and part.stream}
        return {k: v.value for k, v in atoms(own)} | {f"rng.{rank_key(rank)}": self.rng.capture()}

    def buffers(self) -> set[str]:
        """Keys of the modules' buffers, which may differ between replicas (BatchNorm under DDP): rank 0's are saved."""
        return {
            f"{name}.{canonical(part.module, raw)}"
            for name, part in self._parts.items()
            if isinstance(part, Module)
            for raw, _ in part.module.named_buffers()
        }


def _part(name: str, obj: Any, modules: Mapping[str, torch.nn.Module]) -> Part | Own:
    """The kind of an entry, found by what the object can do. Raises ``Refused`` for one that can do nothing."""
    marked = obj if isinstance(obj, PerRank) else None
    obj = obj.obj if isinstance(obj, PerRank) else obj
    if isinstance(obj, (torch.nn.Module, torch.optim.Optimizer)):
        if marked:
            raise Refused(f"State({name}=…): a {type(obj).__name__} is no per-rank entry",
                          hint="shard its parameters (FSDP2, DTensor), or keep it the same on all ranks")  # fmt: skip
        return Module(name, obj) if isinstance(obj, torch.nn.Module) else Optimizer(name, obj, modules)
    keeper = None if is_stream(obj) else _keeper(obj)
    if marked is None and (is_stream(obj) or _counts_by_rank(keeper)):
        marked = PerRank(obj)
    part: Part
    if is_stream(obj):
        part = Stream(name, obj)
    elif keeper is not None:
        part = Loader(name, keeper, marked) if marked and hasattr(keeper, "num_workers") else Stateful(keeper)
    elif isinstance(obj, (*PLAIN, list, tuple, dict, torch.Tensor)):
        part = Plain(obj)
    else:
        raise _refusal(name, obj)
    return Own(name, part, approximate=marked.approximate) if marked else part


def _keeper(obj: Any) -> Any:
    for candidate in keepers(obj):
        if callable(getattr(candidate, "state_dict", None)) and callable(getattr(candidate, "load_state_dict", None)):
            return candidate
    return None


def _counts_by_rank(keeper: Any) -> bool:
    """torchdata's loaders, nodes and samplers, whose states say where this rank is, on this number of ranks."""
    return any(kind.__module__.partition(".")[0] == "torchdata" for kind in type(keeper).__mro__)


def _refusal(name: str, obj: Any) -> Refused:
    kind = type(obj).__name__
    if hasattr(obj, "__iter__") and (hasattr(obj, "dataset") or hasattr(obj, "__next__")):
        return Refused(
            f"State({name}=…): this {kind} has no position that could be saved",
            hint="build it with a sampler that has one: DataLoader(dataset, batch_sampler=elastic.ElasticSampler(…))",
        )
    return Refused(
        f"State({name}=…): {kind} has no state_dict/load_state_dict and is no plain data",
        hint="pass an object that can save and load its state, or plain numbers, text, lists, dicts, tensors",
    )
