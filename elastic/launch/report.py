"""What a launch that failed says at its end: the rank, how it ended, its last words, and what to do. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from elastic.launch.verdict import Failure


def failed(
    failure: Failure, *, world: int, generation: int, host: str, why: str | None, log: Path | None, lines: Sequence[str]
) -> str:
    """The summary, without an end of line."""
    where = f"pid {failure.pid} on {host}, generation {generation}"
    step = "" if failure.step is None else f", step {failure.step}"
    rows = [("error", (failure.error or "").splitlines()[0] if failure.error else ""), ("at", failure.where or ""),
            ("log", str(log or "")), ("no start", why or ""), ("next", _next(failure, why, log))]  # fmt: skip
    width = max(len(label) for label, _ in rows)
    said = [f"elastic launch: rank {failure.rank} of {world} {past(failure)} ({where}{step})"]
    said += [f"  {label:<{width}}  {text}" for label, text in rows if text]
    if lines:
        said += ["  last lines of its log:", *(f"  | {line}" for line in lines)]
    return "\n".join(said)


def past(failure: Failure) -> str:
    """How it ended, as the end of a sentence about the rank."""
    if failure.hung or failure.status < 0:
        return failure.how if failure.hung else f"was {failure.how}"
    return f"ended with {failure.how}"


def _next(failure: Failure, why: str | None, log: Path | None) -> str:
    if why and why.startswith("another start"):
        return "stop this job; or start it anew, to take the run back"
    if failure.hung:
        return "read the stacks above; elastic launch --hang-timeout 5m waits longer"
    if failure.status == -signal.SIGKILL:
        return "dmesg | grep -i 'out of memory'  # did the kernel kill it?"
    if log is not None:
        return f"less +G {log}"
    if why and why.startswith("crash loop"):
        return "mend the error above; a restart cannot"
    return "elastic launch --log-dir logs …  # keeps what each rank says"
