"""Is what came back the same as in the undisturbed run: state, losses, samples, random streams, data position."""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from typing import Any

from drills.checks.recovery import phases
from drills.checks.verdict import Check, Teller, Verdict, counted, not_reached, size, teller
from drills.history import CONTROL, DRILLED, Record
from drills.timeline import Line, Log, sequence_errors

_NEAR = 0.25  # of the mean loss of a step, on another number of ranks: other dropout, another order of adding
_BY_ITSELF = "the target is not deterministic by itself (--control-runs 2 shows it without a fault)"


def state(record: Record) -> Check:
    """Every tensor and value of every step that both runs hold is the same, bit for bit."""
    return _judge_state(record, "state bitwise", CONTROL, DRILLED, None)


def rng(record: Record) -> Check:
    """The random number streams of every rank ended in the same state."""
    return _judge_state(record, "rng", CONTROL, DRILLED, "rng")


def data_position(record: Record) -> Check:
    """The data loader ended at the same position."""
    return _judge_state(record, "data position", CONTROL, DRILLED, "data")


def losses(record: Record) -> Check:
    """Every logged loss, those of steps trained twice included, is the control's exact number."""
    say = teller("losses", "every line equal, exactly")
    if (early := _logs_missing(say, record)) or record.drilled is None or record.control is None:
        return early or not_reached(say)
    log, truth = record.drilled.log, record.control.log.effective()
    if _world_changed(record):
        return _losses_before(say, record, log, truth)
    without = next((n for n in [*truth.values(), *log.lines] if n.loss is None), None)
    if without:
        return say(Verdict.UNKNOWN, "-", f"the log has no loss for step {without.step}, rank {without.rank}")
    wrong = [n for n in log.lines if (n.step, n.rank) not in truth or not _same(n.loss, truth[n.step, n.rank].loss)]
    if wrong:
        n = wrong[0]
        want = truth.get((n.step, n.rank))
        first = f"first at step {n.step}, rank {n.rank}{_trained_again(n, log)}: {n.loss!r}, the control has"
        return _judge_line(say, record, n, f"{len(wrong)} of {counted(len(log.lines), 'line')} differ",
                           f"{first} {want.loss if want else 'no such step'!r}")  # fmt: skip
    if why := _unfinished(record):
        return say(Verdict.UNKNOWN, f"{counted(len(log.lines), 'line')} equal", why)
    if errors := _sequence(log, truth):
        return say(Verdict.FAIL, f"{counted(len(errors), 'fault')} in the sequence", errors[0])
    again = len(log.lines) - len(log.effective())
    return say(Verdict.PASS, f"{len(log.lines)} lines, {again} of them trained again")


def samples(record: Record) -> Check:
    """Each step saw the samples that it saw in the control run: none lost, none twice."""
    say = teller("samples", "each exactly once")
    if (early := _logs_missing(say, record)) or record.drilled is None or record.control is None:
        return early or not_reached(say)
    log, whole = record.drilled.log, record.control.log
    if _world_changed(record):  # each rank's share is another; the step of all ranks is the same
        log, whole = log.merged(), whole.merged()
    truth = whole.effective()
    without = next((n for n in [*truth.values(), *log.lines] if n.samples is None), None)
    if without:
        return say(Verdict.UNKNOWN, "-", f"the log has no samples for step {without.step}, rank {without.rank}")
    kept = log.effective()
    have, want = (Counter(s for n in lines.values() for s in n.samples or ()) for lines in (kept, truth))
    lost, twice = (want - have).total(), (have - want).total()
    wrong = [n for n in log.lines if (n.step, n.rank) in truth and n.samples != truth[n.step, n.rank].samples]
    why = _unfinished(record)
    if why and not wrong:
        return say(Verdict.UNKNOWN, f"{have.total()} samples equal", why)
    if wrong or lost or twice:
        value = f"{lost} lost, {twice} repeated of {want.total()}"
        if not wrong:
            return say(Verdict.FAIL, value, (_sequence(log, truth) or ["the sequences differ"])[0])
        n = wrong[0]
        first = f"first at step {n.step}, rank {n.rank}{_trained_again(n, log)}: {_ids(n.samples)}, the control has"
        return _judge_line(say, record, n, value, f"{first} {_ids(truth[n.step, n.rank].samples)}")
    if errors := _sequence(log, truth):
        return say(Verdict.FAIL, f"{counted(len(errors), 'fault')} in the sequence", errors[0])
    return say(Verdict.PASS, f"{want.total()} samples, 0 lost, 0 repeated")


