"""What an answer rests on: each figure with where it comes from."""

from __future__ import annotations

from elastic.commands.economics.options import Asked
from elastic.economics.inputs import Costs
from elastic.economics.posterior import Posterior
from elastic.units import show_duration as time

WIDTH = 79
_RESTART = ("detect_s", "reschedule_s", "load_s", "warmup_s")


def rests_on(rate: Posterior, costs: Costs, asked: Asked) -> str:
    """One sentence: failure rate, save, restart, and what else was read off a run."""
    from_where = asked.provenance
    parts = [_rate(rate, asked)]
    for field, name in (("stall_s", "stall"), ("persist_s", "upload")):
        if getattr(costs, field) or field in from_where:
            parts.append(f"{name} {time(getattr(costs, field))} {from_where.get(field, 'given')}")
    if costs.slowdown and "slowdown" in from_where:
        parts.append(f"slowdown {100 * costs.slowdown:.2g} % {from_where['slowdown']}")
    if costs.dead_s + costs.recovery_s:
        how = [from_where.get(field, "given").partition(" (n=") for field in _RESTART if getattr(costs, field)]
        counts = [int(n.rstrip(")")) for _, _, n in how if n]
        seen = f" (n={min(counts)})" if counts else ""
        words = " and ".join(dict.fromkeys(kind for kind, _, _ in how))
        parts.append(f"restart {time(costs.dead_s + costs.recovery_s)} {words}{seen}")
    else:
        parts.append("restart NOT GIVEN, counted as 0 (--detect, --reschedule, --load)")
    if asked.rates.observed_notices:
        saved, missed = asked.rates.notice_saved or 0, asked.rates.notice_missed or 0
        parts.append(f"{saved} of {saved + missed} stops saved in time, {_measured(from_where.get('notice_share'))}")
    if "measured" in from_where.get("step_s", "") and asked.job.step_s:
        parts.append(f"step {time(asked.job.step_s)} {from_where['step_s']}")
    return f"Rests on: {'; '.join(parts)}."


def _rate(rate: Posterior, asked: Asked) -> str:
    how = {
        "given": "given",
        "observed": "from the failures seen",
        "assumed": "ASSUMED (7 per 1,000 node-days)",
        "given+observed": "given, corrected by the failures seen",
        "assumed+observed": "assumed, corrected by the failures seen",
    }[rate.source]
    n, seen = asked.rates.failures, asked.rates.exposure_s
    if "measured" in asked.provenance.get("failures", "") and seen is not None:
        kind = "measured" if rate.source == "observed" else how
        how = f"{kind} ({n} failure{'s' if n != 1 else ''} in {time(seen)})"
    return f"MTBF {time(rate.mtbf_s)} {how}"


def _measured(provenance: str | None) -> str:
    return "measured" if provenance and "measured" in provenance else "given"


def wrapped(lines: list[str], width: int = WIDTH) -> list[str]:
    """The lines broken at spaces."""
    out = []
    for line in lines:
        row = ""
        for word in line.split(" "):
            if row and len(row) + 1 + len(word) > width:
                out.append(row)
                row = word
            else:
                row = f"{row} {word}" if row else word
        out.append(row)
    return out
