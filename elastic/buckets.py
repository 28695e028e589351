"""Pins the gradient buckets of DistributedDataParallel, so that a start adds up gradients like the one before it.

DDP lays its buckets out anew after the first iteration of a process, in the order in which gradients became ready. A
ring of three or more ranks adds an element up in an order that depends on where in its bucket it lies, so the first
step after a restart would differ in its last bits from the same step of a run that was not restarted. One iteration of
zeros, at every start, has the new lay-out made before the first step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ckpt


def pin(state: ckpt.State) -> None:
    """Called by all ranks between restoring and the first step. Gradients, buffers and weights stay as they are.

    Left alone is DDP that never lays out anew (``find_unused_parameters``), and where an iteration of zeros would be
    remembered or acted on: a static graph, a communication hook, mixed precision, hooks on gradients (an optimizer that
    steps in backward).
    """
    seen = {id(m): m for v in state.entries.values() if isinstance(v, nn.Module) for m in v.modules()}
    for ddp in seen.values():
        if isinstance(ddp, DistributedDataParallel) and _lays_out_anew(ddp):
            _lay_out(ddp)


def _lays_out_anew(ddp: DistributedDataParallel) -> bool:
    # None of these is public; a test fails when one of them is gone
    kept = ddp.find_unused_parameters or ddp.static_graph or ddp._comm_hooks or ddp.mixed_precision is not None
    kept = kept or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in ddp.parameters())
    return not kept and not ddp._has_rebuilt_buckets and not ddp._delay_all_reduce_all_params


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
