"""Did the job come back, how soon, what did it cost, what did it leave behind."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

from drills.checks.verdict import Check, Verdict, counted, not_reached, size, teller
from drills.history import Record, Run
from drills.timeline import Phases, measure, sequence_errors

_SPEAKER = re.compile(r"(?:(\[rank\d+\]): ?)?(.*)")


def phases(record: Record) -> Phases | None:
    """Phases of the recovery, when the fault struck."""
    strike, run = record.strike(), record.drilled
    if strike is None or run is None:
        return None
    return _measured(strike, run)


def _measured(strike: dict[str, Any], run: Run) -> Phases:
    victims = strike.get("pids") or ([strike["pid"]] if "pid" in strike else [])
    return measure(float(strike["t"]), victims, run.procs, run.log)


def control_run(record: Record) -> Check:
    """The undisturbed run came to its end: without it there is nothing to compare with."""
    say = teller("control run", "exit status 0")
    run = record.control
    if run is None or run.ended is None:
        return say(Verdict.UNKNOWN, "-", record.ended_early or "it did not take place")
    value = f"status {run.status}, {run.log.last_step} steps in {run.seconds:.1f} s"
    errors = [*run.log.problems, *sequence_errors(run.log)]
    if run.status != 0:
        return say(Verdict.UNKNOWN, value, f"{record.ended_early or 'it failed'}. Last words: {last_words(run)}")
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


def undone(record: Record) -> Check:
    """Every fault was healed by the end, by the drill's own account of each."""
    say = teller("fault undone", "healed")
    if not record.evidence:
        return not_reached(say)
    if missing := sorted(record.evidence.keys() - record.healed.keys()):
        return say(Verdict.BROKE, "no", f"{', '.join(missing)}: nothing says that it was healed")
    said = [f"{name}: {text}" for name, text in record.healed.items() if not text.startswith("nothing to undo")]
    return say(Verdict.PASS, "yes" if said else "nothing to undo", "; ".join(said))


def endured(record: Record) -> Check:
    """No worker ended and none was started from the fault to the end of the run's work."""
    say = teller("no restart", "the same processes to the end")
    run, first = record.drilled, record.first_strike_t()
    if run is None or first is None:
        return not_reached(say)
    new = [p for p in run.procs if p.started > first]
    if new:
        return say(Verdict.FAIL, f"{counted(len(new), 'new process')}", f"rank {new[0].rank} was started again "
                   f"{new[0].started - first:.1f} s after the fault; last words: {last_words(run)}")  # fmt: skip
    return say(Verdict.PASS, "the same processes")


def finished(record: Record) -> Check:
    """The drilled run came to its end by itself."""
    say = teller("run finished", "exit status 0, last step")
    run, control = record.drilled, record.control
    if not record.evidence or run is None or control is None or run.ended is None:
        return not_reached(say)
    value = f"status {run.status}, step {run.log.last_step} of {control.log.last_step}"
    if run.stopped:
        return say(Verdict.FAIL, value, f"stopped by the drill: {run.stopped}; last words: {last_words(run)}")
    if run.status != 0:
        hint = "" if record.plan.resubmit else "; nothing started it again (--resubmit N plays the scheduler)"
        return say(Verdict.FAIL, value, f"it ended with an error{hint}; last words: {last_words(run)}")
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
    """How soon the first step after the fault was done; where nothing ended, after it was healed."""
    strike, run, healed = record.strike(), record.drilled, record.undone_t()
    if strike is None or run is None or "gone_t" in strike or healed is None:
        return _timed(record, "first new step", record.plan.targets.first_step_s, lambda p: p.first_step,
                      "no step was done after the fault")  # fmt: skip
    limit = record.plan.targets.first_step_s
    say = teller("first new step", f"within {limit:g} s of the end of the fault")
    end = min(healed, run.ended or healed)
    later = min((n.t for n in run.log.lines if n.t is not None and n.t >= end), default=None)
    if later is None:
        late = run.log.lines and run.status == 0
        return say(Verdict.PASS if late else Verdict.FAIL, "all done before" if late else "never",
                   "the run had come to its end" if late else "no step was done after the fault")  # fmt: skip
    took = later - end
    return say(Verdict.PASS if took <= limit else Verdict.FAIL, f"{took:.2f} s")


def work_lost(record: Record) -> Check:
    """Nothing but the steps since the newest commit was trained again, whichever fault it was."""
    run = record.drilled
    strikes = [e for e in record.strikes() if "gone_t" in e] or record.strikes()
    if run is None or not strikes or _measured(strikes[0], run).resumed_from is None:
        return not_reached(teller("work lost", "since the newest commit"))
    told = [_lost_by(record, run, e) for e in strikes]
    worst = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.PASS)
    return next(c for v in worst for c in reversed(told) if c.verdict is v)


