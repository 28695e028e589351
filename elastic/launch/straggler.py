"""Which rank holds the others up, and why, told from what each did in its steps. Pure.

Step time is the same on all ranks, so it names nobody. A rank is slow when, in a window of steps,

* its *own* time (compute and waiting for data and storage) exceeds that of the others, by median **or** by mean: a rank
  that is stopped now and then has an ordinary median;
* and the others wait for it: who is slow waits least in collectives, by about what its own time exceeds theirs.

One window says nothing: a verdict needs ``k`` of the last ``n`` windows, fewer where the rank is much slower. Ranks
that are known to have more to do (the last stage of a pipeline) are declared, with the factor that is expected. Where
no rank's own time stands out, but all wait for longer than they used to, it is the network; the rank whose link counts
errors is named where there is one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

WINDOW = 8
SLIGHT, CLEAR = 1.12, 1.35
"""Own time over that of the others, from which a window counts."""
SLIGHT_OF, CLEAR_OF = (5, 8), (2, 3)
"""k of n windows for each."""
LEAST_S = 0.001
_INVERSION = 0.4
_SLOW_NETWORK = 1.5
CAUSES = ("compute", "imbalance", "data", "storage", "descheduled", "network")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of one rank, in seconds."""

    compute_s: float
    """Wall time of its own work: neither in collectives, nor waiting for data."""
    wait_s: float
    """In collectives."""
    cpu_s: float
    """CPU time used while it computed."""
    data_s: float = 0.0
    storage_s: float = 0.0
    """Blocked by reads and writes: saves, logs, swapped pages."""
    queued_s: float = 0.0
    """Runnable, but waiting for a CPU, or throttled."""
    work: float = 1.0
    """How much there was to do: samples or tokens, where ranks differ."""
    link_errors: int = 0
    """Retransmits, drops and link errors of its network."""

    @property
    def own_s(self) -> float:
        """What the others may have to wait for."""
        return self.compute_s + self.data_s + self.storage_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``rank`` is slow by ``factor`` because of ``cause``; ``said`` is the evidence in a line. Rank None: nobody
    stands out."""

    rank: int | None
    factor: float
    cause: str
    said: str


@dataclass(slots=True)
class _Seen:
    slight: deque[bool] = field(default_factory=lambda: deque(maxlen=SLIGHT_OF[1]))
    clear: deque[bool] = field(default_factory=lambda: deque(maxlen=CLEAR_OF[1]))


class Stragglers:
    """Takes windows of records in, gives verdicts out. ``expected`` maps ranks to the factor that is normal there."""

    def __init__(self, expected: Mapping[int, float] | None = None) -> None:
        self._expected = dict(expected or {})
        self._seen: dict[int, _Seen] = {}
        self._waits: deque[float] = deque(maxlen=50)
        self._slow_links: deque[dict[int, int] | None] = deque(maxlen=SLIGHT_OF[1])

    def window(self, records: Mapping[int, Sequence[StepRecord]]) -> list[Verdict]:
        """The same ``WINDOW`` steps of every rank; verdicts that hold now, the slowest rank first."""
        if len(records) < 2:
            return []
        found = []
        for rank, mine in records.items():
            others = [r for n, r in records.items() if n != rank]
            factor = self._factor(rank, mine, others)
            seen = self._seen.setdefault(rank, _Seen())
            seen.slight.append(factor > SLIGHT)
            seen.clear.append(factor > CLEAR)
            if factor > SLIGHT and (sum(seen.clear) >= CLEAR_OF[0] or sum(seen.slight) >= SLIGHT_OF[0]):
                cause, said = _cause(mine, others)
                found.append(Verdict(rank=rank, factor=factor, cause=cause, said=said))
        found.sort(key=lambda v: -v.factor)
        return found or self._network(records)

    def _factor(self, rank: int, mine: Sequence[StepRecord], others: Sequence[Sequence[StepRecord]]) -> float:
        """How much slower this rank is than the others; 1 where the others do not wait for it."""
        expected = self._expected.get(rank, 1.0)
        best = 1.0
        for middle in (median, fmean):
            own = middle([s.own_s for s in mine]) / expected
            theirs = median(middle([s.own_s for s in r]) for r in others)
            excess = own - theirs
            # waiting is compared by means: what a stall costs the others is in few of their steps
            less = median(fmean(s.wait_s for s in r) for r in others) - fmean(s.wait_s for s in mine)
            mean_excess = fmean(s.own_s for s in mine) / expected - median(fmean(s.own_s for s in r) for r in others)
            if excess > LEAST_S and theirs > 0 and less > _INVERSION * max(excess, mean_excess):
                best = max(best, own / theirs)
        return best

    def _network(self, records: Mapping[int, Sequence[StepRecord]]) -> list[Verdict]:
        # what even the last to come waits is the transfer itself
        wait = median(min(s.wait_s for s in step) for step in zip(*records.values(), strict=True))
        usual = median(self._waits) if len(self._waits) >= SLIGHT_OF[1] else None
        slow = usual is not None and wait > _SLOW_NETWORK * usual + LEAST_S
        if not slow:
            self._waits.append(wait)
        self._slow_links.append({rank: sum(s.link_errors for s in r) for rank, r in records.items()} if slow else None)
        windows = [w for w in self._slow_links if w is not None]
        if usual is None or not slow or len(windows) < SLIGHT_OF[0]:
            return []
        errors = {rank: sum(w.get(rank, 0) for w in windows) for rank in records}
        worst = max(errors, key=lambda rank: errors[rank])
        second = sorted(errors.values())[-2]
        named = worst if errors[worst] >= 3 and errors[worst] > 3 * second else None
        said = f"all wait {wait / usual:.1f} times as long as they used to in collectives"
        if named is not None:
            said += f"; {errors[named]} errors on the link of rank {named}, {second} on the next"
        return [Verdict(rank=named, factor=wait / usual, cause="network", said=said)]


def _cause(mine: Sequence[StepRecord], others: Sequence[Sequence[StepRecord]]) -> tuple[str, str]:
    def more(name: str) -> float:
        value = fmean(getattr(s, name) for s in mine)
        return float(value - median(fmean(getattr(s, name) for s in r) for r in others))

    def times(name: str) -> float:
        others_s = median(fmean(getattr(s, name) for s in r) for r in others)
        return fmean(getattr(s, name) for s in mine) / max(others_s, 1e-12)

    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.1f} ms"

    excess = more("own_s")
    for part, cause in (("data_s", "data"), ("storage_s", "storage")):
        if more(part) > 0.5 * excess:
            return cause, f"{ms(more(part))} a step more waiting for {cause} than others"
    cpu, compute = more("cpu_s"), more("compute_s")
    if times("cpu_s") - 1 > 0.5 * (times("compute_s") - 1):  # shares: on a host that is busy, all take longer
        if times("work") > 1.05:
            return "imbalance", f"{times('work'):.2f} times the work of others, {ms(cpu)} a step more CPU time"
        return "compute", f"{ms(cpu)} a step more CPU time than others for the same work"
    said = f"{ms(compute)} a step longer than others with {ms(max(cpu, 0.0))} more CPU time: it was not running"
    if more("queued_s") > 0.5 * compute:
        said += ", though it wanted to"
    return "descheduled", said
