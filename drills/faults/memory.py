"""Faults in the memory of the target: one bit of what was restored.

They are for proving that the oracle can see. Nothing in the product knows of them: a ``sitecustomize`` module on
the PYTHONPATH of the drilled run wraps the restore function once its module has been imported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from drills.errors import HarnessBroken
from drills.faults import Base, Evidence, Site
from drills.faults.planting import planted


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipRestoredBit(Base):
    """One bit of one element of the first parameter, flipped on rank 0 right after the first restore."""

    name: str = "flip-restored-bit"
    timeout_s: float = 10.0
    by_itself = True

    def setup(self, site: Site) -> dict[str, str]:
        """Put the wrapper on the path of the drilled run."""
        return planted(TORCHRELAY_FLIP=str(self._evidence(site)))

    def inject(self, site: Site) -> None:
        """Strikes by itself, when the target restores."""

    def prove(self, site: Site) -> Evidence:
        """What was flipped, as the wrapper wrote it down."""
        try:
            e: Evidence = json.loads(self._evidence(site).read_text())
        except (OSError, ValueError):
            raise HarnessBroken(
                "no bit was flipped: the target never restored through ckpt.Checkpoints.resume or dcp.load on rank 0"
            ) from None
        e["said"] = (
            f"bit {e['bit']} of {e['tensor']}{e['index']} flipped on rank 0 right after the restore:"
            f" {e['before']!r} became {e['after']!r}"
        )
        return e

    def heal(self, site: Site) -> str:
        """The flip lived in the memory of processes that have ended."""
        return "nothing to undo: it was in the memory of processes that have ended"

    @staticmethod
    def _evidence(site: Site) -> Path:
        return site.folder / "flipped.json"
