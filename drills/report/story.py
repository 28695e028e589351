"""The drill in sentences for somebody who was not there: done, back, lost, the same, not verified."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from drills.checks import Check, Verdict, phases
from drills.checks.verdict import NOT_REACHED, counted
from drills.history import Record
from drills.scenario import HIDDEN, Plan, Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """One sentence an answer; ``unverified`` has one for each check that could not be made."""

    done: str
    back: str
    lost: str
    same: str
    unverified: tuple[str, ...]
    broke: str | None
    meant: str | None


def tell(record: Record, scenario: Scenario, checks: Sequence[Check]) -> Story:
    """Put the record and its checks into words."""
    by_name = {c.name: c for c in checks}
    return Story(
        done=_done(record), back=_back(record), lost=_lost(record, by_name), same=_same(by_name),
        unverified=_unverified(checks),
        broke=record.broke[0] if record.broke else None, meant=_meant(scenario, by_name),
    )  # fmt: skip


def replay_line(plan: Plan, moment: dict[str, object] | None) -> str:
    """The command line that repeats the drill: same seed, and the drawn step and rank pinned."""
    words = ["drills", "run", plan.drill, "--seed", str(plan.seed)]
    if moment:
        words += ["--at-step", str(moment["step"]), "--rank", str(moment["rank"])]
    if plan.when.after != "commit":
        words += ["--after", plan.when.after]
    if plan.control_runs != 1:
        words += ["--control-runs", str(plan.control_runs)]
    if plan.nproc is not None:
        words += ["--nproc", str(plan.nproc)]
    if plan.resubmit:
        words += ["--resubmit", str(plan.resubmit)]
    if not plan.default_url:
        words += ["--url-base", plan.url_base.rsplit("/", 1)[0]]
        words += [w for k, v in plan.storage_options for w in ("--storage-option", f"{k}={v}") if v != HIDDEN]
    words += [w for name in plan.skip for w in ("--skip", name)]
    return f"{shlex.join(words)} -- {_command(plan)}"


def _command(plan: Plan) -> str:
    """The command as a person would type it: placeholders need no quotes in a shell."""
    return " ".join(w if w in ("{url}", "{log}", "{nproc}") else shlex.quote(w) for w in plan.command)


def _done(record: Record) -> str:
    if not record.evidence:
        return f"Nothing: {record.ended_early or 'the drill ended before the fault'}."
    seen, moment = phases(record), record.moment or {}
    one = len(record.strikes()) == 1 and not record.held
    said = []
    for e in record.evidence.values():
        if one and seen and "gone_t" in e and e["rank"] >= 0 and len(e.get("pids", (0,))) == 1:
            early = f" of {moment['last_step']}" if "last_step" in moment else ""
            said.append(
                f"Rank {e['rank']} (pid {e['pid']}) was killed with SIGKILL after step {seen.last_before}{early}."
            )
        else:
            said.append(f"{str(e['said'])[0].upper()}{str(e['said'])[1:]}.")
    return " ".join(said)


def _back(record: Record) -> str:
    seen, run = phases(record), record.drilled
    if seen is None or run is None:
        return "Not reached."
    first = seen.after(seen.first_step)
    if first is None:
        return f"No: no step was done after the fault. {_end(record)}".strip()
    if not seen.new_pids:
        return f"It never stopped: next step {first:.1f} s after the fault began. {_end(record)}".strip()
    again = "once" if run.starts == 2 else f"{run.starts - 1} times"
    who = "by itself" if run.starts == 1 else f"after the drill had started it again {again}"
    caught = seen.after(seen.caught_up)
    later = "" if caught is None else f"; it was where it had been after {caught:.1f} s"
    return f"Yes, {who}: first new step {first:.1f} s after the fault{later}. {_end(record)}".strip()


def _end(record: Record) -> str:
    run = record.drilled
    if run is None or run.ended is None or run.status == 0:
        return ""
    return (
        f"The run was stopped by the drill: {run.stopped}."
        if run.stopped
        else f"The run ended with status {run.status}."
    )


def _lost(record: Record, by_name: dict[str, Check]) -> str:
    seen = phases(record)
    if seen is None or record.drilled is None:
        return "Nothing: no fault struck."
    if seen.resumed_from is None:
        newest = record.drilled.newest_commit(seen.killed)
        kept = "no commit had been seen" if newest is None else f"the newest commit is step {newest}"
        return (
            f"Everything since the newest commit: {kept}, the fault came after step {seen.last_before}, nothing later."
        )
    steps = len(seen.again)
    if not steps:
        text = "No step had to be trained again"
    else:
        span = f"{seen.again[0]}-{seen.again[-1]}" if steps > 1 else f"{seen.again[0]}"
        seconds = "" if seen.lost_s is None else f", {seen.lost_s:.1f} s of work"
        text = f"{counted(steps, 'step')} trained twice ({span}{seconds})"
    samples = by_name.get("samples")
    if samples and samples.verdict is not Verdict.UNKNOWN:
        good = samples.verdict is Verdict.PASS
        text += "; no sample lost, none repeated" if good else f"; samples: {samples.value}"
    return f"{text}. It went on from step {seen.resumed_from}."


def _same(by_name: dict[str, Check]) -> str:
    check = by_name.get("state bitwise")
    match check.verdict if check else None:
        case Verdict.PASS if check:
            return f"Yes, bit for bit: {check.value} in {check.detail}."
        case Verdict.FAIL if check:
            return f"No: {check.value}. {check.detail[0].upper()}{check.detail[1:]}."
    return f"Not verified: {check.detail or check.value}." if check else "Not asked."


def _unverified(checks: Sequence[Check]) -> tuple[str, ...]:
    """One line a reason: several checks often share one."""
    names: dict[str, list[str]] = {}
    for c in checks:
        if c.verdict is Verdict.UNKNOWN:
            names.setdefault(NOT_REACHED if c.value == NOT_REACHED else c.detail or c.value, []).append(c.name)
    return tuple(f"{', '.join(who)}: {why}" for why, who in names.items())


def _meant(scenario: Scenario, by_name: dict[str, Check]) -> str | None:
    if scenario.meant_to_fail is None:
        return None
    sees = by_name.get("oracle sees")
    if sees and sees.verdict is Verdict.PASS:
        return f"This drill is meant to fail, and did as it should: {sees.value}. {scenario.meant_to_fail}"
    return f"This drill is meant to fail by finding the planted bit, and did not get there. {scenario.meant_to_fail}"