def _world_changed(record: Record) -> bool:
    """Whether the drilled run was trained by another number of ranks for a while."""
    control, run = record.control, record.drilled
    return bool(control and run and {n.world for n in run.log.lines} - {n.world for n in control.log.lines})


def _losses_before(say: Teller, record: Record, log: Log, truth: dict[tuple[int, int], Line]) -> Check:
    """Another number of ranks adds in another order: exact up to the change, finite and near after it."""
    first = record.first_strike_t() or 0.0
    early = [n for n in log.lines if n.t is not None and n.t < first]
    for n in early:
        if (n.step, n.rank) not in truth or not _same(n.loss, truth[n.step, n.rank].loss):
            return say(Verdict.UNKNOWN, "-", f"step {n.step}, rank {n.rank} differs before the change; {_BY_ITSELF}")
    means = [_means(list(lines)) for lines in (truth.values(), log.effective().values())]
    far = [s for s, loss in means[1].items() if s not in means[0] or not abs(loss / means[0][s] - 1) < _NEAR]
    if far:
        return say(Verdict.FAIL, f"{counted(len(far), 'step')} far off", f"first at step {far[0]}: "
                   f"{means[1][far[0]]:.4g}, the control has {means[0].get(far[0], math.nan):.4g}")  # fmt: skip
    return say(Verdict.PASS, f"{counted(len(early), 'line')} equal up to the change, {_NEAR:.0%} near after it")


def _means(lines: list[Line]) -> dict[int, float]:
    """Mean loss of each step over its ranks."""
    by: dict[int, list[float]] = {}
    for n in lines:
        by.setdefault(n.step, []).append(math.nan if n.loss is None else n.loss)
    return {step: sum(v) / len(v) for step, v in sorted(by.items())}


def deterministic(record: Record) -> Check:
    """Two undisturbed runs are the same, so that a difference after a fault means something."""
    say = teller("deterministic", "control runs equal")
    others = [n for n in record.runs if n.startswith(f"{CONTROL}-")]
    if not others or record.control is None:
        return not_reached(say)
    for name in others:
        truth, log = record.control.log.effective(), record.runs[name].log.effective()
        for key in sorted(truth.keys() | log.keys()):
            a, b = truth.get(key), log.get(key)
            if a is None or b is None or not _same(a.loss, b.loss) or a.samples != b.samples:
                shown = [f"{n.loss!r}" if n else "no such step" for n in (a, b)]
                return say(Verdict.UNKNOWN, "no", f"step {key[0]}, rank {key[1]}: loss {shown[0]} in one undisturbed"
                           f" run, {shown[1]} in the other")  # fmt: skip
        found = _judge_state(record, "deterministic", CONTROL, name, None)
        if found.verdict is not Verdict.PASS:
            return say(Verdict.UNKNOWN, "no" if found.verdict is Verdict.FAIL else "-", found.detail)
    return say(Verdict.PASS, f"{1 + len(others)} undisturbed runs are equal")


def oracle_sees(record: Record) -> Check:
    """Of a drill that plants a wrong bit: the comparison of the state found it."""
    say = teller("oracle sees", "the planted bit is found")
    planted = next((e for e in record.evidence.values() if "tensor" in e), None)
    if planted is None:
        return say(Verdict.UNKNOWN, "-", "nothing was planted")
    found = [k for p in _pairs(record, CONTROL, DRILLED) for k in p.get("different_keys", ())]
    name = str(planted["tensor"])
    # the target names a parameter as its wrappers do (DDP, torch.compile), the step as the model does
    bare = re.sub(r"(^|\.)(module|_orig_mod|_checkpoint_wrapped_module)(?=\.)", "", name).lstrip(".")
    names = {name, bare}
    if hit := next((k for k in found if any(k == n or k.endswith(f".{n}") for n in names)), None):
        return say(Verdict.PASS, f"{hit} differs")
    return say(Verdict.BROKE, "not found", f"{name} was made wrong, and the oracle did not see it: trust no verdict")


