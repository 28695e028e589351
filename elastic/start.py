"""Where a run begins: the newest valid step, zero, an older step, or zero with the weights of another run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

import ckpt
from ckpt.errors import Refused
from elastic import membership

_log = logging.getLogger("elastic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a run was asked to begin with; ``elastic.Run`` says what each means. All ranks ask the same."""

    fresh: bool = False
    start: int | None = None
    skip: int = 0
    warm_start: str | None = None
    init: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if self.skip and self.start is None:
            raise Refused(f"skip={self.skip} leaves out batches after a step to go back to", hint="start=STEP, skip=…")
        if self.skip < 0:
            raise Refused(f"skip={self.skip}: give a number of global batches")
        if self.warm_start is not None and self.start is not None:
            raise Refused("warm_start begins a new run, start goes back in this one: give one of them")

    def options(self) -> dict[str, Any]:
        """For ``ckpt.open``, after the process group is set up."""
        once = f"skip={self.skip}" if self.start is not None else membership.job_name() if self.fresh else ""
        return {"fresh": self.fresh, "start": self.start, "once": once}

    def prepare(self, state: ckpt.State) -> bool:
        """Before anything is restored: whether ``init`` has been called already.

        Buffers that no step holds are set by ``init`` alone, so it is called for them even where a step is restored.
        """
        modules = _modules(state)
        for name, module in modules.items():
            tensors = [*module.named_parameters(), *module.named_buffers()]
            if empty := [k for k, t in tensors if t.is_meta]:
                raise Refused(
                    f"{len(empty)} of {len(tensors)} tensors of {name} have no memory (device meta), the first is "
                    f"{empty[0]}",
                    hint=f"{name}.to_empty(device=…) after fully_shard, and Run(…, init=…) to fill it where no step is "
                    "restored",
                )
        if self.init is None or not any(_not_saved(m) for m in modules.values()):
            return False
        self.init()
        return True

    def fill(self, state: ckpt.State, *, initialised: bool, options: Mapping[str, Any]) -> str | None:
        """Where nothing was restored: call ``init``, take over the weights; returns the checkpoint they are from."""
        if self.init is not None and not initialised:
            self.init()
        if self.warm_start is None:
            return None
        modules = _modules(state)
        if not modules:
            raise Refused("warm_start takes over weights, and the state holds no module")
        with ckpt.open(self.warm_start, **options) as other:
            loaded = other.load(ckpt.State(**modules), part=True)
        return f"{self.warm_start}, step {loaded.step}"


def _modules(state: ckpt.State) -> dict[str, nn.Module]:
    return {k: v for k, v in state.entries.items() if isinstance(v, nn.Module)}


def _not_saved(module: nn.Module) -> bool:
    """Whether it has buffers that are in no state_dict."""
    return bool({name for name, _ in module.named_buffers()} - module.state_dict().keys())
