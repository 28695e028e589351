"""Training whose weights do not depend on the number of ranks, to the last bit: logical shards and a fixed tree.

The global batch is cut into a fixed number of logical shards. Each is run by itself, with random streams keyed by
(seed, step, shard), and the shards' gradients are added in the order of one binary tree over their numbers, whoever
holds them: floating-point addition is not associative, so a sum that a ring or a reducer orders by ranks differs with
their number. The price is that the ranks exchange whole partial gradients (a gather in place of a ring).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckpt.errors import Mismatch, Refused
from elastic.membership import rank_and_world

Node = tuple[int, int]
"""A node of the tree: the shards [first, last) that it adds up."""

_BUCKET = 1 << 25  # bytes of gradients that one collective carries


class LogicalShards:
    """Gradient of a step as the mean over ``shards`` equal parts of the global batch, the same on any number of ranks.

    ``model`` is a module, or one in a DDP wrapper, whose reducer is then not used. ``shards`` must be a multiple of
    the number of ranks, and the global batch one of ``shards``. Used on every rank, on one thread::

        bits = elastic.LogicalShards(model, shards=8, seed=1)
        for step, batch in run.steps(until=...):
            for part in bits.parts(step, batch):      # this rank's shards; random streams are those of the shard
                bits.backward(loss_fn(model(part)))   # the mean loss over the shard's samples
            loss = bits.reduce()                      # fills .grad with the mean over all shards; the mean loss
            optim.step()

    Put it into the State, too (``State(..., bits=bits)``): a resume with other shards, another seed, thread count or
    torch release, any of which changes bits, is refused. Refused by name: sharded parameters (FSDP, tensor parallel),
    and buffers that change in a forward, such as batch normalisation's: they depend on what a rank sees.
    """

    def __init__(self, model: nn.Module, *, shards: int, seed: int = 0) -> None:
        if shards < 1:
            raise Refused(f"{shards} logical shards: give at least 1")
        self._model = model
        plain = model.module if isinstance(model, DistributedDataParallel) else model
        self._params = [p for p in plain.parameters() if p.requires_grad]
        if sharded := [n for n, p in plain.named_parameters() if isinstance(p, DTensor)]:
            raise Refused(f"{sharded[0]} is sharded over ranks, so its bits depend on their number",
                          hint="logical shards work for a plain model, and for one in DDP")  # fmt: skip
        self._buffers = dict(plain.named_buffers())
        self.shards, self.seed = shards, seed
        self._sums: list[tuple[Node, list[Tensor], Tensor]] = []
        self._used: list[bool] = []
        self._next = self._end = 0

    def parts(self, step: int, batch: Any) -> Iterator[Any]:
        """This rank's logical shards of its batch, one after the other: tensors in it are cut along dimension 0.

        While a part is worked on, torch's random streams (CPU and the current accelerator's) are those of
        (seed, step, shard); afterwards they are what they were. Raises ``Refused`` where shards, ranks and batch do not
        divide.
        """
        rank, world = rank_and_world()
        if self.shards % world:
            raise Refused(f"{self.shards} logical shards cannot be shared evenly by {world} ranks",
                          hint="use a number of ranks that divides them")  # fmt: skip
        mine = self.shards // world
        self._sums, self._next, self._end = [], rank * mine, (rank + 1) * mine
        self._used = [False] * len(self._params)
        model = self._model
        no_sync = model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()
        versions = {n: b._version for n, b in self._buffers.items()}
        for p in self._params:
            p.grad = None
        with no_sync, _streams_kept():
            for n in range(mine):
                torch.manual_seed(_mix(self.seed, step, self._next))
                yield _cut(batch, n, mine)
        if changed := [n for n, b in self._buffers.items() if b._version != versions[n]]:
            raise Refused(f"the buffer {changed[0]} changes in a forward, so bits depend on what a rank sees",
                          hint="train without it: GroupNorm for BatchNorm, frozen statistics")  # fmt: skip
        if self._next != self._end:
            raise Refused(f"{self._next - rank * mine} of {mine} parts of step {step} had a backward",
                          hint="call backward(loss) once for each part")  # fmt: skip

    def backward(self, loss: Tensor) -> None:
        """Gradients of one part; ``loss`` is its mean over the part's samples, a scalar."""
        loss.backward()  # type: ignore[no-untyped-call]
        first = self._next
        self._next += 1
        for n, p in enumerate(self._params):
            self._used[n] |= p.grad is not None
        # a zero for what had no gradient, always: zero and "none" add up to other bits (of the sign of zero)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params]
        for p in self._params:
            p.grad = None
        self._sums.append(((first, first + 1), grads, loss.detach().float().reshape(())))
        while len(self._sums) > 1 and _siblings(self._sums[-2][0], self._sums[-1][0], self.shards):
            (left, a, x), (right, b, y) = self._sums[-2:]
            self._sums[-2:] = [((left[0], right[1]), [g + h for g, h in zip(a, b, strict=True)], x + y)]

    def reduce(self) -> float:
        """Fill every parameter's ``.grad`` with the mean over all shards; returns the mean loss. On all ranks."""
        world = rank_and_world()[1]
        everybody = [self._nodes_of(r, world) for r in range(world)]
        losses = self._over_all(everybody, [[loss] for _, _, loss in self._sums])
        live = [n for n, used in enumerate(_any_rank(self._used)) if used]
        for bucket in _buckets([self._params[n] for n in live]):
            numbers = [live[i] for i in bucket]
            sums = self._over_all(everybody, [[grads[n] for n in numbers] for _, grads, _ in self._sums])
            for n, total in zip(numbers, sums, strict=True):
                self._params[n].grad = total.div_(self.shards)
        self._sums = []
        return float(losses[0]) / self.shards

    def state_dict(self) -> dict[str, Any]:
        """What bits depend on; the same on every rank."""
        return {
            "shards": self.shards,
            "seed": self.seed,
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare; ``Mismatch`` where training would go on with other bits."""
        here = self.state_dict()
        if differing := [k for k in here if state.get(k) != here[k]]:
            raise Mismatch(
                "training would go on, but not bit for bit",
                facts=[(k, f"saved with {state.get(k)}, here {here[k]}") for k in differing],
                hint="set the same (torch.set_num_threads), or build State without the logical shards",
            )

    def _nodes_of(self, rank: int, world: int) -> list[Node]:
        """What a rank's parts add up to by themselves."""
        mine = self.shards // world
        return list(_largest((0, self.shards), (rank * mine, (rank + 1) * mine)))

    def _over_all(self, everybody: list[list[Node]], mine: list[list[Tensor]]) -> list[Tensor]:
        """The sum of each tensor over all shards, in the tree's order; ``mine`` has a list a node of this rank."""
        flat = torch.stack([torch.cat([t.reshape(-1) for t in node]) for node in mine])
        held = dict(zip(everybody[0], flat, strict=True)) if len(everybody) == 1 else _gathered(everybody, flat)
        total = _tree_sum((0, self.shards), held)
        pieces = torch.split(total, [t.numel() for t in mine[0]])
        return [piece.view(t.shape).clone() for piece, t in zip(pieces, mine[0], strict=True)]


def _gathered(everybody: list[list[Node]], flat: Tensor) -> dict[Node, Tensor]:
    most = max(map(len, everybody))  # ranks may hold different numbers of nodes
    padded = torch.cat([flat, flat.new_zeros(most - len(flat), flat.shape[1])]) if len(flat) < most else flat
    out = [torch.empty_like(padded) for _ in everybody]
    dist.all_gather(out, padded.contiguous())
    return {node: rows[i] for nodes, rows in zip(everybody, out, strict=True) for i, node in enumerate(nodes)}


def _split(node: Node) -> tuple[Node, Node]:
    """The two children: the left one has the largest power of two that is smaller than the node."""
    first, last = node
    middle = first + (1 << ((last - first - 1).bit_length() - 1))
    return (first, middle), (middle, last)


def _tree_sum(node: Node, held: Mapping[Node, Tensor]) -> Tensor:
    if node in held:
        return held[node]
    left, right = _split(node)
    return _tree_sum(left, held) + _tree_sum(right, held)


def _largest(node: Node, within: Node) -> Iterator[Node]:
    """The largest nodes of the tree that lie inside a range of shards, from left to right."""
    if within[0] <= node[0] and node[1] <= within[1]:
        yield node
    elif node[0] < within[1] and within[0] < node[1]:
        for child in _split(node):
            yield from _largest(child, within)


def _siblings(left: Node, right: Node, shards: int) -> bool:
    """Whether two neighbours are the children of one node of the tree over ``shards`` shards."""
    node = (0, shards)
    while node[1] - node[0] > 1:
        children = _split(node)
        if (left, right) == children:
            return True
        node = children[0] if right[1] <= children[0][1] else children[1]
        if not (node[0] <= left[0] and right[1] <= node[1]):
            return False
    return False


def _buckets(params: Iterable[Tensor]) -> Iterator[list[int]]:
    """Numbers of parameters that share a collective: of one dtype, in order, up to ``_BUCKET`` bytes."""
    bucket: list[int] = []
    size, dtype = 0, None
    for n, p in enumerate(params):
        if bucket and (p.dtype != dtype or size + p.nbytes > _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(n)
        size, dtype = size + p.nbytes, p.dtype
    if bucket:
        yield bucket


def _any_rank(mine: list[bool]) -> list[bool]:
    """Element-wise "or" over all ranks."""
    if rank_and_world()[1] == 1 or not mine:
        return mine
    both = torch.tensor(mine, dtype=torch.uint8)
    if dist.get_backend() == "nccl":
        both = both.cuda()
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return [bool(x) for x in both.tolist()]


def _cut(batch: Any, n: int, of: int) -> Any:
    """The n-th of ``of`` equal parts of everything in a batch that has samples along dimension 0."""
    if isinstance(batch, Tensor):
        if batch.dim() == 0 or len(batch) % of:
            raise Refused(f"a batch of shape {tuple(batch.shape)} cannot be cut into {of} equal parts")
        size = len(batch) // of
        return batch[n * size : (n + 1) * size]
    if isinstance(batch, Mapping):
        return {k: _cut(v, n, of) for k, v in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [_cut(v, n, of) for v in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise Refused(f"a batch with a {type(batch).__name__} in it cannot be cut into parts", hint="give tensors")


@contextlib.contextmanager
def _streams_kept() -> Iterator[None]:
    """torch's random streams are afterwards what they were, the current accelerator's, too."""
    device = [torch.accelerator.current_device_index()] if torch.accelerator.is_available() else []
    with torch.random.fork_rng(devices=device):
        yield


def _mix(*numbers: int) -> int:
    """One seed of several numbers: splitmix64 (Steele, Lea, Flood 2014) over them."""
    x = 0
    for n in numbers:
        x = (x + n + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        x ^= x >> 31
    return x & 0x7FFFFFFFFFFFFFFF
