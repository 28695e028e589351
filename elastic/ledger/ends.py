"""How each start of a run ended: by whose failure, when, and who noticed when. Pure.

A killed process writes nothing. When it died follows from what it left on its host (``LastSeen``), from the errors of
the ranks that waited for it, or, where there is neither, from the silence before the next start.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from elastic.ledger.attempts import Attempt
from elastic.ledger.events import Error, Finished, LastSeen, SaveCommitted, SaveStarted, Steps, Stopped, StopRequested
from elastic.ledger.history import pulse_s

How = Literal["finished", "stopped", "notice", "failure", "running"]


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a start ended, and what is known of when. Times are seconds since 1970."""

    how: How
    """"stopped": asked for by the code; "notice": asked for from outside, and the state was saved."""
    died: float
    """Training ended: by what is known, at the latest when somebody noticed."""
    last_step_at: float
    """The last step that is known to be complete."""
    noticed: float | None = None
    """The first surviving process said that something was wrong; None: nobody was left to."""
    gone: float
    """The last word of the last process."""
    rank: int | None = None
    """Whose failure it was, where the others or its own error tell."""
    cause: str = ""
    certain: bool = True
    """Whether ``died`` is known to a step; False: only that it lies within a longer silence."""


def end_of(attempt: Attempt, following: Attempt | None) -> End:
    """Judge the end of a start from what all its ranks said, and from when the ``following`` one was born."""
    last_step_at = _last_step(attempt)
    for stay in (attempt.lead, *attempt.stays.values()):  # all ranks end together, but not all may live to tell
        for clean in (stay.first(Finished), stay.first(Stopped)):
            if clean is not None:
                return _clean(attempt, clean[0], clean[2], last_step_at)
    errors = sorted((at, rank, e) for rank, s in attempt.stays.items() for at, _, e in s.of(Error))
    signals = sorted((at, rank, q.source) for rank, s in attempt.stays.items() for at, _, q in s.of(StopRequested))
    noticed = min([at for at, *_ in errors] + [at for at, _, source in signals if source != "run.stop"], default=None)
    if noticed is None and following is None:
        return End(how="running", died=attempt.last, last_step_at=last_step_at, gone=attempt.last)
    own = next(((at, rank, error) for at, rank, error in errors if not _aftermath(error)), None)
    if own is not None and noticed is not None and own[0] <= noticed + 1.0:
        at, who, error = own
        said = printable(error.message.splitlines()[0][:160]) if error.message else ""
        return End(how="failure", died=at, last_step_at=min(at, last_step_at), noticed=at, gone=max(at, attempt.last),
                   rank=who, cause=f"{printable(error.error)}: {said}".rstrip(": "))  # fmt: skip
    silent = sorted(attempt.stays.keys() - {rank for _, rank, _ in errors} - {rank for _, rank, _ in signals})
    rank = silent[0] if len(silent) == 1 else None
    limit = math.inf if following is None else max(following.born, last_step_at)
    usual = usual_step_s(attempt) or 0.0
    if noticed is not None:
        asked = not silent and signals and signals[0][0] <= noticed
        cause = f"{printable(signals[0][2])}: the state was not saved in time" if asked else _killed(rank, attempt)
        seen = min(last_step_at, noticed)
        died = noticed if asked else seen + min(usual, noticed - seen) / 2  # at any moment of the step after the last
        return End(how="failure", died=died, last_step_at=seen, noticed=noticed, rank=rank, cause=cause,
                   gone=max(noticed, min(attempt.last, limit)))  # fmt: skip
    known = attempt.seen is not None and attempt.seen.unix_s >= last_step_at
    quiet = usual if known else pulse_s(attempt.last - (attempt.lead.resumed or attempt.last))
    died = min(max(last_step_at, attempt.last if not known else 0.0) + quiet / 2, limit)
    return End(how="failure", died=died, last_step_at=last_step_at, rank=rank, cause=_killed(rank, attempt),
               gone=max(died, min(attempt.last, limit)), certain=known)  # fmt: skip


