"""``--from URL``: what a run's ledger says, put where no flag says otherwise."""

from __future__ import annotations

from typing import Any

from ckpt.errors import NotFound
from elastic.commands.ledger.source import storage_options
from elastic.economics.fitting import Fit, fit
from elastic.economics.inputs import PRIOR_FAILURES, BadInput
from elastic.ledger.history import Life, dead_s, lives, slowdown, stall_s, step_s
from elastic.ledger.reader import read


def fill(o: dict[str, Any]) -> None:
    """Set the options that are not given from the ledger at ``o["url"]``, with their provenance in ``o["read_off"]``.

    Raises ``NotFound`` where there is no ledger or nothing in it, :class:`BadInput` where it does not say enough.
    """
    url = o["url"]
    story, notes = _story(url, o)
    dead = list(dead_s(story))
    saves = [save for life in story for save in life.saves]
    back = [life for life in story if life.attempt and life.steps]
    back = back or [life for life in story[1:] if life.steps]  # restarts from nothing: processes start all the same
    sizes = [save.bytes for save in saves]
    stalls = [stall_s(save) for save in saves]
    step, loss = step_s(story), slowdown(story)
    found = _fit(o, story, stalls=stalls, dead=dead, back=back, persists=[save.persist_s for save in saves])
    read_off: dict[str, str] = {}

    def put(name: str, value: Any, count: int, field: str | None = None) -> None:
        if o.get(name) is None and value is not None and count:
            o[name] = value
            read_off[field or f"{name}_s"] = f"measured (n={count})"

    if (o["mtbf"] is None and o["rate"] is None) or o["prior_failures"] is not None:
        uptimes = sum(life.uptime_s > 0 for life in story)
        put("exposure", found.rates.exposure_s, uptimes)
        put("failures", found.rates.failures, uptimes, "failures")
    put("gpus", None if o["nodes"] else float(story[-1].world), len(story), "nodes")
    if not found.rates.failures and o["failures"] == 0 and o["prior_failures"] is None:
        o["prior_failures"] = PRIOR_FAILURES  # with nothing seen, the fleet's rate is the better guess
    if found.rates.observed_notices and o["notice_share"] is None:
        saved, missed = found.rates.notice_saved, found.rates.notice_missed
        put("notice_share", f"{saved}/{missed}", (saved or 0) + (missed or 0), "notice_share")
    if o["size"] is None:
        put("stall", found.costs.stall_s, len(stalls))
        put("persist", found.costs.persist_s, len(saves))
    if loss and o["persist"]:
        put("slowdown", min(loss, 0.99), sum(row.n for life in story for row in life.uploading), "slowdown")
    if o["detect"] is None:  # the ledger knows their sum alone
        put("reschedule", found.costs.reschedule_s, len(dead))
    put("load", found.costs.load_s, len(back))
    put("warmup", found.costs.warmup_s, len(_warmups(story)))
    put("step", step, sum(row.n for life in story for row in life.quiet or life.uploading), "step_s")
    put("checkpoint", float(sizes[-1]) if sizes else None, len(sizes), "bytes")
    if o.get("current", "") is None and story[-1].every not in ("", "auto") and o["step"]:
        o["current"] = story[-1].every
    if found.crash_loop:
        notes.append("Three starts in a row ended before their first step: find what ends them, no interval helps.")
    notes += _little(failures=o["failures"] if "failures" in read_off else None,
                     saves=len(saves) if "stall_s" in read_off else None)  # fmt: skip
    o["read_off"], o["notes"] = read_off, notes


def _little(*, failures: int | None, saves: int | None) -> list[str]:
    """What is to be said when few failures or saves were measured; None: not used."""
    counts = ((failures, "failure", 5), (saves, "save", 3))
    few = [(n, what) for n, what, enough in counts if n is not None and n < enough]
    named = " and ".join(f"{n} {what}{'s' if n != 1 else ''}" for n, what in few)
    return [f"Rests on only {named} measured."] if few else []


def step_at(url: str, o: dict[str, Any]) -> tuple[int, float]:
    """(devices, seconds of a step) of the newest life of a run; raises as :func:`fill` does."""
    story, _ = _story(url, o)
    newest = [life for life in story if life.world == story[-1].world]
    seconds = step_s(newest)
    if seconds is None:
        raise BadInput("measured", f"--measured {url}: its ledger has no step on {story[-1].world} devices")
    return story[-1].world, seconds


def _story(url: str, o: dict[str, Any]) -> tuple[list[Life], list[str]]:
    from ckpt.store import open_store

    store = open_store(url, client=o["client"], **storage_options(o["options"]))
    ledger = read(store, rank=0)
    if not ledger.objects:
        hint = f"ckpt ls {url}   |   elastic interval --mtbf 6h --save 40s asks for the figures instead"
        raise NotFound(f"no ledger at {store.url}: nothing there was written by elastic.Run", hint=hint)
    bad = f"{len(ledger.problems)} unreadable line{'s' if len(ledger.problems) != 1 else ''} of the ledger left out"
    if not ledger.events:
        raise NotFound(
            f"the ledger at {store.url} holds no event" + (f"; {bad}" if ledger.problems else ""),
            hint="give the figures instead: elastic interval --mtbf 6h --save 40s",
        )
    return lives(ledger.events), [f"{bad}, the first: {ledger.problems[0]}."] if ledger.problems else []


def _fit(
    o: dict[str, Any], story: list[Life], *, stalls: list[float], persists: list[float], dead: list[float],
    back: list[Life],
) -> Fit:  # fmt: skip
    known = o["mtbf"] is not None or o["rate"] is not None or o["exposure"] is not None
    if not any(life.steps for life in story) and not known:
        starts = f"{len(story)} start{'s' if len(story) != 1 else ''}"
        raise BadInput("exposure_s", f"{starts} in the ledger at {o['url']}, and none reached a first step: "
                                     "there is nothing to learn from yet; give --mtbf and --save")  # fmt: skip
    if not stalls and o["stall"] is None and o["size"] is None:
        raise BadInput(
            "stall_s",
            f"no save in the ledger at {o['url']}: give --stall, how long a save stops "
            'training (every="auto" makes its first save after at most 2 min of steps)',
        )
    lived = [life.as_attempt() for life in story]
    if not any(a.uptime_s > 0 for a in lived):
        lived = [type(lived[0])(uptime_s=1.0, ended="running")]  # its rate is not used
    return fit(
        lived,
        stalls_s=stalls or [0.0],
        persists_s=persists,
        reschedules_s=dead,
        loads_s=[life.load_s for life in back],
        warmups_s=_warmups(story),
    )


def _warmups(story: list[Life]) -> list[float]:
    return [life.warmup_s for life in story if life.warmup_s is not None]
