"""The result as one JSON document, schema ``drills.run/1``: additive within its major number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from drills.checks import EXIT_STATUS, Check, Verdict, overall, phases
from drills.history import Record, Run
from drills.report.story import replay_line, tell
from drills.scenario import Scenario, plan_to_json

SCHEMA = "drills.run/1"


def document(record: Record, scenario: Scenario, checks: Sequence[Check]) -> dict[str, Any]:
    """Everything a program may want to know; seconds and exact bytes, times in UTC."""
    verdict = overall(checks, record)
    seen = phases(record)
    sees = next((c for c in checks if c.name == "oracle sees"), None)
    return {
        "schema": SCHEMA,
        "drill": scenario.name,
        "verdict": verdict.value,
        "exit_status": EXIT_STATUS[verdict],
        "meant_to_fail": scenario.meant_to_fail is not None,
        "as_meant": None if sees is None else sees.verdict is Verdict.PASS and verdict is Verdict.FAIL,
        "started": utc(record.started),
        "seconds": None if record.ended is None else round(record.ended - record.started, 3),
        "story": asdict(tell(record, scenario, checks)),
        "checks": [{**asdict(c), "verdict": c.verdict.value} for c in checks],
        "phases_s": None if seen is None else {
            "noticed": seen.after(seen.noticed), "restarted": seen.after(seen.restarted),
            "all_ranks": seen.after(seen.complete), "first_step": seen.after(seen.first_step),
            "caught_up": seen.after(seen.caught_up),
        },
        "lost": None if seen is None else {
            "steps": list(seen.again), "seconds": seen.lost_s, "resumed_from": seen.resumed_from,
            "last_before": seen.last_before,
        },
        "moment": record.moment,
        "evidence": record.evidence,
        "healed": record.healed,
        "held": record.held,
        "scenario": record.scenario,
        "cached_control": record.cached_control,
        "runs": {name: _run(run) for name, run in record.runs.items()},
        "compared": {f"{a} with {b}": answer for (a, b), answer in record.compared.items()},
        "broke": record.broke,
        "ended_early": record.ended_early,
        "skipped": list(record.plan.skip),
        "plan": plan_to_json(record.plan),
        "environment": record.environment,
        "replay": replay_line(record.plan, record.moment),
    }  # fmt: skip


def utc(t: float) -> str:
    """A time as ISO 8601 in UTC, to the second."""
    return datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _run(run: Run) -> dict[str, Any]:
    storage = {k: v for k, v in (run.storage or {}).items() if k not in ("ledger", "event", "t", "run")}
    return {
        "url": run.url, "argv": run.argv, "starts": run.starts, "status": run.status, "stopped": run.stopped,
        "seconds": run.seconds, "steps": run.log.last_step, "lines": len(run.log.lines),
        "log_problems": list(run.log.problems), "left_running": run.left, "storage": storage or None,
        "commits_seen": [c.name for c in run.commits],
    }  # fmt: skip
