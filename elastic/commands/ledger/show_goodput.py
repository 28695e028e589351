"""Where the hours went, as text for a person and as a record for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from elastic.commands.economics.basis import wrapped
from elastic.ledger.goodput import CAUSES, PRODUCTIVE, Account, Part
from elastic.ledger.rates import RankTimes, Rates
from elastic.units import show_duration as time
from elastic.units import show_number as number

SCHEMA = "elastic.goodput/1"
_STARTS = 12
_RANKS = 8
_BAR = 16
QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What there is to show."""

    url: str
    account: Account
    rates: Rates
    mfu: tuple[float, float] | None = None
    price: float | None = None
    notes: tuple[str, ...] = ()
    flops_given: bool = False

    @property
    def unverified(self) -> list[str]:
        """What cannot be said, and why."""
        out = []
        if self.rates.energy_j is None:
            out.append("energy: no counter of the machine could be read")
        if not self.rates.counted:
            out.append("tokens and samples: log what a rank trains on, run.log(tokens=batch.numel())")
        if self.flops_given and self.mfu is None:
            out.append("MFU: --flops-per-token needs run.log(tokens=…)")
        if not any(r.cpu_s is not None for r in self.rates.ranks):
            out.append("compute and waits within steps: their CPU time was not measured")
        elif self.rates.device:
            out.append("compute and communication of the accelerator: the host's times do not show them")
        else:
            out.append("communication by itself: within 'off CPU', waits for ranks, files and CPUs are not told apart")
        if doubtful := [p.attempt.number for p in self.account.parts if not p.end.certain]:
            out.append(f"when start {', '.join(map(str, doubtful[:6]))} ended: only that it was within a silence")
        return out


