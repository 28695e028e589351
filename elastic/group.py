"""What a run checks when it begins, and how it leaves the job to another one."""

from __future__ import annotations

import sys
import warnings
from typing import Any, NoReturn

import torch.distributed as dist

from ckpt.errors import Superseded
from ckpt.parts import keepers
from elastic import membership


def has_position(source: Any) -> bool:
    """Whether it gives batches whose position a run moves."""
    return any(callable(getattr(o, "advance", None)) for o in keepers(source))


def end_superseded(error: Superseded) -> NoReturn:
    """Leave the run to the job that has taken it over; a restart by this job's agent would only take it back."""
    membership.give_up(error.message)
    print(error, file=sys.stderr, flush=True)
    raise SystemExit(error.exit_status)


def check_group() -> tuple[int, int]:
    """Rank and world size, after a look at how the process group was set up; ``ckpt.open`` refuses a missing one."""
    if dist.is_initialized() and membership.generation() is None and membership.restarts_on_a_used_store():
        warnings.warn(
            "this process group will not survive a restart: torchrun --max-restarts gives restarted ranks a store that "
            "holds the addresses of the dead ones. Call elastic.init() in place of init_process_group()",
            RuntimeWarning,
            stacklevel=3,
        )
    return membership.rank_and_world()
