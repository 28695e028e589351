"""What a run's own log and process table say: steps, generations, phases of the recovery. Pure.

The log is JSON lines as the target writes them (``step``, ``rank``, ``world``, ``loss``, ``samples``, ``pid``, ``t``);
a step that was trained again after a restart appears again, with another pid.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One completed step of one rank; what the target did not log is None. ``t`` is seconds since 1970."""

    step: int
    rank: int
    world: int | None = None
    loss: float | None = None
    samples: tuple[int | str, ...] | None = None
    pid: int | None = None
    t: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proc:
    """A process of a run that carried a rank, as the process table showed it; times in seconds since 1970.

    ``born`` is its start in clock ticks since boot: with the pid it names one process for certain.
    """

    pid: int
    rank: int
    born: int
    started: float
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class Log:
    """A parsed log: its lines in file order, and what could not be read; ``numbers``: which lines of the file."""

    lines: tuple[Line, ...] = ()
    problems: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()

    @property
    def last_step(self) -> int:
        """The highest step of any rank; 0 when there is none."""
        return max((line.step for line in self.lines), default=0)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that logged a step, ascending."""
        return tuple(sorted({line.rank for line in self.lines}))

    @property
    def offset(self) -> int:
        """What makes a step the number of steps done: 1 where the log of a fresh run counts from 0, else 0."""
        return 1 if self.lines and min(line.step for line in self.lines) == 0 else 0

    def shifted(self, offset: int) -> Log:
        """The log with ``offset`` added to every step."""
        return replace(self, lines=tuple(replace(n, step=n.step + offset) for n in self.lines)) if offset else self

    def merged(self) -> Log:
        """One line a step, of all ranks together: samples as a sorted whole, no loss; of steps trained again, the last.

        For runs whose number of ranks changes: what a rank saw is then another share of the same batch.
        """
        done: list[dict[int, Line]] = []
        for n in self.lines:
            last = next((d for d in reversed(done[-64:]) if next(iter(d.values())).step == n.step), None)
            first = next(iter(last.values())) if last else None
            if last is None or first is None or n.rank in last or first.world != n.world:
                done.append({n.rank: n})
            else:
                last[n.rank] = n
        whole = (d for d in done if next(iter(d.values())).world in (None, len(d)))  # the others were cut off
        return Log(tuple(_whole(d) for d in whole), self.problems)

    def effective(self) -> dict[tuple[int, int], Line]:
        """The line that counts for each (step, rank): the last one, since an earlier one was trained again."""
        return {(line.step, line.rank): line for line in self.lines}

    def generations(self, rank: int) -> list[list[Line]]:
        """Lines of a rank, grouped by the process that wrote them, in order."""
        groups: list[list[Line]] = []
        for line in self.lines:
            if line.rank != rank:
                continue
            if not groups or groups[-1][-1].pid != line.pid:
                groups.append([])
            groups[-1].append(line)
        return groups

    def step_seconds(self) -> float | None:
        """Median time between two steps of one process, in seconds; None when the log has no times."""
        gaps = [
            b.t - a.t
            for rank in self.ranks
            for group in self.generations(rank)
            for a, b in itertools.pairwise(group)
            if a.t is not None and b.t is not None
        ]
        return statistics.median(gaps) if gaps else None


def parse_line(text: str) -> Line | None:
    """One log line; None for an event line. Raises ``ValueError`` for anything else."""
    raw = json.loads(text)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    if "step" not in raw and "event" in raw:
        return None
    step, rank, loss, samples = (raw.get(k) for k in ("step", "rank", "loss", "samples"))
    if type(step) is not int or type(rank) is not int:
        raise ValueError("step and rank must be whole numbers")
    if loss is not None and not isinstance(loss, (int, float)):
        raise ValueError("loss must be a number")
    if samples is not None and not isinstance(samples, (list, str)):
        raise ValueError("samples must be a list of ids, or one digest")
    whole = [raw[k] if type(raw.get(k)) is int else None for k in ("world", "pid")]
    return Line(
        step=step, rank=rank, world=whole[0], pid=whole[1], loss=None if loss is None else float(loss),
        samples=None if samples is None else (samples,) if isinstance(samples, str) else tuple(samples),
        t=float(raw["t"]) if isinstance(raw.get("t"), (int, float)) else None,
    )  # fmt: skip


def parse_log(texts: Iterable[str]) -> Log:
    """A whole log; a line that cannot be read becomes a problem, never an exception."""
    lines, problems, numbers = [], [], []
    for n, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = parse_line(text)
        except (ValueError, RecursionError) as e:
            problems.append(f"line {n}: {str(e)[:80]}")
        else:
            if line:
                lines.append(line)
                numbers.append(n)
    return Log(tuple(lines), tuple(problems), tuple(numbers))


def _whole(lines: dict[int, Line]) -> Line:
    """A step of all ranks; its process is that of the lowest rank."""
    _, first = min(lines.items())
    seen = [n.samples for n in lines.values()]
    samples = None if any(s is None for s in seen) else tuple(sorted((x for s in seen for x in s or ()), key=str))
    times = [n.t for n in lines.values() if n.t is not None]
    return replace(first, rank=0, loss=None, samples=samples, t=max(times, default=None))


def sequence_errors(log: Log) -> list[str]:
    """What is wrong with the order of steps: holes, and repeats that no restart explains."""
    errors = []
    for rank in log.ranks:
        reached = 0
        for n, group in enumerate(log.generations(rank)):
            first = group[0].step
            if first > reached + 1:
                missing = f"{reached + 1}" if first == reached + 2 else f"{reached + 1}-{first - 1}"
                errors.append(f"rank {rank}: step {missing} was never trained")
            elif n and first <= 0:
                errors.append(f"rank {rank}: step {first} after a restart")
            for a, b in itertools.pairwise(group):
                if b.step <= a.step:
                    errors.append(f"rank {rank}: step {b.step} after step {a.step} without a restart in between")
                elif b.step > a.step + 1:
                    errors.append(f"rank {rank}: step {a.step + 1} is missing after step {a.step}")
            reached = max(reached, *(line.step for line in group))
    ends = {rank: max(line.step for line in log.lines if line.rank == rank) for rank in log.ranks}
    errors += [
        f"rank {rank}: ends at step {end}, others at {log.last_step}"
        for rank, end in ends.items()
        if end != log.last_step
    ]
    return errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """The recovery, measured from outside; times in seconds since 1970, None where nothing was seen.

    ``noticed``: first end of another worker, or first new one; ``restarted``: the first process of the new
    generation; ``complete``: as many new ones as ranks before; ``first_step``: the first step that a new process
    completed; ``caught_up``: the first step beyond those of before.
    """

    killed: float
    noticed: float | None = None
    restarted: float | None = None
    complete: float | None = None
    first_step: float | None = None
    caught_up: float | None = None
    last_before: int = 0
    resumed_from: int | None = None
    again: tuple[int, ...] = ()
    lost_s: float | None = None
    new_pids: frozenset[int] = field(default_factory=frozenset)

    def is_before(self, line: Line) -> bool:
        """Whether a line was written by a process that the fault has not touched yet."""
        return not _is_after(line, self.killed, self.new_pids)

    def after(self, moment: float | None) -> float | None:
        """Seconds from the fault to ``moment``."""
        return None if moment is None else max(0.0, moment - self.killed)


# The process table counts start times in ticks of 10 ms, so a start may seem to lie before its cause.
TICK_S = 0.02


def measure(killed: float, victims: Collection[int], procs: Sequence[Proc], log: Log) -> Phases:
    """Phases of the recovery from a fault at ``killed`` that ended the processes ``victims``."""
    before = [p for p in procs if p.started < killed - TICK_S and (p.ended is None or p.ended >= killed - TICK_S)]
    new = sorted((p for p in procs if p.started >= killed - TICK_S), key=lambda p: p.started)
    peers = [p.ended for p in before if p.pid not in victims and p.ended is not None]
    noticed = min([*peers, *(p.started for p in new)], default=None)
    width = max(1, len({p.rank for p in before}))
    starts: dict[int, float] = {}
    for p in new:
        starts.setdefault(p.rank, p.started)
    complete = sorted(starts.values())[width - 1] if len(starts) >= width else None
    new_pids = frozenset(p.pid for p in new)
    later = [n for n in log.lines if _is_after(n, killed, new_pids)]
    earlier = [n for n in log.lines if not _is_after(n, killed, new_pids)]
    last_before = max((n.step for n in earlier), default=0)
    resumed = min((n.step for n in later), default=None)
    again = tuple(sorted({n.step for n in later} & {n.step for n in earlier}))
    return Phases(
        killed=killed, noticed=noticed, restarted=new[0].started if new else None, complete=complete,
        first_step=_first_time(later), caught_up=_first_time([n for n in later if n.step > last_before]),
        last_before=last_before, resumed_from=None if resumed is None else resumed - 1, again=again,
        lost_s=None if resumed is None else _lost_seconds(killed, earlier, resumed - 1), new_pids=new_pids,
    )  # fmt: skip


def _is_after(line: Line, killed: float, new_pids: frozenset[int]) -> bool:
    if line.pid is not None and new_pids:
        return line.pid in new_pids and (line.t is None or line.t >= killed)
    return line.t is not None and line.t > killed


def _first_time(lines: list[Line]) -> float | None:
    return min((n.t for n in lines if n.t is not None), default=None)


def _lost_seconds(killed: float, earlier: list[Line], kept: int) -> float | None:
    """Training time from the end of the last step that was kept to the fault."""
    times = {n.step: n.t for n in earlier if n.t is not None}
    if kept in times:
        return killed - times[kept]
    return killed - min(times.values()) if kept == 0 and times else None
