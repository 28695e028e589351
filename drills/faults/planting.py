"""What is planted in the target's own processes: a ``sitecustomize`` on the PYTHONPATH of the drilled run."""

from __future__ import annotations

import os
from pathlib import Path

PLANTED = Path(__file__).parent / "planted"


GATES = "TORCHRELAY_GATE"


def merged(env: dict[str, str], more: dict[str, str]) -> dict[str, str]:
    """Both environments; of gates, of which there may be several, the list."""
    gates = dict.fromkeys(e[GATES] for e in (env, more) if GATES in e)
    return {**env, **more} | ({GATES: os.pathsep.join(gates)} if gates else {})


def planted(**variables: str) -> dict[str, str]:
    """Environment that puts the planted modules on the path of every Python process, with what they are told."""
    path = os.pathsep.join(p for p in (str(PLANTED), os.environ.get("PYTHONPATH")) if p)
    return {"PYTHONPATH": path, **variables}