def _logs_missing(say: Teller, record: Record) -> Check | None:
    run = record.drilled
    if not record.evidence or run is None or record.control is None:
        return not_reached(say)
    for r in (record.control, run):
        if not r.log.lines:
            return say(Verdict.UNKNOWN, "-", f"the {r.name} run wrote no log")
    return None


def _unfinished(record: Record) -> str | None:
    """Why the end cannot be compared: one cause is not reported as six failures."""
    run, control = record.drilled, record.control
    if run is None or control is None or (run.status == 0 and run.log.last_step >= control.log.last_step):
        return None
    return f"the run did not get to its end (step {run.log.last_step} of {control.log.last_step})"


def _judge_line(say: Teller, record: Record, first: Line, value: str, detail: str) -> Check:
    """A wrong line is the target's failure, unless the very first one was written before the fault."""
    struck, seen = record.first_strike_t(), phases(record)
    if struck is not None and seen and (first.t is not None and first.t < struck and seen.is_before(first)):
        return say(Verdict.UNKNOWN, value, f"{detail}, before the fault already; {_BY_ITSELF}")
    return say(Verdict.FAIL, value, detail)


def _sequence(log: Log, truth: dict[tuple[int, int], Line]) -> list[str]:
    kept = log.effective()
    missing = sorted(truth.keys() - kept.keys())
    errors = [f"step {s}, rank {r} is missing from the log" for s, r in missing]
    problems = [f"{p} (the log could not be read there)" for p in log.problems] if errors else []
    return [*sequence_errors(log), *errors, *problems]


def _same(a: float | None, b: float | None) -> bool:
    return a is b or (a is not None and b is not None and struct.pack("<d", a) == struct.pack("<d", b))


def _trained_again(line: Line, log: Log) -> str:
    first = next(n for n in log.lines if (n.step, n.rank) == (line.step, line.rank))
    return "" if first is line else " (trained again)"


def _ids(ids: tuple[int | str, ...] | None) -> str:
    shown = ", ".join(map(str, (ids or ())[:6]))
    return f"[{shown}{', ...' if ids and len(ids) > 6 else ''}]"


def _pairs(record: Record, left: str, right: str) -> list[dict[str, Any]]:
    return list(record.compared.get((left, right), {}).get("pairs", ()))


def _judge_state(record: Record, name: str, left: str, right: str, group: str | None) -> Check:
    """State of two runs by what the independent reader found; ``group`` narrows it to keys that begin so."""
    say = teller(name, "every bit of the final step" if group is None else f"entries {group}.* equal")
    answer = record.compared.get((left, right))
    if answer is None:
        return not_reached(say)
    if answer["reason"]:
        return say(Verdict.UNKNOWN, "-", answer["reason"])
    mine, theirs = answer["final"]
    why = _unfinished(record) if right == DRILLED else None
    if mine != theirs and not why:
        return say(
            Verdict.FAIL, f"last step {theirs}", f"the last committed step is {theirs}, in the {left} run {mine}"
        )
    for pair in answer["pairs"]:
        if error := pair["error"]:
            bad = error["side"] == "right" and not error["lacks"]
            return say(Verdict.FAIL if bad else Verdict.UNKNOWN, "unreadable", f"step {pair['step']}: {error['text']}")
    pairs = answer["pairs"]
    changed = right == DRILLED and group is None and _world_changed(record)
    if changed:  # what another number of ranks has trained is not the same to the last bit
        pairs = [p for p in pairs if _saved_before(record, p)]
        if not pairs:
            return say(Verdict.UNKNOWN, "-", "no step that both runs hold was saved before the number of ranks changed")
    before = _differed_before(record, pairs) if right == DRILLED else frozenset()
    found = _judge_pairs(say, pairs, group, before)
    if changed and found.verdict is Verdict.PASS:
        return say(Verdict.PASS, found.value, f"{found.detail}, up to the first change of the number of ranks")
    if why and found.verdict is Verdict.PASS:
        return say(Verdict.UNKNOWN, f"{found.value}, up to step {theirs}", why)
    return found


