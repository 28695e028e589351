"""The installation: which ``ckpt`` a script gets, who else owns the name, versions, optional parts."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import ckpt
from ckpt.tools.doctor.finding import Checked

PACKAGES = ("ckpt", "elastic", "drills")
DISTRIBUTION = "torchrelay"
NEEDED = ("torch", "numpy", "xxhash", "click", "rich")
OPTIONAL = {
    "obstore": "s3://, gs:// and az:// at full speed",
    "fsspec": "any other URL",
    "s3fs": "s3:// through fsspec, AWS profiles, and what doctor asks of a bucket",
    "zstandard": "compressed steps",
    "psutil": "what a process and its host use",
}  # fmt: skip
_FIND = "import importlib.util as u,sys\nfor n in sys.argv[1:]:\n s=u.find_spec(n)\n print(s and s.origin or '')"


def look() -> list[Checked]:
    """Everything, in the order in which it is shown."""
    return [*_imports(), *_owners(), *_versions()]


def _imports() -> Iterator[Checked]:
    """Ask a fresh interpreter, started in this folder as a script would be, what it would import."""
    home = Path(ckpt.__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", _FIND, *PACKAGES], capture_output=True, text=True, check=False,
                          timeout=60)  # fmt: skip
    found = done.stdout.splitlines() if done.returncode == 0 else []
    for n, package in enumerate(PACKAGES):
        own = home / package / "__init__.py"
        if not own.exists():
            continue
        origin = Path(found[n]).resolve() if n < len(found) and found[n] else None
        if origin is None:
            yield Checked(f"import {package}", "bad", f"a script started in {os.getcwd()} does not find it",
                          f"pip install {DISTRIBUTION}")  # fmt: skip
        elif origin != own:
            yield Checked(f"import {package}", "bad",
                          f"a script started in {os.getcwd()} gets {origin}, which shadows {own}",
                          f"rename or move {origin.parent if origin.name == '__init__.py' else origin}")  # fmt: skip
        else:
            folder = Path(package)
            beside = f"; the folder {folder.resolve()} has no code and does not shadow it" if (
                folder.is_dir() and folder.resolve() != own.parent
            ) else ""  # fmt: skip
            yield Checked(f"import {package}", "good", f"{own}{beside}")


def _owners() -> Iterator[Checked]:
    """Distributions that claim one of the names, and installations of this one that are there twice."""
    installed = [d for d in metadata.distributions() if d.metadata["Name"]]
    ours = sorted({str(_where(d)) for d in installed if d.metadata["Name"] == DISTRIBUTION})
    if len(ours) > 1:
        yield Checked("installed once", "bad", f"{DISTRIBUTION} is installed in {len(ours)} places: {', '.join(ours)}",
                      f"pip uninstall {DISTRIBUTION} until none is left, then install it again")  # fmt: skip
    owners = {p: sorted({d.metadata["Name"] for d in installed if _owns(d, p)} - {DISTRIBUTION}) for p in PACKAGES}
    for package, others in owners.items():
        if others:
            yield Checked(f"owner of {package}", "bad", f"{', '.join(others)} installed a {package} too",
                          f"pip uninstall {' '.join(others)}")  # fmt: skip
    if not ours:
        yield Checked("installed once", "not verified",
                      f"{DISTRIBUTION} is not installed: it runs from {Path(ckpt.__file__).parent.parent}")  # fmt: skip
    elif len(ours) == 1 and not any(owners.values()):
        version = metadata.version(DISTRIBUTION)
        yield Checked("installed once", "good", f"{DISTRIBUTION} {version}, and no other package owns its names")


def _where(distribution: metadata.Distribution) -> Path:
    return Path(str(distribution.locate_file(""))).resolve()


def _owns(distribution: metadata.Distribution, package: str) -> bool:
    files = distribution.files or ()
    editable = f"__editable___{package}_"
    return any(f.parts[:1] == (package,) or f.name.startswith(editable) for f in files)


def _versions() -> Iterator[Checked]:
    yield Checked("python", "good", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in (*NEEDED, *OPTIONAL):
        try:
            yield Checked(name, "good", metadata.version(name))
        except metadata.PackageNotFoundError:
            fix = f"pip install {name}"
            if name in NEEDED:
                yield Checked(name, "bad", "not installed, and needed", fix)
            else:
                yield Checked(name, "not verified", f"not installed: {OPTIONAL[name]} (optional: {fix})")