def printable(text: str) -> str:
    """The text without characters that could move a terminal's cursor: it comes from files."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def usual_step_s(attempt: Attempt) -> float | None:
    """Mean time of its steps but the first, data wait included; None where there is no more than a first one."""
    rows = [row for _, _, row in rows_of(attempt)]
    rows = rows[1:] if rows and rows[0].n == 1 else rows
    n = sum(row.n for row in rows)
    return sum(row.seconds + row.data_s for row in rows) / n if n else None


def _clean(attempt: Attempt, at: float, data: Finished | Stopped, last_step_at: float) -> End:
    asked = sorted((t, q.source) for s in attempt.stays.values() for t, _, q in s.of(StopRequested))
    how: How = "finished" if isinstance(data, Finished) else "notice" if data.status else "stopped"
    return End(how=how, died=at, last_step_at=min(at, last_step_at), gone=at, noticed=asked[0][0] if asked else None,
               cause=printable(asked[0][1]) if asked and how != "finished" else "")  # fmt: skip


_COLLECTIVE = re.compile(r"gloo|nccl|connection|peer|timed? ?out|process ?group|socket|store", re.IGNORECASE)


def _aftermath(error: Error) -> bool:
    """Whether it only says that another rank has failed."""
    if error.error in ("C-R", "DistBackendError", "DistNetworkError", "DistStoreError", "SystemExit"):
        return True
    return error.error == "RuntimeError" and bool(_COLLECTIVE.search(error.message))


def _killed(rank: int | None, attempt: Attempt) -> str:
    who = "the process" if attempt.world == 1 else f"rank {rank}" if rank is not None else "more than one rank"
    return f"{who} ended without a word: killed, out of memory, or its host was lost"


def rows_of(attempt: Attempt) -> list[tuple[float, int, Steps]]:
    """(when the last of its steps was complete, that step, row) of the lead, and what others tell of later steps.

    A survivor writes its last row when it hears of a failure, which is later than its last step; a rank that was
    killed writes none, but what it left on its host, or the rows of the others, go on where its own end.
    """
    lead = attempt.lead
    at, done = lead.resumed if lead.resumed is not None else lead.said[0].at, attempt.resumed_step or 0
    failed = lead.first(Error)
    rows: list[tuple[float, int, Steps]] = []
    for told, step, row in lead.of(Steps):
        late = failed is not None and told > failed[0] - 0.1
        at, done = (_complete(attempt, at, step, row, told) if late else told), step
        rows.append((at, done, row))
    if any(isinstance(said.event.data, (Finished, Stopped)) for said in lead.said):
        return rows
    others = [s.of(Steps)[-1] for s in attempt.stays.values() if s is not lead and s.of(Steps)]
    best = max(others, key=lambda other: other[1], default=None)
    seen = attempt.seen
    if seen is not None and not seen.n and seen.steps == done and seen.unix_s > at:  # between two steps, in a save
        rows.append((seen.unix_s, done, Steps(n=0, seconds=0.0, min_s=0.0, max_s=0.0, boundary_s=seen.boundary_s,
                                              save_s=seen.save_s)))  # fmt: skip
    elif seen is not None and seen.n and seen.steps > done and (best is None or seen.steps >= best[1]):
        rows.append((max(at, seen.unix_s), seen.steps, _part(seen, seen.steps - done)))
    elif best is not None and best[1] > done:
        row = _part(best[2], best[1] - done)
        rows.append((_complete(attempt, at, best[1], row, best[0]), best[1], row))
    return rows


def _complete(attempt: Attempt, began: float, step: int, row: Steps, told: float) -> float:
    """When a row's last step was complete: as a rank that was killed had noted, or by the times of its parts."""
    seen = attempt.seen
    if seen is not None and seen.steps == step:
        return min(told, max(began, seen.unix_s))
    return min(told, began + row.seconds + row.data_s + row.boundary_s)


def _part(row: Steps | LastSeen, n: int) -> Steps:
    """The last ``n`` steps of sums that began elsewhere."""
    share = n / row.n
    return Steps(n=n, seconds=share * row.seconds, min_s=0.0, max_s=0.0, data_s=share * row.data_s,
                 boundary_s=share * row.boundary_s, save_s=min(share, 1.0) * (row.save_s or 0.0))  # fmt: skip


def _last_step(attempt: Attempt) -> float:
    lead = attempt.lead
    times = [at for kind in (SaveStarted, SaveCommitted) for at, _, _ in lead.of(kind)]
    times += [at for at, _, _ in rows_of(attempt)[-1:]]
    if attempt.seen is not None:
        times.append(attempt.seen.unix_s)
    return max(times, default=lead.resumed if lead.resumed is not None else lead.last)
