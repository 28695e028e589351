"""Faults of the storage while the job uses it: on the wire to S3, or at the file calls of the target's processes."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from drills.errors import HarnessBroken, NotPossible
from drills.faults import Base, Evidence, Site
from drills.faults.gates import KEYS, FileGate, ports
from drills.faults.process import chosen, one_or_all
from drills.faults.proxy import (
    Action,
    CutResponse,
    FaultProxy,
    Match,
    Reset,
    Rule,
    Stall,
    Status,
    Twice,
    any_request,
    is_get,
    is_list,
    is_put,
)  # fmt: skip

OPERATIONS: dict[str, Match] = {"any": any_request, "put": is_put, "get": is_get, "list": is_list}
KINDS: dict[str, Callable[[StorageFault], Action]] = {
    "status": lambda f: Status(f.status, {503: "SlowDown", 500: "InternalError"}.get(f.status, "Injected")),
    "reset": lambda f: Reset(),
    "truncate": lambda f: CutResponse(f.body_bytes),
    "slow": lambda f: Stall(f.delay_s),
    "duplicate": lambda f: Twice(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFault(Base):
    """Requests of an ``operation`` go wrong in one way, each with ``probability``, at most ``times`` of them.

    ``which`` "one": only those of the drawn rank.

    ``kind`` "status" answers with ``status``, "reset" drops the connection, "truncate" ends an answer after
    ``body_bytes``, "slow" delays by ``delay_s``, "duplicate" has the server do it twice. On S3 that happens on the
    wire; on a local disk, where only "reset" (an I/O error) and "slow" mean something, at the call that opens or
    renames a file of a step or a commit.
    """

    name: str = "storage"
    kind: str = "status"
    status: int = 503
    operation: str = "any"
    which: str = "all"
    probability: float = 1.0
    times: int | None = None
    delay_s: float = 0.3
    body_bytes: int = 100
    timeout_s: float = 10.0
    then: str = ""
    needs: str = ""
    _before: ClassVar[dict[tuple[str, StorageFault], tuple[FaultProxy, Rule, int]]] = {}

    def __post_init__(self) -> None:
        """Refuse words that mean nothing, with ``ValueError``."""
        if self.kind not in KINDS:
            raise ValueError(f"kind = {self.kind!r}: one of {', '.join(KINDS)}")
        if self.operation not in OPERATIONS:
            raise ValueError(f"operation = {self.operation!r}: one of {', '.join(OPERATIONS)}")
        one_or_all(self.which)
        if not 0 < self.probability <= 1:
            raise ValueError(f"probability = {self.probability:g}: above 0, at most 1")

    def setup(self, site: Site) -> dict[str, str]:
        """Refuse a storage on which the fault does not exist; plant the file calls where there is no wire."""
        if site.proxy is not None:
            return {}
        if site.local is None or self.kind not in ("reset", "slow") or self.which == "one":
            raise NotPossible(
                f"requests cannot be harmed ({self.kind}) where the run keeps its checkpoints",
                facts=[("checkpoints", site.url)],
                hint="--url-base s3://bucket/prefix --storage-option endpoint_url=http://...",
            )
        return self._gate(site).env()

    def inject(self, site: Site) -> Evidence:
        """Put the rule in force."""
        evidence = {"t": time.time(), "rank": -1, "kind": self.kind, "said": f"storage: {self._said()}"}
        if site.proxy is not None:
            rule = Rule(self._match(site), KINDS[self.kind](self), self.times, self.probability)
            self._before[site.owner, self] = (site.proxy, rule, site.proxy.faults())
            site.proxy.rules.append(rule)
        else:
            self._gate(site).rule(
                action="delay" if self.kind == "slow" else "error", phase="", key=f"{KEYS['save']}|{KEYS['commit']}",
                write=True, after_step=-1, seconds=self.delay_s, errno=errno.EIO,
            )  # fmt: skip
        return evidence

    def heal(self, site: Site) -> str:
        """Take the rule away, and say how many requests it met."""
        if site.proxy is None:
            gate = self._gate(site)
            if gate.is_open():
                return "nothing to undo"
            gate.open(drop=False)
            return self._count(gate.harmed())
        before = self._before.pop((site.owner, self), None)
        if before is None:
            return "nothing to undo"
        proxy, rule, count = before
        if rule in proxy.rules:
            proxy.rules.remove(rule)
        return self._count(proxy.faults() - count)

    def _count(self, harmed: int) -> str:
        if not harmed:
            raise HarnessBroken("no request came while the storage was at fault, so nothing was tried",
                                hint="a longer fault, or more frequent saves")  # fmt: skip
        return f"the storage is well again; {harmed} requests were harmed"

    def _said(self) -> str:
        what = {
            "status": f"{self.status} to",
            "reset": "connections lost on",
            "truncate": f"cut after {self.body_bytes} B:",
            "slow": f"{self.delay_s:g} s of delay for",
            "duplicate": "done twice:",
        }[self.kind]
        share = "every" if self.probability == 1 else f"{self.probability:.0%} of each"
        return f"{what} {share} {'request' if self.operation == 'any' else self.operation}"

    def _match(self, site: Site) -> Match:
        """The operation, of one rank's processes where only one is meant."""
        operation = OPERATIONS[self.operation]
        if self.which == "all":
            return operation
        victim = chosen(site, "one", "cut off")[0]
        return lambda request: operation(request) and request.peer in ports(victim.pid)

    @staticmethod
    def _gate(site: Site) -> FileGate:
        return FileGate(site.folder / "gate-storage")
