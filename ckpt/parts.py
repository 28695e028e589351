"""The kinds of entries that are the same on every rank: how each is captured and loaded into."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from ckpt.engine.planner import Atomic, StateDict
from ckpt.errors import Mismatch, Refused

Tensors = Mapping[str, torch.Size]


class Part(Protocol):
    """One entry of a state."""

    def capture(self) -> StateDict | Atomic:
        """Live content: nested dicts of tensors and ``Atomic`` values, or one ``Atomic``."""
        ...

    def target(self, saved: Tensors) -> StateDict:
        """Flat dict of tensors to fill and None for values, by key below this entry; ``saved`` is what the step has."""
        ...

    def apply(self, loaded: StateDict) -> None:
        """Put what was loaded into the live object; tensors of a module are in place already."""
        ...


def keepers(source: Any) -> tuple[Any, ...]:
    """What may keep the position of a data source: itself, its batch sampler, its sampler; None where it has none.

    One that is told of completed steps comes first: what others count, they count when it is fetched.
    """
    found = source, getattr(source, "batch_sampler", None), getattr(source, "sampler", None)
    return tuple(sorted(found, key=lambda o: not callable(getattr(o, "advance", None))))


class Module:
    """A module; its tensors are filled in place."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        if any(type(m).__name__ == "FullyShardedDataParallel" for m in module.modules()):
            raise Refused(
                f"State({name}=…): FSDP1 is not supported",
                hint="use torch.distributed.fsdp.fully_shard (FSDP2)",
            )
        self.module = module
        self._unsaved: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}

    def forgotten(self) -> list[str]:
        """Buffers that no step holds (``persistent=False``) and that were written into since the last call."""
        wrong = []
        for path, owner in self.module.named_modules():
            for key in owner._non_persistent_buffers_set:
                buffer, name = owner._buffers.get(key), f"{path}.{key}" if path else key
                if buffer is None or buffer.is_inference():
                    continue
                version, last = buffer._version, self._unsaved.get(name)
                if last is not None and last[0]() is buffer and last[1] != version:
                    wrong.append(canonical(self.module, name))
                self._unsaved[name] = weakref.ref(buffer), version
        return wrong

    def _named(self) -> Iterator[tuple[str, str, Any]]:
        for raw, value in self.module.state_dict().items():
            yield canonical(self.module, raw), raw, value

    def capture(self) -> StateDict:
        """See ``Part``."""
        return {k: v if isinstance(v, torch.Tensor) else Atomic(v) for k, _, v in self._named()}

    def target(self, saved: Tensors) -> StateDict:
        """See ``Part``."""
        return {k: v if isinstance(v, torch.Tensor) else None for k, _, v in self._named()}

    def apply(self, loaded: StateDict) -> None:
        """See ``Part``."""
        extra = {raw: loaded[k] for k, raw, v in self._named() if not isinstance(v, torch.Tensor)}
        if extra:
            self.module.load_state_dict(extra, strict=False)


class Optimizer:
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
        """See ``Part``."""
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

    def target(self, saved: Tensors) -> StateDict:
        """See ``Part``."""
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
        """See ``Part``."""
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


class Stateful:
    """Anything with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def capture(self) -> Atomic:
        """See ``Part``."""
        return Atomic(self.obj.state_dict())

    def target(self, saved: Tensors) -> StateDict:
        """See ``Part``."""
        return {"": None}

    def apply(self, loaded: StateDict) -> None:
        """See ``Part``."""
        self.obj.load_state_dict(loaded[""])


class Plain:
    """Numbers, text, containers, tensors: what ``state["name"]`` gives and sets."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def capture(self) -> Atomic:
        """See ``Part``."""
        return Atomic(self.value)

    def target(self, saved: Tensors) -> StateDict:
        """See ``Part``."""
        return {"": None}

    def apply(self, loaded: StateDict) -> None:
        """See ``Part``."""
        self.value = loaded[""]


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
