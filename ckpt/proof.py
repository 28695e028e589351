"""The proof of a restore: the fingerprints of the live tensors, after all was applied, against those of the manifest.

Block checksums prove that the right bytes were read; this proves that they arrived: in the right tensor, at the right
place, on whatever mesh, through whatever an optimizer does with a state that it is given.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckpt.engine.fingerprint import boxes, report
from ckpt.engine.frame import owned, raw_view
from ckpt.engine.planner import Snapshot, dtype_name
from ckpt.engine.reader import ObjectReader
from ckpt.errors import CkptError, NotProven
from ckpt.format.blocks import Item, row_span
from ckpt.format.digest import digest as digest_of
from ckpt.format.fingerprint import PREFIX, Box, Partial, covers, digest, merge
from ckpt.format.manifest import Manifest
from ckpt.state import State
from ckpt.values import value_digest

MAX_COMPARED = 5  # tensors whose first difference a rank looks for
PIECE_BYTES = 8 << 20  # compared at once
Report = Mapping[str, Mapping[Box, Partial]]


def live_report(state: State, rank: int) -> Report:
    """The partial fingerprints of all tensors that this rank holds of a state, where they are. No collectives."""
    return report(_tensors(state.capture_tensors()))


@dataclass(frozen=True, slots=True)
class Compared:
    """What became of the proof: ``differing`` tensors by name, facts about them, and how many were equal.

    ``streams`` are random streams that are not those of their rank.
    """

    tensors: int
    proven: int
    differing: tuple[str, ...]
    facts: list[tuple[str, str]]
    streams: list[str]

    def __str__(self) -> str:
        missing = self.tensors - self.proven - len(self.differing)
        return f"{self.proven} tensors proven" + (
            f", {missing} not verified (saved without a fingerprint)" if missing else ""
        )

    def refusal(self, where: Sequence[Sequence[str]]) -> NotProven:
        """The error that names them; ``where`` is what each rank has found out by ``first_differences``."""
        found = [("first difference", f"{text} (on rank {r})") for r, texts in enumerate(where) for text in texts]
        if self.differing and not found:
            found = [("compared again", "each stored byte is what is in memory: the recorded fingerprints are wrong")]
        what = [f"{len(self.differing)} of {self.tensors} tensors"] if self.differing else []
        what += [f"the random streams of {len(self.streams)} ranks"] if self.streams else []
        return NotProven(
            f"{' and '.join(what)} are not what was saved, though every stored byte is good",
            facts=[*self.facts[:20], *found[:20], *(("stream", text) for text in self.streams[:20])],
            hint="do not train on this state; an object of the State changed what it was given, or memory is bad",
        )


def compare(manifest: Manifest, reports: Sequence[Report], streams: Sequence[Sequence[str]]) -> Compared:
    """Compare what the ranks hold with what was saved; ``streams`` are what ``wrong_streams`` found. Coordinator only.

    A tensor that was saved without a fingerprint, or with one of a kind that this version does not know, is *not
    verified*. Replicas that differ are named by rank.
    """
    total, unequal = merge(reports)
    facts = [("replicas", f"{d.name} {d.box}: differs on rank {', '.join(map(str, d.ranks))}") for d in unequal]
    differing = dict.fromkeys(d.name for d in unequal if d.name in manifest.tensors)
    proven = 0
    for name, saved in manifest.tensors.items():
        if saved.fingerprint is None or not saved.fingerprint.startswith(PREFIX):
            continue
        part = total.get(name, Partial())
        if not covers(saved.shape, part):
            facts.append(("differs", f"{name} {saved.shape}: the ranks hold {part.elements} elements of it"))
        elif (found := digest(saved.dtype, saved.shape, part)) != saved.fingerprint:
            holders = [str(r) for r, held in enumerate(reports) if name in held]
            facts.append(("differs", f"{name}: {found}, saved {saved.fingerprint} (on rank {', '.join(holders)})"))
        else:
            proven += name not in differing
            continue
        differing[name] = None
    wrong = [text for of_rank in streams for text in of_rank]
    return Compared(len(manifest.tensors), proven, tuple(differing), facts, wrong)


def wrong_streams(state: State, rank: int, reader: ObjectReader) -> list[str]:
    """Random streams of this rank that are not what the step has for it. For a load on as many ranks as then."""
    saved = reader.manifest.values
    out = []
    for key, value in state.own_values(rank).items():
        if key not in saved:
            continue
        encoded = io.BytesIO()
        torch.save(value, encoded)
        found = digest_of(encoded.getbuffer())
        # the same value may have more than one encoding: only what is in it counts
        if found != saved[key].digest and (parts := _unequal(value, reader.value(key))):
            whose = [k for k, v in saved.items() if v.digest == found]
            out.append(f"{key}: {', '.join(parts)} differ" + (f", it is {whose[0]}" if whose else ""))
    return out


def _unequal(live: Any, saved: Any) -> list[str]:
    """Names of the streams that differ. A device more or less than then is none."""
    if not isinstance(live, dict) or not isinstance(saved, dict):
        return [] if value_digest(live) == value_digest(saved) else ["states"]
    names = [k for k in live.keys() & saved.keys() - {"seed"} if k != "devices"]
    devices = list(zip(live.get("devices", []), saved.get("devices", []), strict=False))
    wrong = sorted(k for k in names if value_digest(live[k]) != value_digest(saved[k]))
    return wrong + [f"device {n}" for n, (a, b) in enumerate(devices) if value_digest(a) != value_digest(b)]


def first_differences(state: State, rank: int, names: Sequence[str], reader: ObjectReader) -> list[str]:
    """Where each of a few tensors first differs from what is stored, as far as this rank holds them.

    Reads what is stored again, block by block, in little memory, by other code than that which restored it.
    """
    live = _tensors(state.capture_tensors())
    out = []
    for name in [n for n in names if n in live][:MAX_COMPARED]:
        try:
            found = next(_differences(name, live[name], reader), None)
        except CkptError as e:  # it only tells more of what is known to be wrong
            found = f"{name} cannot be compared: {e.message}"
        out += [found] if found else []
    return out


def _differences(name: str, tensor: torch.Tensor, reader: ObjectReader) -> Iterator[str]:
    for local, at in boxes(tensor):
        for item in reader.chunks(name):
            assert item.offsets is not None
            lo = [max(a, o) for a, o in zip(at, item.offsets, strict=True)]
            sizes = [min(a + n, o + m) - b
                     for a, n, o, m, b in zip(at, local.shape, item.offsets, item.shape, lo, strict=True)]  # fmt: skip
            if min(sizes, default=1) <= 0:
                continue
            if dtype_name(local.dtype) != item.dtype:
                yield f"{name} is {dtype_name(local.dtype)} in memory, {item.dtype} in the step"
                return
            inside = [b - o for b, o in zip(lo, item.offsets, strict=True)]
            mine = local
            for d, (b, a, n) in enumerate(zip(lo, at, sizes, strict=True)):
                mine = mine.narrow(d, b - a, n)
            yield from _chunk_differences(name, mine, item, inside, reader)


def _chunk_differences(
    name: str, mine: torch.Tensor, item: Item, inside: Sequence[int], reader: ObjectReader
) -> Iterator[str]:
    """Differences between a part of a stored chunk, which begins ``inside`` it, and what is in memory of it."""
    assert item.offsets is not None
    z = mine.element_size()
    first, rows = (inside[0], mine.shape[0]) if item.shape else (0, 1)
    step = max(1, PIECE_BYTES // max(1, math.prod(item.shape[1:]) * z))
    cut = tuple(slice(b, b + n) for b, n in zip(inside[1:], mine.shape[1:], strict=True))
    for row in range(0, rows, step):
        count = min(step, rows - row)
        payload = reader.fetch(item, *row_span(item.shape, z, first + row, count))
        saved = np.frombuffer(payload, np.uint8).reshape(*((count, *item.shape[1:]) if item.shape else ()), z)
        saved = saved[(slice(None), *cut)] if item.shape else saved
        part = mine.narrow(0, row, count) if item.shape else mine
        here = np.frombuffer(raw_view(owned(part)), np.uint8).reshape(saved.shape)
        for place in np.argwhere((saved != here).any(-1))[:1]:
            index = [int(i) for i in place]
            in_chunk = [i + b for i, b in zip(index, [first + row, *inside[1:]], strict=False)]
            flat = int(np.ravel_multi_index(in_chunk, item.shape)) if item.shape else 0
            shown = [torch.frombuffer(bytearray(side[tuple(index)].tobytes()), dtype=mine.dtype).item()
                     for side in (here, saved)]  # fmt: skip
            where = [i + o for i, o in zip(in_chunk, item.offsets, strict=True)]
            yield (
                f"{name}{where}: {shown[0]} in memory, {shown[1]} in the step, "
                f"block {flat * z // item.block_bytes} of {item.block_count} in {item.object}"
            )


def check_untorn(step: int, captured: Mapping[str, Any], snapshot: Snapshot) -> None:
    """Compare the live tensors with the copy that was made of them, on the thread that made it.

    Costs two fingerprints of the rank's share of the state, of which the save needs one anyway. Raises ``NotProven``.
    """
    staged = snapshot.parts()
    live = {
        (name, box): part
        for name, boxes in report(_tensors(captured)).items()
        for box, part in boxes.items()
        if name in staged  # what another rank's plan holds of a replica is not staged here
    }
    torn = sorted({name for (name, box), part in live.items() if staged[name].get(box) != part})
    if torn:
        raise NotProven(
            f"step {step}: the copy of {len(torn)} tensors is not what is in memory",
            facts=[("differs", name) for name in torn[:20]],
            hint="something changes the state while it is copied: another thread or stream, or memory is bad",
        )


def _tensors(nested: Mapping[str, Any], path: str = "") -> dict[str, torch.Tensor]:
    flat: dict[str, torch.Tensor] = {}
    for key, value in nested.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, torch.Tensor):
            flat[name] = value
        elif isinstance(value, Mapping):
            flat |= _tensors(value, name)
    return flat
