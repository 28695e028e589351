"""Did the job come back, how soon, what did it cost, what did it leave behind."""

from __future__ import annotations

from collections.abc import Callable

from drills.checks.verdict import Check, Verdict, counted, not_reached, size, teller
from drills.history import Record, Run
from drills.timeline import Phases, measure, sequence_errors


def phases(record: Record) -> Phases | None:
    """Phases of the recovery, when the fault struck."""
    strike, run = record.strike(), record.drilled
    if strike is None or run is None:
        return None
    return measure(float(strike["t"]), int(strike["pid"]), run.procs, run.log)


def control_run(record: Record) -> Check:
    """The undisturbed run came to its end: without it there is nothing to compare with."""
    say = teller("control run", "exit status 0")
    run = record.control
    if run is None or run.ended is None:
        return say(Verdict.UNKNOWN, "-", record.ended_early or "it did not take place")
    value = f"status {run.status}, {run.log.last_step} steps in {run.seconds:.1f} s"
    errors = [*run.log.problems, *sequence_errors(run.log)]
    if run.status != 0:
        return say(Verdict.UNKNOWN, value, f"{record.ended_early or 'it failed'}. Last words: {_last_words(run)}")
    if errors:
        return say(Verdict.UNKNOWN, value, f"its own log is not whole: {errors[0]}")
    note = "its log counts from 0; here a step is the number of steps done" if run.counts_from == 0 else ""
    return say(Verdict.PASS, value, note)


def fault_fired(record: Record) -> Check:
    """Each fault of the drill really happened, proven from outside the target."""
    say = teller("fault fired", "proven")
    if record.broke:
        return say(Verdict.BROKE, "-", record.broke[0])
    if not record.evidence:
        return not_reached(say)
    return say(Verdict.PASS, "yes", "; ".join(str(e["said"]) for e in record.evidence.values()))


def finished(record: Record) -> Check:
    """The drilled run came to its end by itself."""
    say = teller("run finished", "exit status 0, last step")
    run, control = record.drilled, record.control
    if not record.evidence or run is None or control is None or run.ended is None:
        return not_reached(say)
    value = f"status {run.status}, step {run.log.last_step} of {control.log.last_step}"
    if run.stopped:
        return say(Verdict.FAIL, value, f"stopped by the drill: {run.stopped}; last words: {_last_words(run)}")
    if run.status != 0:
        hint = "" if record.plan.resubmit else "; nothing started it again (--resubmit N plays the scheduler)"
        return say(Verdict.FAIL, value, f"it ended with an error{hint}; last words: {_last_words(run)}")
    if run.log.last_step != control.log.last_step:
        return say(Verdict.FAIL, value, f"the control run went to step {control.log.last_step}")
    return say(Verdict.PASS, value)


def detected(record: Record) -> Check:
    """How soon the job reacted: another worker ended, or a new one started."""
    return _timed(record, "noticed", record.plan.targets.detect_s, lambda p: p.noticed, "no process reacted")


def restarted(record: Record) -> Check:
    """How soon every rank had a new process."""
    return _timed(record, "restarted", record.plan.targets.restart_s, lambda p: p.complete or p.restarted,
                  "no new process was seen")  # fmt: skip


def recovered(record: Record) -> Check:
    """How soon the first step after the fault was done."""
    return _timed(record, "first new step", record.plan.targets.first_step_s, lambda p: p.first_step,
                  "no step was done after the fault")  # fmt: skip


def work_lost(record: Record) -> Check:
    """Nothing but the steps since the newest commit was trained again."""
    run, seen = record.drilled, phases(record)
    if run is None or seen is None or seen.resumed_from is None:
        return not_reached(teller("work lost", "since the newest commit"))
    newest = run.newest_commit(seen.killed)
    say = teller(
        "work lost",
        "since the newest commit" if newest is None else f"back to {newest} or later, the newest seen committed",
    )
    value = f"{counted(len(seen.again), 'step')} trained twice" + (
        "" if seen.lost_s is None else f", {seen.lost_s:.1f} s"
    )
    where = f"it went on from step {seen.resumed_from}, the fault came after step {seen.last_before}"
    if newest is None:
        return say(Verdict.UNKNOWN, value, f"{where}; no commit had been seen by then")
    if seen.resumed_from < newest:
        return say(Verdict.FAIL, value, f"{where}, although step {newest} was committed")
    return say(Verdict.PASS, value, where)


def nothing_left(record: Record) -> Check:
    """After its end, no process of either run is left."""
    say = teller("nothing left running", "0 processes")
    runs = [r for r in record.runs.values() if r.left is not None]
    if not runs:
        return not_reached(say)
    left = [f"{r.name} run: {p}" for r in runs for p in r.left or ()]
    if left and not any(r.stopped for r in runs if r.left):
        return say(Verdict.FAIL, counted(len(left), "process"), "; ".join(left[:5]))
    return say(Verdict.PASS, "0 processes" if not left else f"{len(left)} ended by the drill, which stopped the run")


def storage_left(record: Record) -> Check:
    """Every commit has its folder; folders that no commit names are counted."""
    say = teller("left on storage", "every commit has its folder")
    run = record.drilled
    if run is None or run.storage is None:
        return not_reached(say)
    if run.storage.get("error") or not run.storage["commits"]:
        return say(Verdict.UNKNOWN, "-", run.storage.get("error") or "no commit records of a known form")
    unnamed, hollow = run.storage["unnamed"], run.storage["hollow"]
    if hollow:
        return say(Verdict.FAIL, f"{counted(len(hollow), 'commit')} without data", ", ".join(hollow[:3]))
    if not unnamed:
        return say(Verdict.PASS, "nothing uncommitted")
    bytes_ = size(sum(u["bytes"] for u in unnamed))
    value = f"{counted(len(unnamed), 'uncommitted folder')}, {bytes_}"
    return say(Verdict.PASS, value, ", ".join(u["folder"] for u in unnamed[:3]))


def _timed(record: Record, name: str, limit_s: float, moment: Callable[[Phases], float | None], none: str) -> Check:
    say = teller(name, f"within {limit_s:g} s")
    seen = phases(record)
    if seen is None:
        return not_reached(say)
    took = seen.after(moment(seen))
    if took is None:
        return say(Verdict.FAIL, "never", none)
    return say(Verdict.PASS if took <= limit_s else Verdict.FAIL, f"{took:.2f} s")


def _last_words(run: Run) -> str:
    """The line of the target's stderr that says most: its last one that names an error."""
    lines = [n.strip() for n in run.said.splitlines() if n.strip()]
    return next((n for n in reversed(lines) if "Error" in n), lines[-1] if lines else "none")[:200]