def nothing_again(record: Record) -> Check:
    """Not one step was trained twice: there was notice, and it was enough to save."""
    say = teller("nothing again", "0 steps trained twice")
    seen = phases(record)
    if seen is None or seen.resumed_from is None:
        return not_reached(say)
    if seen.again:
        where = f"it went on from step {seen.resumed_from}, the notice came after step {seen.last_before}"
        return say(Verdict.FAIL, f"{counted(len(seen.again), 'step')} trained twice", where)
    return say(Verdict.PASS, "0 steps")


def _lost_by(record: Record, run: Run, strike: dict[str, Any]) -> Check:
    seen = _measured(strike, run)
    newest = run.newest_commit(seen.killed)
    if newest is not None and "good_step" in strike:  # the drill itself has damaged what is newer
        newest = min(newest, int(strike["good_step"]))
    say = teller(
        "work lost",
        "since the newest commit" if newest is None else f"back to {newest} or later, the newest "
        + ("good one" if "good_step" in strike else "seen committed"),
    )  # fmt: skip
    value = f"{counted(len(seen.again), 'step')} trained twice" + (
        "" if seen.lost_s is None else f", {seen.lost_s:.1f} s"
    )
    if seen.resumed_from is None:
        return not_reached(say)
    where = f"it went on from step {seen.resumed_from}, the fault came after step {seen.last_before}"
    if newest is None:
        return say(Verdict.UNKNOWN, value, f"{where}; no commit had been seen by then")
    if seen.resumed_from < newest:
        return say(Verdict.FAIL, value, f"{where}, although step {newest} was committed")
    return say(Verdict.PASS, value, where)


def gave_up(record: Record) -> Check:
    """The older of two starts did not train to its end beside the newer one."""
    say = teller("old start gave up", "before its last step")
    run, control = record.drilled, record.control
    if run is None or control is None or not run.overtaken:
        return not_reached(say)
    ended = [n for n in run.late if n.step >= control.log.last_step - record_offset(record)]
    if ended:
        return say(Verdict.FAIL, "it went on to its end", f"rank {ended[0].rank} of the old start (pid {ended[0].pid}) "
                   f"did step {ended[0].step} after the new one had begun")  # fmt: skip
    return say(Verdict.PASS, f"{counted(len(run.late), 'line')} after the new one had begun")


def record_offset(record: Record) -> int:
    """What the log of the control run counts from: its late lines are not shifted."""
    return 1 - record.control.counts_from if record.control else 0


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
    """Every commit has its folder; folders that no commit names, and unfinished uploads, are counted."""
    say = teller("left on storage", "every commit has its folder")
    run = record.drilled
    if run is None or run.storage is None:
        return not_reached(say)
    if run.storage.get("error") or not run.storage["commits"]:
        return say(Verdict.UNKNOWN, "-", run.storage.get("error") or "no commit records of a known form")
    unnamed, hollow = run.storage["unnamed"], run.storage["hollow"]
    if hollow:
        return say(Verdict.FAIL, f"{counted(len(hollow), 'commit')} without data", ", ".join(hollow[:3]))
    uploads = run.storage.get("uploads") or []
    if not unnamed and not uploads:
        return say(Verdict.PASS, "nothing uncommitted")
    bytes_ = size(sum(u["bytes"] for u in unnamed))
    parts = [f"{counted(len(unnamed), 'uncommitted folder')}, {bytes_}"] if unnamed else []
    parts += [counted(len(uploads), "unfinished upload")] if uploads else []
    return say(Verdict.PASS, "; ".join(parts), ", ".join([*(u["folder"] for u in unnamed[:3]), *uploads[:3]]))


def _timed(record: Record, name: str, limit_s: float, moment: Callable[[Phases], float | None], none: str) -> Check:
    say = teller(name, f"within {limit_s:g} s")
    seen = phases(record)
    if seen is None:
        return not_reached(say)
    took = seen.after(moment(seen))
    if took is None:
        return say(Verdict.FAIL, "never", none)
    return say(Verdict.PASS if took <= limit_s else Verdict.FAIL, f"{took:.2f} s")


def last_words(run: Run) -> str:
    """The last error that a process of the target died of, with the facts it gave; else the line that says most.

    A launcher's own traceback, which only tells that a worker died, is passed over. Ranks speak at once, each with its
    name before the line, as torch puts it there.
    """
    lines = [_SPEAKER.fullmatch(n) for n in run.said.splitlines()]
    spoken = [(m[1] or "", m[2]) for m in lines if m]
    for start in reversed([i for i, (_, n) in enumerate(spoken) if n.startswith("Traceback")]):
        mine = [n for who, n in spoken[start + 1 :] if who == spoken[start][0]]
        end = next((i for i, n in enumerate(mine) if n[:1] not in ("", " ")), None)
        if end is not None and "ChildFailedError" not in mine[end]:
            facts = itertools.takewhile(lambda n: n.startswith("  ") and not n.startswith("  next "), mine[end + 1 :])
            return "; ".join([mine[end], *(" ".join(n.split()) for n in list(facts)[:3])])[:400]
    said = [n.strip() for _, n in spoken if n.strip()]
    return next((n for n in reversed(said) if "Error" in n), said[-1] if said else "none")[:200]
