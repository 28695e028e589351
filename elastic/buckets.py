"""Pins the gradient buckets of DistributedDataParallel, so that a start adds up gradients like the one before it.

DDP lays its buckets out anew after the first iteration of a process, in the order in which gradients became ready. A
ring of three or more ranks adds an element up in an order that depends on where in its bucket it lies, so the first
step after a restart would differ in its last bits from the same step of a run that was not restarted. One iteration of
zeros, at every start, has the new lay-out made before the first step.
"""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ckpt


def pin(state: ckpt.State) -> list[str]:
    """Called by all ranks between restoring and the first step. Gradients, buffers and weights stay as they are.

    DDP is found around the state's modules, too (``State(model=ddp.module)``).

    Left alone is DDP that never lays out anew (``find_unused_parameters``), and where an iteration of zeros would be
    remembered or acted on: a static graph, a communication hook, mixed precision, hooks on gradients (an optimizer that
    steps in backward). Returned is what keeps a restart from being bit for bit then, a text each.
    """
    left = []
    for ddp in _found(state):
        if ddp.find_unused_parameters or ddp._delay_all_reduce_all_params:
            continue  # never laid out anew
        if why := _why_not(ddp):
            left.append(f"DistributedDataParallel with {why}: gradients are added up in another order after a restart")
        elif not ddp._has_rebuilt_buckets:
            _lay_out(ddp)
    return left


def _found(state: ckpt.State) -> list[DistributedDataParallel]:
    """All DDP wrappers with parameters of the state, in the order of those."""
    modules = [v for v in state.entries.values() if isinstance(v, nn.Module)]
    order = {id(p): n for n, p in enumerate(p for m in modules for p in m.parameters())}
    inside = [m for module in modules for m in module.modules() if isinstance(m, DistributedDataParallel)]
    covered = {id(p) for ddp in inside for p in ddp.parameters()}
    around: list[DistributedDataParallel] = []
    if not order.keys() <= covered:  # nothing in a module leads to the wrapper around it
        around = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
    first = {id(d): min((order.get(id(p), len(order)) for p in d.parameters()), default=len(order)) for d in around}
    more = [d for d in around if first[id(d)] < len(order) and all(d is not ddp for ddp in inside)]
    return inside + sorted(more, key=lambda d: first[id(d)])


def _why_not(ddp: DistributedDataParallel) -> str:
    """What keeps buckets from being laid out ahead; empty for nothing."""
    # None of these is public; a test fails when one of them is gone
    hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in ddp.parameters())
    reasons = {"a static graph": ddp.static_graph, "a communication hook": bool(ddp._comm_hooks),
               "mixed precision": ddp.mixed_precision is not None, "hooks on gradients": hooked}  # fmt: skip
    return next((what for what, there in reasons.items() if there), "")


def _lay_out(ddp: DistributedDataParallel) -> None:
    module, grads = ddp.module, [(p, p.grad) for p in ddp.parameters()]
    broadcast, ddp.broadcast_buffers = ddp.broadcast_buffers, False
    ddp.module = _Zero([p for p, _ in grads if p.requires_grad])
    try:
        for _ in range(2):  # the second forward makes the lay-out that the first backward has asked for
            ddp.forward().backward()  # type: ignore[no-untyped-call]
    finally:
        ddp.module, ddp.broadcast_buffers = module, broadcast
        for p, grad in grads:
            p.grad = grad


class _Zero(nn.Module):
    """Depends on every parameter, the last one last: their gradients become ready in reverse order, as DDP expects."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._all = tuple(parameters)

    def forward(self) -> Tensor:
        total = torch.zeros((), device=self._all[0].device)
        for p in self._all:
            total = total + p.flatten()[:1].sum().to(total.device, total.dtype) * 0
        return total
