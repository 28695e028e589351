"""What is in a step: modules, optimizers, schedulers, data position, values, and every rank's random streams.

``State`` turns live objects into a dict that DCP can plan, and a restored dict back into live objects. Each kind
of object is found by what it can do, not by its name.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from ckpt.engine.planner import Atomic, StateDict
from ckpt.errors import Mismatch, Refused
from ckpt.format.manifest import ADOPTED, Manifest
from ckpt.rng import Rng

PLAIN = (type(None), bool, int, float, str, bytes)
RUN = "run"  # the entry of ``keep_aside``
CONTAINERS = (dict, list, tuple, set, OrderedDict, Counter, torch.Size)
_PER_RANK = re.compile(r"rank\d{5}")


class Part(Protocol):
    """One entry of a state."""

    def capture(self) -> StateDict | Atomic:
        """Live content: nested dicts of tensors and ``Atomic`` values, or one ``Atomic``."""
        ...

    def target(self, saved: Mapping[str, torch.Size]) -> StateDict:
        """Flat dict of tensors to fill and None for values, by key below this entry; ``saved`` is what the step has."""
        ...

    def apply(self, loaded: StateDict) -> None:
        """Put what was loaded into the live object; tensors of a module are in place already."""
        ...


class State:
    """The content of a step, by name: ``State(model=model, optim=optim, sched=sched, data=loader)``.

    Modules, optimizers, anything with ``state_dict``/``load_state_dict``, ``torch.Generator`` and plain data (numbers,
    text, lists, dicts, tensors) are taken; a loader without a state of its own is represented by its batch sampler or
    sampler. Random streams of every rank (python, numpy, torch, accelerators) belong to it under the name ``rng``.
    All entries but ``rng`` and generators are the same on every rank, and a save is refused where they are not.

    Plain data are read back as ``state["name"]``. All ranks build the same State.
    """

    def __init__(self, **entries: Any) -> None:
        if "rng" in entries:
            raise Refused("'rng' is the name of the random streams, which every State holds already")
        if RUN in entries:
            raise Refused(f"{RUN!r} is the name of what the run loop keeps in a step: give the entry another one")
        if bad := [k for k in entries if "." in k]:
            raise Refused(f"entry names have no dots: {', '.join(bad)}")
        self.entries: dict[str, Any] = dict(entries)
        self.rng = Rng()
        modules = {k: v for k, v in entries.items() if isinstance(v, torch.nn.Module)}
        self._parts = {k: _part(k, v, modules) for k, v in entries.items()}
        self._aside: _Stateful | None = None
        self.absent: tuple[str, ...] = ()  # of an adopted step: entries that the last load left as they were built

    def keep_aside(self, keeper: Any | None) -> None:
        """Save what ``keeper`` knows (``state_dict``, ``load_state_dict``) in every step, beside the training state.

        For run loops; None ends it. It is restored where the step has it; steps without it, and States that keep
        nothing, fit all the same. What it saves is the same on all ranks.
        """
        self._aside = None if keeper is None else _Stateful(keeper)

    def __getitem__(self, name: str) -> Any:
        part = self._parts[name]
        return part.value if isinstance(part, _Plain) else self.entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        part = self._parts[name]
        if not isinstance(part, _Plain):
            raise Refused(f"{name!r} is an object that keeps its own state; only plain data are set like this")
        part.value = value

    def capture(self, rank: int) -> StateDict:
        """The live state as DCP plans it: nested dicts, values wrapped as ``Atomic``. Copies nothing."""
        out: StateDict = {}
        for name, part in self._parts.items():
            content = part.capture()
            if isinstance(part, _Generator):
                content = {rank_key(rank): content}
            out[name] = _plain_atoms(content, name)
        out["rng"] = {rank_key(rank): Atomic(self.rng.capture())}
        if self._aside is not None:
            out[RUN] = _plain_atoms(self._aside.capture(), RUN)
        return out

    def target(self, manifest: Manifest, rank: int) -> tuple[StateDict, set[str]]:
        """Flat targets for a load, and the keys of the step that are left out on purpose (other ranks' streams)."""
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
            if isinstance(part, _Generator):
                left_out |= {f"{name}.{k}" for k in below if k != rank_key(rank)}
                below = {k: s for k, s in below.items() if k == rank_key(rank)}
            if isinstance(part, _Optimizer):
                part.dtypes = {k.removeprefix(f"{name}."): d for k, d in dtypes.items()}
            flat |= {f"{name}.{k}" if k else name: v for k, v in part.target(below).items()}
        streams = {k for k in manifest.values if k.startswith("rng.")}
        # rank 0's stream holds the run's seed, from which those of a changed world are derived
        mine = f"rng.{rank_key(rank if manifest.world_size > rank else 0)}"
        if mine in streams:
            flat[mine] = None
        if RUN in manifest.values and self._aside is not None:
            flat[RUN] = None
        elif RUN in manifest.values:
            left_out.add(RUN)
        return flat, left_out | (streams - {mine})

    def apply(self, flat: StateDict, *, step: int, rank: int, world_then: int, world_now: int) -> str:
        """Put a loaded flat dict into the live objects, random streams last; says how streams were made.

        Returns "restored" where each rank got its own streams, "derived" where the number of ranks changed.
        """
        for name, part in self._parts.items():
            if name in self.absent:
                continue
            loaded = {k.removeprefix(name).removeprefix("."): v for k, v in flat.items()
                      if k == name or k.startswith(f"{name}.")}  # fmt: skip
            if isinstance(part, _Generator):
                if rank_key(rank) not in loaded:
                    raise Mismatch(f"{name}: the step has no generator state of rank {rank}",
                                   hint="per-rank generators cannot be carried to another number of ranks")  # fmt: skip
                loaded = {"": loaded[rank_key(rank)]}
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
        return tuple(k for k, part in self._parts.items() if k not in known and not isinstance(part, _Module))

    def restore_rng(self) -> None:
        """Set the random streams again to what the last load gave them; no effect on a fresh run.

        For whoever builds a data iterator after the load, since building one draws numbers.
        """
        self.rng.again()

    def value_digests(self, captured: StateDict) -> dict[str, str]:
        """A digest of every value that must be the same on all ranks, from what ``capture`` returned."""
        own = {"rng", *(name for name, part in self._parts.items() if isinstance(part, _Generator))}
        return {
            k: value_digest(v.value)
            for k, v in _atoms(captured)
            if not (k.split(".")[0] in own and _PER_RANK.fullmatch(k.split(".")[-1]))
        }

    def own_values(self, rank: int) -> dict[str, Any]:
        """The random streams and generators of this rank as they are now, by their keys in a step."""
        own = {name: part.capture() for name, part in self._parts.items() if isinstance(part, _Generator)}
        return {f"{k}.{rank_key(rank)}": v.value for k, v in own.items()} | {
            f"rng.{rank_key(rank)}": self.rng.capture()
        }

    def buffers(self) -> set[str]:
        """Keys of the modules' buffers, which may differ between replicas (BatchNorm under DDP): rank 0's are saved."""
        return {
            f"{name}.{canonical(part.module, raw)}"
            for name, part in self._parts.items()
            if isinstance(part, _Module)
            for raw, _ in part.module.named_buffers()
        }


def keepers(source: Any) -> tuple[Any, ...]:
    """What may keep the position of a data source: itself, its batch sampler, its sampler; None where it has none."""
    return source, getattr(source, "batch_sampler", None), getattr(source, "sampler", None)


def rank_key(rank: int) -> str:
    """How a per-rank entry is named."""
    return f"rank{rank:05d}"


# --- kinds ----------------------------------------------------------------------------------------------------


def _part(name: str, obj: Any, modules: Mapping[str, torch.nn.Module]) -> Part:
    if isinstance(obj, torch.nn.Module):
        return _Module(name, obj)
    if isinstance(obj, torch.optim.Optimizer):
        return _Optimizer(name, obj, modules)
    if isinstance(obj, torch.Generator):
        return _Generator(obj)
    for candidate in keepers(obj):
        if callable(getattr(candidate, "state_dict", None)) and callable(getattr(candidate, "load_state_dict", None)):
            return _Stateful(candidate)
    if isinstance(obj, (*PLAIN, list, tuple, dict, torch.Tensor)):
        return _Plain(obj)
    hint = "pass an object that can save and load its state, or plain numbers, text, lists, dicts, tensors"
    if hasattr(obj, "__iter__") and hasattr(obj, "dataset"):
        hint = (
            "build it with a sampler that has a position: DataLoader(dataset, batch_sampler=elastic.ElasticSampler(…))"
        )
    raise Refused(
        f"State({name}=…): {type(obj).__name__} has no state_dict/load_state_dict and is no plain data", hint=hint
    )


class _Module:
    def __init__(self, name: str, module: torch.nn.Module) -> None:
        if any(type(m).__name__ == "FullyShardedDataParallel" for m in module.modules()):
            raise Refused(
                f"State({name}=…): FSDP1 is not supported",
                hint="use torch.distributed.fsdp.fully_shard (FSDP2)",
            )
        self.module = module

    def _named(self) -> Iterator[tuple[str, str, Any]]:
        for raw, value in self.module.state_dict().items():
            yield canonical(self.module, raw), raw, value

    def capture(self) -> StateDict:
        return {k: v if isinstance(v, torch.Tensor) else Atomic(v) for k, _, v in self._named()}

    def target(self, saved: Mapping[str, torch.Size]) -> StateDict:
        return {k: v if isinstance(v, torch.Tensor) else None for k, _, v in self._named()}

    def apply(self, loaded: StateDict) -> None:
        extra = {raw: loaded[k] for k, raw, v in self._named() if not isinstance(v, torch.Tensor)}
        if extra:
            self.module.load_state_dict(extra, strict=False)


class _Optimizer:
    """An optimizer, its parameters named by the modules they are found in."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, modules: Mapping[str, torch.nn.Module]) -> None:
        self.optimizer, self.dtypes = optimizer, dict[str, str]()
        self._name, self._modules = name, modules
        self._match()

    def _match(self) -> None:
        """Name the parameters of the moment: groups may have been added since the State was built."""
        found: dict[int, tuple[str, str]] = {}
        for owner, module in self._modules.items():
            for raw, p in module.named_parameters():
                found.setdefault(id(p), (owner, canonical(module, raw)))
        mine = list(self._params())
        if lost := sum(id(p) not in found for p in mine):
            raise Refused(
                f"State({self._name}=…): {lost} of {len(mine)} parameters of the optimizer are in no module of it",
                hint="pass the module too, and build the optimizer after fully_shard/DDP have replaced its parameters",
            )
        owners = {found[id(p)][0] for p in mine}
        self.names = {id(p): found[id(p)][1] if len(owners) == 1 else ".".join(found[id(p)]) for p in mine}

    def _params(self) -> Iterator[torch.nn.Parameter]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def capture(self) -> StateDict:
        self._match()
        state = {
            self.names[id(p)]: {
                k: v if isinstance(v, torch.Tensor) else Atomic(v) for k, v in self.optimizer.state[p].items()
            }
            for p in self._params()
            if self.optimizer.state.get(p)
        }
        groups = [
            {
                **{k: v for k, v in g.items() if k != "params"},
                "params": [self.names[id(p)] for p in g["params"]],
            }
            for g in self.optimizer.param_groups
        ]
        return {"state": state, "param_groups": Atomic(groups)}

    def target(self, saved: Mapping[str, torch.Size]) -> StateDict:
        self._match()
        flat: StateDict = {"param_groups": None}
        for p in self._params():
            prefix = f"state.{self.names[id(p)]}."
            for key, size in saved.items():
                if key.startswith(prefix) and "." not in key[len(prefix) :]:
                    flat[key] = self._empty(p, size, self.dtypes[key]) if key in self.dtypes else None
        return flat

    @staticmethod
    def _empty(p: torch.nn.Parameter, size: torch.Size, dtype: str) -> torch.Tensor:
        kind = getattr(torch, dtype)
        if size == p.size():  # sharded and placed like its parameter
            return torch.empty_like(p, dtype=kind, requires_grad=False)
        return torch.empty(size, dtype=kind)

    def apply(self, loaded: StateDict) -> None:
        params = list(self._params())
        number = {self.names[id(p)]: n for n, p in enumerate(params)}
        groups = [dict(g) for g in loaded["param_groups"]]
        for g, live in zip(groups, self.optimizer.param_groups, strict=False):
            if g["params"] != [self.names[id(p)] for p in live["params"]]:
                raise Mismatch("the optimizer's parameter groups hold other parameters than in the step",
                               hint="build the groups in the same order as when the step was saved")  # fmt: skip
            g["params"] = [number[n] for n in g["params"]]
        if len(groups) != len(self.optimizer.param_groups):
            raise Mismatch(
                f"the step has {len(groups)} parameter groups, the optimizer {len(self.optimizer.param_groups)}"
            )
        state: dict[int, dict[str, Any]] = {}
        for name, n in number.items():
            prefix = f"state.{name}."
            mine = {
                k[len(prefix) :]: v for k, v in loaded.items() if k.startswith(prefix) and "." not in k[len(prefix) :]
            }
            if mine:
                state[n] = mine
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        for n, p in enumerate(params):  # torch casts floating state to the parameter's dtype: undo, it loses bits
            for k, v in state.get(n, {}).items():
                live_value = self.optimizer.state[p][k]
                if isinstance(v, torch.Tensor) and live_value.dtype != v.dtype:
                    self.optimizer.state[p][k] = v.to(live_value.device)


class _Stateful:
    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def capture(self) -> Atomic:
        return Atomic(self.obj.state_dict())

    def target(self, saved: Mapping[str, torch.Size]) -> StateDict:
        return {"": None}

    def apply(self, loaded: StateDict) -> None:
        self.obj.load_state_dict(loaded[""])


class _Plain:
    def __init__(self, value: Any) -> None:
        self.value = value

    def capture(self) -> Atomic:
        return Atomic(self.value)

    def target(self, saved: Mapping[str, torch.Size]) -> StateDict:
        return {"": None}

    def apply(self, loaded: StateDict) -> None:
        self.value = loaded[""]


class _Generator:
    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def capture(self) -> Atomic:
        return Atomic(self.generator.get_state())

    def target(self, saved: Mapping[str, torch.Size]) -> StateDict:
        return dict.fromkeys(saved)

    def apply(self, loaded: StateDict) -> None:
        self.generator.set_state(loaded[""])


def canonical(module: torch.nn.Module, raw: str) -> str:
    """The name of a parameter without the layers that DDP, torch.compile and activation checkpointing put around it."""
    at: Any = module
    parts = []
    for part in raw.split("."):
        wrapper = type(at).__name__
        at = getattr(at, part, None)
        if (part == "module" and wrapper == "DistributedDataParallel") or part in (
            "_orig_mod",
            "_checkpoint_wrapped_module",
        ):
            continue
        parts.append(part)
    return ".".join(parts)


# --- values ---------------------------------------------------------------------------------------------------


def _atoms(nested: Any, path: str = "") -> Iterator[tuple[str, Atomic]]:
    if isinstance(nested, Atomic):
        yield path, nested
    elif isinstance(nested, dict):
        for k, v in nested.items():
            yield from _atoms(v, f"{path}.{k}" if path else k)


def _plain_atoms(content: Any, path: str) -> Any:
    """The captured content with every value made plain, or refused by name."""
    if isinstance(content, Atomic):
        return Atomic(_plain(content.value, path))
    return {k: _plain_atoms(v, f"{path}.{k}") for k, v in content.items()} if isinstance(content, dict) else content


def _plain(value: Any, path: str) -> Any:
    """A value as it will be read back. Exact types only: a subclass would be saved, and refused by every load."""
    kind = type(value)
    if kind in PLAIN or kind is torch.Size or (isinstance(value, torch.Tensor) and not isinstance(value, DTensor)):
        return value
    if isinstance(value, np.generic):  # what a schedule written with numpy leaves in a learning rate
        return value.item()
    if kind in CONTAINERS:
        if isinstance(value, dict):
            return kind((_plain(k, f"{path} key"), _plain(v, f"{path}[{k!r}]")) for k, v in value.items())
        return kind(_plain(v, f"{path}[{n}]") for n, v in enumerate(value))
    raise Refused(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored safely",
        hint="keep numbers, text, bytes, tensors, lists, tuples, sets and dicts in what state_dict() returns",
    )


def value_digest(value: Any) -> str:
    """XXH3-128 of plain data, independent of how objects are shared in memory. 0.0 and -0.0, 1 and True differ."""
    h = xxhash.xxh3_128()
    _feed(value, h.update)
    return h.hexdigest()


def _feed(value: Any, update: Callable[[bytes], None]) -> None:
    if isinstance(value, (Mapping, set, frozenset)):  # neither has an order that ranks would share
        entries = value.items() if isinstance(value, Mapping) else value
        update(f"{type(value).__name__}{len(value)}".encode())
        for entry in sorted(map(value_digest, entries)):
            update(entry.encode())
    elif isinstance(value, (list, tuple)):
        update(f"{type(value).__name__}{len(value)}".encode())
        for v in value:
            _feed(v, update)
    elif isinstance(value, torch.Tensor):
        update(f"t{value.dtype}{tuple(value.shape)}".encode())
        if value.numel():
            update(memoryview(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    elif isinstance(value, float) and math.isnan(value):
        update(b"nan")
    else:
        update(f"{type(value).__name__}:{value!r};".encode())


@dataclass(frozen=True, slots=True)
class Differing:
    """A value that is not the same on all ranks."""

    key: str
    ranks: tuple[int, ...]


def differing_values(per_rank: Iterable[Mapping[str, str]]) -> list[Differing]:
    """The replicated values whose digests differ from rank 0's, with the ranks. Pure."""
    maps = list(per_rank)
    off = ((key, tuple(r for r, m in enumerate(maps) if m.get(key) != maps[0].get(key))) for key in set().union(*maps))
    return sorted((Differing(key, ranks) for key, ranks in off if ranks), key=lambda d: d.key)
