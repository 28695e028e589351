"""Tells on stderr what a drill is doing, one line an event, so that nobody is left alone with a cursor."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO


class Narrator:
    """A listener of the history that speaks to a person."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._began = time.time()
        self._run_began: dict[str, float] = {}
        self._ranks: dict[str, set[int]] = {}
        self._struck = False

    def __call__(self, event: dict[str, Any]) -> None:
        """Say what is worth saying about one event."""
        handler = getattr(self, "_" + event["event"].replace(".", "_"), None)
        text = handler(event) if handler else None
        if text and event["t"] >= self._began:  # what comes from a kept control run is told in one line
            run = f"{event['run']}: " if "run" in event else ""
            print(f"{event['t'] - self._began:7.1f} s  {run}{text}", file=self._stream, flush=True)

    def _drill(self, e: dict[str, Any]) -> str:
        plan = e["plan"]
        self._began = e["t"]
        return f"drill {plan['drill']}, seed {plan['seed']}, at most {plan['budget_s']:g} s"

    def _run_started(self, e: dict[str, Any]) -> str:
        self._run_began.setdefault(e["run"], e["t"])
        return "started, undisturbed" if e["run"] != "drilled" else "started" if e["start"] == 1 else "started again"

    def _process_seen(self, e: dict[str, Any]) -> str:
        again = e["rank"] in self._ranks.setdefault(e["run"], set())
        self._ranks[e["run"]].add(e["rank"])
        return f"rank {e['rank']} is {'back' if again else 'up'} (pid {e['pid']})"

    def _process_ended(self, e: dict[str, Any]) -> str | None:
        return f"rank {e['rank']} (pid {e['pid']}) ended" if self._struck else None

    def _commit_seen(self, e: dict[str, Any]) -> str:
        return f"step {e['step']} is committed"

    def _moment(self, e: dict[str, Any]) -> str:
        drawn = f"drawn from steps {e['lowest']}-{e['highest']}"
        return (
            f"plan: strike rank {e['rank']} of {e['world']} once step {e['step']} of {e['last_step']} is done ({drawn})"
        )

    def _fault_proved(self, e: dict[str, Any]) -> str:
        self._struck = True
        return f"FAULT: {e['evidence']['said']}"

    def _fault_healed(self, e: dict[str, Any]) -> str | None:
        return None if e["said"].startswith("nothing to undo") else f"HEALED: {e['said']}"

    def _healed(self, e: dict[str, Any]) -> str:
        return str(e["said"])

    def _held(self, e: dict[str, Any]) -> str:
        return f"inside the {e['phase']}: rank {e['rank']} is held at {e['what']}"

    def _control_cached(self, e: dict[str, Any]) -> str:
        return str(e["said"])

    def _run_ended(self, e: dict[str, Any]) -> str:
        self._struck = False
        took = e["t"] - self._run_began.get(e["run"], e["t"])
        how = f"stopped: {e['stopped']}" if e["stopped"] else f"ended with status {e['status']}"
        return f"{how}, after {took:.1f} s"

    def _left_running(self, e: dict[str, Any]) -> str | None:
        return f"{len(e['processes'])} processes were left running; ended" if e["processes"] else None

    def _reading(self, e: dict[str, Any]) -> str:
        return f"reading the checkpoints back with plain DCP, {e['left']} against {e['right']}"

    def _tick(self, e: dict[str, Any]) -> str:
        return f"step {e['step']}, {e['workers']} workers, {e['left_s']:.0f} s of the budget left"

    def _broke(self, e: dict[str, Any]) -> str:
        return f"the harness broke: {e['said']}"

    def _ended_early(self, e: dict[str, Any]) -> str:
        return f"ended early: {e['said']}"
