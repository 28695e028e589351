"""Inside a save, a commit, a load: one request or file is held back there, so that a fault strikes at that instant.

Phases are told from outside, by what reaches the storage: names below ``steps/`` and ``commits/``. On S3 a proxy
holds the request; on a local disk an audit hook of Python, planted in the target's own processes, holds the call that
opens or renames the file. Nothing in the product knows of either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import psutil

from drills.faults import Held
from drills.faults.planting import GATES, planted
from drills.faults.proxy import FaultProxy, Hold, Request, Rule, is_list
from drills.timeline import Proc

KEYS = {"save": r"steps/(\d{12})/[^/]+/.+", "commit": r"commits/(\d{12})-[^/]+$", "load": r"steps/(\d{12})/[^/]+/.+"}
LONGEST_S = 60.0


class Gate(Protocol):
    """Closed at a phase, it holds the first process that comes; one at a time."""

    def env(self) -> dict[str, str]:
        """What the target needs in its environment."""
        ...

    def close(self, phase: str, after_step: int) -> None:
        """Hold the first one that comes to the phase, of a step above ``after_step`` (a load: of any step)."""
        ...

    def held(self, workers: Mapping[int, Proc]) -> Held | None:
        """Who is held, if anybody."""
        ...

    def open(self, *, drop: bool) -> None:
        """Let the held one go on; ``drop``: what it asked for is never done, where it is a request on the wire."""
        ...


class FileGate:
    """On a local disk, by an audit hook in the target's processes; ``folder`` is where they are told."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self._rule = folder / "rule.json"
        folder.mkdir(parents=True, exist_ok=True)

    def env(self) -> dict[str, str]:
        """Put the hook on the path."""
        return planted(**{GATES: str(self._folder)})

    def rule(self, **rule: Any) -> None:
        """Tell the hooks what to do from now on; a new number makes an old ``held`` file meaningless."""
        self._number += 1
        draft = self._folder / "rule.new"
        draft.write_text(json.dumps({"number": self._number, **rule}))
        draft.rename(self._rule)

    def close(self, phase: str, after_step: int) -> None:
        """See ``Gate``."""
        self.rule(action="hold", phase=phase, key=KEYS[phase], write=phase != "load",
                  after_step=-1 if phase == "load" else after_step, seconds=LONGEST_S)  # fmt: skip

    def held(self, workers: Mapping[int, Proc]) -> Held | None:
        """See ``Gate``."""
        try:
            said = json.loads((self._folder / f"held-{self._number}").read_text())
        except (OSError, ValueError):
            return None
        rank = next((r for r, p in workers.items() if p.pid == said["pid"]), said["rank"])
        return Held(phase=said["phase"], what=f"its {said['call']} of {said['key']}", pid=said["pid"], rank=rank,
                    t=said["t"])  # fmt: skip

    def open(self, *, drop: bool) -> None:
        """See ``Gate``."""
        self._rule.unlink(missing_ok=True)

    def is_open(self) -> bool:
        """Whether no rule is in force."""
        return not self._rule.exists()

    def harmed(self) -> int:
        """How many calls have been slowed down or refused."""
        return sum(p.stat().st_size for p in self._folder.glob("harmed-*"))


class ProxyGate:
    """On S3, by the proxy between the target and the server."""

    def __init__(self, proxy: FaultProxy) -> None:
        self._proxy = proxy
        self._rule: Rule | None = None
        self._hold: Hold | None = None
        self._phase = ""

    def env(self) -> dict[str, str]:
        """The proxy is known to the target already."""
        return {}

    def close(self, phase: str, after_step: int) -> None:
        """See ``Gate``."""
        pattern = re.compile(KEYS[phase])

        def match(request: Request) -> bool:
            found = pattern.search(request.path)
            if found is None or is_list(request):
                return False
            if phase == "load":
                return request.method == "GET"
            return request.method in ("PUT", "POST") and int(found[1]) > after_step

        self._phase, self._hold = phase, Hold(LONGEST_S)
        self._rule = Rule(match, self._hold)
        self._proxy.rules.insert(0, self._rule)

    def held(self, workers: Mapping[int, Proc]) -> Held | None:
        """See ``Gate``."""
        if self._hold is None or self._hold.held is None:
            return None
        request = self._hold.held
        found = pattern_key(self._phase, request.path)
        what = f"its {request.method} of {found}"
        for rank, p in workers.items():
            if request.peer in ports(p.pid):
                return Held(phase=self._phase, what=what, pid=p.pid, rank=rank, t=self._hold.held_t)
        return Held(phase=self._phase, what=what, pid=0, rank=-1, t=self._hold.held_t)

    def open(self, *, drop: bool) -> None:
        """See ``Gate``."""
        if self._hold is not None and self._rule is not None:
            self._hold.release(drop=drop)
            if self._rule in self._proxy.rules:
                self._proxy.rules.remove(self._rule)
        self._hold = self._rule = None


def pattern_key(phase: str, path: str) -> str:
    """The part of a path that the phase is told by."""
    found = re.search(KEYS[phase], path)
    return found[0] if found else path


def ports(pid: int) -> set[int]:
    """Local ports of the process and of those below it: a client connects from one of them."""
    try:
        p = psutil.Process(pid)
        family = [p, *p.children(recursive=True)]
        return {c.laddr.port for one in family for c in one.net_connections(kind="tcp") if c.laddr}
    except psutil.Error:
        return set()