def _judge_pairs(say: Teller, pairs: list[dict[str, Any]], group: str | None, before: frozenset[str]) -> Check:
    """``before`` are entries that differed before the fault: what they say after it proves nothing."""
    of_group = [p["groups"].get(group, [0, 0]) for p in pairs] if group else []
    if group and not any(n for n, _ in of_group):
        return say(Verdict.UNKNOWN, "-", f"the checkpoints have no entry {group}.*")
    wrong = [(p, [k for k in p["different_keys"] if group in (None, k.split(".")[0])]) for p in pairs]
    after = [(p, [k for k in keys if k not in before]) for p, keys in wrong]
    for pair, keys in [*after, *wrong]:
        if keys:
            return _different(say, pair, keys, group, before)
    last = pairs[-1]
    steps = f"step{'s' if len(pairs) > 1 else ''} {', '.join(str(p['step']) for p in pairs)}"
    if group:
        return say(Verdict.PASS, f"{counted(of_group[-1][0], 'entry')} equal", steps)
    what = f"{counted(last['tensors'], 'tensor')} ({size(last['bytes'])}) and {counted(last['values'], 'value')} equal"
    return say(Verdict.PASS, what, steps)


def _different(say: Teller, pair: dict[str, Any], keys: list[str], group: str | None, before: frozenset[str]) -> Check:
    total = pair["tensors"] + pair["values"] if group is None else pair["groups"][group][0]
    value = f"{len(keys)} of {counted(total, 'entry')} differ"
    if group is None:
        per = Counter(k.split(".")[0] for k in keys)
        parts = [f"{g} {n} of {pair['groups'][g][0]}" for g, n in sorted(per.items())]
        value += f" ({', '.join(parts)})"
    known = [d for d in pair["differences"] if d["key"] in keys]
    said = _said(known[0]) if known else keys[0]
    if keys[0] in before:
        return say(
            Verdict.UNKNOWN, value, f"at step {pair['step']}, saved before the fault, already: {said}; {_BY_ITSELF}"
        )
    unknown = bool(known) and all(d["what"] == "undecodable" for d in known)
    return say(Verdict.UNKNOWN if unknown else Verdict.FAIL, value, f"first at step {pair['step']}: {said}")


def _differed_before(record: Record, pairs: list[dict[str, Any]]) -> frozenset[str]:
    """Entries that differ in steps that were committed before the fault."""
    return frozenset(k for p in pairs if _saved_before(record, p) for k in p.get("different_keys", ()))


def _saved_before(record: Record, pair: dict[str, Any]) -> bool:
    """Whether the drilled run's side of a pair was committed before anything was done to it."""
    run, first = record.drilled, record.first_strike_t()
    if run is None or first is None:
        return False
    early = {c.folder for c in run.commits if c.seen is not None and c.seen <= first}
    return any(str(pair["right"]).endswith(f"/{folder}") for folder in early)


def _said(d: dict[str, Any]) -> str:
    match d["what"]:
        case "missing":
            return f"{d['key']} is missing in the {'drilled' if d['in'] == 'right' else 'control'} run"
        case "layout":
            return f"{d['key']} is {d['right']}, in the control run {d['left']}"
        case "element":
            count = f"{d['elements']} of {d['of']} elements"
            return f"{d['key']}{d['index']} is {d['right']}, in the control run {d['left']} ({count})"
        case "value":
            return f"{d['key']}: {d['at'] or 'value'} is {d['right']}, in the control run {d['left']}"
    return f"{d['key']} differs, and cannot be decoded without running code from it: {d['reason']}"
