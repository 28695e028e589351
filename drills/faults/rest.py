"""Damage to what lies on the storage, done while the job is down."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from drills.errors import HarnessBroken
from drills.faults import Base, Evidence, Site
from drills.faults.process import end_job

KINDS = ("flip", "truncate", "delete", "swap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage(Base):
    """The job is killed, data of its newest committed steps are damaged, and the command is started again.

    ``which`` "newest" damages one step, "all-but-oldest" every one but the oldest. ``kind`` "flip" turns one bit in
    the middle of the largest object over, "truncate" cuts it in half, "delete" removes it, "swap" puts the bytes of
    another step's object of the same name in its place (needs an older step).
    """

    name: str = "damage"
    which: str = "newest"
    kind: str = "flip"
    timeout_s: float = 60.0
    then: str = "start again"

    def __post_init__(self) -> None:
        """Refuse words that mean nothing, with ``ValueError``."""
        if self.kind not in KINDS:
            raise ValueError(f"kind = {self.kind!r}: one of {', '.join(KINDS)}")
        if self.which not in ("newest", "all-but-oldest"):
            raise ValueError(f"which = {self.which!r}: newest or all-but-oldest")

    def inject(self, site: Site) -> Evidence:
        """Kill, damage, read back that it is damaged."""
        from drills import oracle

        evidence = end_job(site)
        storage = oracle.Storage(site.url, site.options)
        steps = list(oracle.by_step(storage.commits()).values())
        if len(steps) < 2:
            raise HarnessBroken(f"only {len(steps)} committed steps are there: nothing would be left to fall back to")
        bad = steps[-1:] if self.which == "newest" else steps[1:]
        said = [self._harm(storage, commit.folder, steps[0].folder) for commit in bad]
        good = steps[-1 - len(bad)]
        return {
            **evidence, "objects": said, "good_step": good.step, "gone_t": time.time(),
            "said": f"{evidence['said'].partition(';')[0]}; {', '.join(said)}; then the command was started again; "
            f"the newest good step is {good.step}",
        }  # fmt: skip

    def _harm(self, storage: Any, folder: str, other: str) -> str:
        objects = storage.objects(folder)
        if not objects:
            raise HarnessBroken(f"{folder} has no data object to damage")
        name, size = max(((n, s) for n, s in objects.items() if "/index/" not in n), key=lambda ns: (ns[1], ns[0]))
        if self.kind == "delete":
            storage.remove(name)
            return f"{name} deleted"
        before = storage.read(name)
        if self.kind == "flip":
            after = bytearray(before)
            after[size // 2] ^= 16
            what = f"a bit of byte {size // 2} of {name} flipped"
        elif self.kind == "truncate":
            after = bytearray(before[: size // 2])
            what = f"{name} cut to {size // 2} of {size} bytes"
        else:
            twin = name.replace(folder, other)
            after = bytearray(storage.read(twin))
            what = f"{name} replaced by {twin}"
        storage.write(name, bytes(after))
        if storage.read(name) != after or after == before:
            raise HarnessBroken(f"{name} was not damaged: it reads as before")
        return what
