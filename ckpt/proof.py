"""The proof of a restore: the fingerprints of the live tensors, after all was applied, against those of the manifest.

Block checksums prove that the right bytes were read; this proves that they arrived: in the right tensor, at the right
place, on whatever mesh, through whatever an optimizer does with a state that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ckpt.engine.fingerprint import report
from ckpt.errors import NotProven
from ckpt.format.fingerprint import PREFIX, Box, Partial, covers, digest, merge
from ckpt.format.manifest import Manifest
from ckpt.state import State

Report = Mapping[str, Mapping[Box, Partial]]


def live_report(state: State, rank: int) -> Report:
    """The partial fingerprints of all tensors that this rank holds of a state, where they are. No collectives."""
    return report(_tensors(state.capture(rank)))


def prove(manifest: Manifest, reports: Sequence[Report]) -> str:
    """Compare what the ranks hold with what was saved; says how much of it is proven. Coordinator only.

    A tensor that was saved without a fingerprint, or with one of a kind that this version does not know, is *not
    verified*. Raises ``NotProven`` naming every tensor that differs, and ranks whose replicas differ.
    """
    total, differing = merge(reports)
    facts = [("replicas", f"{d.name} {d.box}: differs on rank {', '.join(map(str, d.ranks))}") for d in differing]
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
            proven += 1
    if facts:
        raise NotProven(
            f"{len(facts)} of {len(manifest.tensors)} tensors are not what was saved, though every stored byte is good",
            facts=facts[:20],
            hint="do not train on this state; an object of the State changed what it was given, or memory is bad",
        )
    missing = len(manifest.tensors) - proven
    return f"{proven} tensors proven" + (f", {missing} not verified (saved without a fingerprint)" if missing else "")


def _tensors(nested: Mapping[str, Any], path: str = "") -> dict[str, torch.Tensor]:
    flat: dict[str, torch.Tensor] = {}
    for key, value in nested.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, torch.Tensor):
            flat[name] = value
        elif isinstance(value, Mapping):
            flat |= _tensors(value, name)
    return flat