def moment(unix_s: float) -> str:
    """A time in UTC, to the second."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def percent(share: float | None) -> str:
    """A share with one decimal."""
    return "-" if share is None else f"{100 * share:.1f} %"


def table(rows: Sequence[Sequence[str]], left: Iterable[int] = (0,)) -> list[str]:
    """Aligned columns; those in ``left`` start at the left, the others end at the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    keep = set(left)
    return [
        "  ".join(c.ljust(w) if i in keep else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        .rstrip()
        for row in rows
    ]  # fmt: skip


def text(told: Told) -> str:
    """The answer first, then causes, speed, ranks, starts, and what is not known."""
    blocks = [_answer(told), _causes(told), _speed(told), _ranks(told.rates), _starts(told.account)]
    said = [f"! {note}" for note in (*told.notes, *told.account.notes)]
    blocks.append(wrapped([*said, *(f"not verified: {what}" for what in told.unverified)]))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _answer(told: Told) -> list[str]:
    a = told.account
    starts = f"{len(a.parts)} start{'s' if len(a.parts) != 1 else ''}"
    useful = sum(a.seconds[c] for c in PRODUCTIVE)
    so_far = " so far" if a.running else ""
    lines = [
        f"Goodput {percent(a.goodput)}: of {time(a.wall_s)}{so_far}, {time(useful)} went into {a.steps:,} steps that "
        "count.",
        f"{starts}, from {moment(a.began)} to {moment(a.ended)}; a process trained for {percent(a.availability)}.",
    ]
    lost = [(s, c) for c, s in a.seconds.items() if c not in PRODUCTIVE and s > 0]
    if lost:
        seconds, cause = max(lost)
        lines.append(f"The largest loss: {cause}, {time(seconds)} ({CAUSES[cause]}).")
    if waited := a.seconds["wait"]:
        lines.append(
            f"Without the wait for machines ({time(waited)}): {percent(useful / max(a.wall_s - waited, 1e-9))}."
        )
    return wrapped(lines)


def _causes(told: Told) -> list[str]:
    a = told.account
    rows: list[tuple[str, ...]] = [
        ("where it went", "time", "share", *(("cost",) if told.price is not None else ()), "")
    ]
    for cause, what in CAUSES.items():
        seconds = a.seconds[cause]
        share = seconds / a.wall_s if a.wall_s else 0.0
        if seconds < 5e-4 and cause != "training":
            continue
        cost = (f"${told.price * a.device_s[cause] / 3600:,.2f}",) if told.price is not None else ()
        bar = "#" * round(_BAR * share)
        rows.append((f"  {cause}", time(seconds), percent(share), *cost, f"{bar} {what}".strip()))
    return table(rows, (0, len(rows[0]) - 1))


def _speed(told: Told) -> list[str]:
    r, a = told.rates, told.account
    if r.step_s is None:
        return []
    q = [r.times.at(share) for share in QUANTILES]
    shown = " / ".join(time(x) for x in q if x is not None)
    lines = [f"step time          p50 / p95 / p99  {shown}" if shown else f"step time          mean {time(r.step_s)}"]
    for name, c in r.counted.items():
        lines.append(f"{name:<17}  {number(c.speed or 0)} a second while training, {number((c.speed or 0) / r.world)} "
                     f"a device; {number(c.per_s or 0)} over all hours")  # fmt: skip
    if told.mfu is not None:
        lines.append(f"MFU                {percent(told.mfu[0])} while training, {percent(told.mfu[1])} over all hours")
    if told.price is not None:
        spent = told.price * sum(a.device_s.values()) / 3600
        lost = told.price * sum(s for c, s in a.device_s.items() if c not in PRODUCTIVE) / 3600
        lines.append(f"cost               ${spent:,.2f}, of which ${lost:,.2f} bought nothing")
    if r.energy_j is not None:
        tokens = r.counted.get("tokens")
        each = f", {number(r.energy_j / tokens.useful)} J a token" if tokens and tokens.useful else ""
        lines.append(f"energy             {number(r.energy_j / 3.6e6)} kWh, of the hosts that could be read{each}")
    return lines


def split(rank: RankTimes, device: bool) -> dict[str, float | None]:
    """Mean seconds of a step of one rank by part; they add up to its step time, save stalls apart."""
    compute = None if rank.cpu_s is None or device else min(rank.cpu_s, rank.body_s) / rank.n
    return {
        "compute": compute, "off_cpu": None if compute is None else rank.body_s / rank.n - compute,
        "body": rank.body_s / rank.n, "data": rank.data_s / rank.n, "between": rank.between_s / rank.n,
        "save": rank.save_s / rank.n,
    }  # fmt: skip


def _ranks(r: Rates) -> list[str]:
    if not r.ranks:
        return []
    rows: list[tuple[str, ...]] = [
        ("a step of", "p50", "p95", "p99", "compute", "off CPU", "data", "between", "save", "peak GiB")
    ]
    names = ("compute", "off_cpu", "data", "between", "save")
    for rank in r.ranks[:_RANKS]:
        parts = split(rank, r.device)
        q = [rank.times.at(share) for share in QUANTILES]
        memory = rank.peak_bytes if rank.peak_bytes is not None else rank.peak_rss_bytes
        rows.append((f"  rank {rank.rank}", *("-" if x is None else time(x) for x in q),
                     *("-" if (x := parts[n]) is None else time(x) for n in names),
                     "-" if memory is None else f"{memory / 2**30:.2f}"))  # fmt: skip
    lines = table(rows)
    if len(r.ranks) > _RANKS:
        lines.append(f"  … {len(r.ranks) - _RANKS} more ranks: --json")
    if r.slowest is not None:
        s = r.slowest
        how = "waits least within steps" if s.waits_least else "although it does not wait least"
        lines += wrapped([f"The others wait for rank {s.rank}: {time(s.excess_s)} a step more of its own time, "
                          f"{'waiting for its data' if s.cause == 'data' else 'computing'}; it {how}."])  # fmt: skip
    elif len(r.ranks) > 1 and all(x.own_s is not None for x in r.ranks):
        lines.append("No rank stands out.")
    return lines


def how(part: Part) -> str:
    """How a start ended, in a few words."""
    end = part.end
    return {"finished": "finished", "running": "still running", "stopped": "stopped by the code",
            "notice": f"stopped in time ({end.cause})", "failure": end.cause}[end.how]  # fmt: skip


def _starts(a: Account) -> list[str]:
    rows = [("start", "ranks", "from", "to step", "again", "lasted", "goodput", "ended")]
    shown = a.parts[:_STARTS]
    for p in shown:
        lasted = p.ended - p.began
        good = sum(p.seconds[c] for c in PRODUCTIVE) / lasted if lasted > 0 else None
        rows.append((str(p.attempt.number), str(p.attempt.world), f"{p.steps[0]:,}", f"{p.steps[1]:,}",
                     f"{p.steps_lost:,}", time(lasted), percent(good), _short(how(p))))  # fmt: skip
    lines = table(rows, (7,))
    if len(a.parts) > len(shown):
        lines.append(f"… {len(a.parts) - len(shown)} more starts: --json")
    return lines


def _short(what: str, width: int = 32) -> str:
    what = what.split(":")[0] if len(what) > width and ":" in what else what
    return what if len(what) <= width else what[: width - 1] + "…"


def record(told: Told) -> dict[str, Any]:
    """Everything, schema ``elastic.goodput/1``: seconds, exact bytes, times in UTC; null is not known."""
    a, r = told.account, told.rates
    return {
        "schema": SCHEMA, "url": told.url, "began": moment(a.began), "ended": moment(a.ended), "running": a.running,
        "wall_s": a.wall_s, "goodput": a.goodput, "availability": a.availability, "steps": a.steps,
        "seconds": dict(a.seconds), "device_seconds": dict(a.device_s),
        "starts": [_start(p) for p in a.parts],
        "world": r.world, "step_s": {"mean": r.step_s, **_quantiles(r.times)},
        "counted": {name: {"useful": c.useful, "per_step": c.per_step, "per_s": c.per_s, "speed_per_s": c.speed,
                           "speed_per_s_device": None if c.speed is None else c.speed / r.world}
                    for name, c in r.counted.items()},
        "mfu": None if told.mfu is None else {"training": told.mfu[0], "wall": told.mfu[1]},
        "energy_j": r.energy_j, "ranks": [_rank(x, r.device) for x in r.ranks],
        "slowest": None if r.slowest is None else {"rank": r.slowest.rank, "excess_s": r.slowest.excess_s,
                                                   "cause": r.slowest.cause, "waits_least": r.slowest.waits_least},
        "not_verified": told.unverified, "notes": [*told.notes, *a.notes],
    }  # fmt: skip


def _quantiles(times: Any) -> dict[str, float | None]:
    return {f"p{100 * share:.0f}": times.at(share) for share in QUANTILES} | {"error": times.error}


def _start(p: Part) -> Mapping[str, Any]:
    a, e = p.attempt, p.end
    return {
        "number": a.number, "epoch": a.epoch, "world": a.world, "began": moment(p.began), "seconds": dict(p.seconds),
        "lasted_s": p.ended - p.began, "restored": a.restored, "from_step": p.steps[0], "to_step": p.steps[1],
        "steps_lost": p.steps_lost,
        "end": {"how": e.how, "cause": e.cause, "rank": e.rank, "at": moment(e.died), "certain": e.certain},
    }  # fmt: skip


def _rank(x: RankTimes, device: bool) -> dict[str, Any]:
    return {
        "rank": x.rank, "host": x.host, "steps": x.n, "step_s": {"mean": x.step_s, **_quantiles(x.times)},
        "per_step_s": split(x, device), "peak_bytes": x.peak_bytes, "peak_rss_bytes": x.peak_rss_bytes,
        "energy_j": x.energy_j,
    }  # fmt: skip
