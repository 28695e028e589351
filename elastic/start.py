"""Where a run begins: the newest valid step, zero, an older step, or zero with the weights of another run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

import ckpt
from ckpt.errors import Mismatch, NotFound, Refused
from elastic import membership


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a run was asked to begin with; ``elastic.Run`` says what each means. All ranks ask the same."""

    fresh: bool = False
    start: int | None = None
    skip: int = 0
    warm_start: str | None = None
    init: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if self.skip < 0:
            raise Refused(f"skip={self.skip}: give a number of global batches")
        if self.skip and self.start is None:
            what = "1 batch" if self.skip == 1 else f"{self.skip} batches"
            raise Refused(f"skip={self.skip} needs start=STEP: it leaves out the {what} after that step",
                          hint=f"Run(…, start=STEP, skip={self.skip})")  # fmt: skip
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
        """Where nothing was restored: call ``init``, take over the weights; returns where they are from, and the proof.

        Raises ``NotFound`` where there is nothing at that URL, ``Mismatch`` where a module differs from the step's.
        """
        if self.init is not None and not initialised:
            self.init()
        if self.warm_start is None:
            return None
        modules = _modules(state)
        if not modules:
            raise Refused("warm_start takes over weights, and the state holds no module")
        with ckpt.open(self.warm_start, **options) as other:
            try:
                loaded = other.load(ckpt.State(**modules), part=True)
            except NotFound as e:
                if e.facts or other.newest_valid() is not None:
                    raise
                raise NotFound(f"warm_start={self.warm_start}: no run and no committed step there",
                               hint=f"check the URL   |   ckpt ls {self.warm_start}") from e  # fmt: skip
            except Mismatch as e:
                raise _other_modules(e, self.warm_start, modules) from e
        return f"{self.warm_start}, step {loaded.step} ({loaded.proof})"


def _other_modules(e: Mismatch, url: str, modules: Mapping[str, nn.Module]) -> Mismatch:
    """The same for somebody who wanted weights: what the step has, and how to take other names, or a part."""
    known = dict(e.facts)
    step, held = known["step"], known["its modules"]
    facts = [("in the step", held), ("in the State", ", ".join(modules))]
    return Mismatch(
        f"warm start from {url}, step {step}: {e.message}; it takes every module of the State, whole, under its name",
        facts=facts + [(k, v) for k, v in e.facts if k not in ("step", "its modules")],
        hint=f"other names: ckpt export {url}@{step} OUT --to safetensors --only 'OLD.*' [--strip OLD.], then "
        "ckpt adopt OUT NEW_URL --rename OLD=NEW, and warm_start=NEW_URL   |   only a part, such as a backbone: a step "
        "that has it as an entry of its own, and in place of warm_start "
        "Run(…, init=lambda: ckpt.open(NEW_URL).load(ckpt.State(backbone=model.backbone), part=True))",
    )


def _modules(state: ckpt.State) -> dict[str, nn.Module]:
    return {k: v for k, v in state.entries.items() if isinstance(v, nn.Module)}


def _not_saved(module: nn.Module) -> bool:
    """Whether it has buffers that are in no state_dict."""
    return bool({name for name, _ in module.named_buffers()} - module.state_dict().keys())
