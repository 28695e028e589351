"""A local disk that is full: a small file system of its own for the run, filled up by the drill."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from drills import leftovers
from drills.errors import HarnessBroken, NotPossible
from drills.faults import Base, Evidence, Site

_LEAST_MIB = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class FullDisk(Base):
    """The run's checkpoints live on a tmpfs of its own (needs the right to mount); a ballast file takes all room."""

    name: str = "full-disk"
    timeout_s: float = 20.0
    needs: str = "local"

    def setup(self, site: Site) -> dict[str, str]:
        """Mount; four times what an undisturbed run leaves has room."""
        folder = _local(site)
        folder.mkdir(parents=True, exist_ok=True)
        size = max(_LEAST_MIB, 4 * site.step_bytes >> 20)
        mark = f"torchrelay-{site.owner.partition(':')[0]}"
        with leftovers.noting(site.owner, mount=str(folder)):
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size}m,mode=0700", mark, str(folder)],
                capture_output=True, text=True, check=False, timeout=self.timeout_s,
            )  # fmt: skip
        if done.returncode != 0:
            raise NotPossible("no file system of its own could be mounted for the run, so no disk can be filled",
                              facts=[("mount said", done.stderr.strip()[:200])],
                              hint="run as root, or with the right to mount (CAP_SYS_ADMIN)")  # fmt: skip
        return {}

    def inject(self, site: Site) -> Evidence:
        """Fill it to the last byte."""
        t, ballast = time.time(), self._ballast(site)
        block = bytes(1 << 20)
        with ballast.open("wb", buffering=0) as f:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while f.write(memoryview(block)[:size]) == size:
                        pass
                except OSError:
                    continue
        if free := _free(ballast.parent):
            raise HarnessBroken(f"the disk of the run still has {free} bytes")
        return {"t": t, "rank": -1, "bytes": ballast.stat().st_size,
                "said": f"the disk of the run was filled: {ballast.stat().st_size >> 20} MiB of ballast, 0 bytes free"
                }  # fmt: skip

    def heal(self, site: Site) -> str:
        """Take the ballast away."""
        ballast = self._ballast(site)
        if not ballast.exists():
            return "nothing to undo"
        ballast.unlink()
        return f"the ballast is gone, {_free(ballast.parent) >> 20} MiB free"

    def clear(self, site: Site) -> None:
        """Keep what the run has left, and unmount."""
        folder = _local(site)
        if not os.path.ismount(folder):
            return
        kept = folder.with_name(f"{folder.name}.kept")
        shutil.copytree(folder, kept, dirs_exist_ok=True)
        leftovers.unmount(str(folder), site.owner)
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        shutil.rmtree(kept)

    @staticmethod
    def _ballast(site: Site) -> Path:
        return _local(site) / "ballast"


def _local(site: Site) -> Path:
    if site.local is None:
        raise NotPossible("the run keeps its checkpoints on no local disk", facts=[("checkpoints", site.url)])
    return site.local


def _free(folder: Path) -> int:
    seen = os.statvfs(folder)
    return seen.f_bavail * seen.f_frsize
