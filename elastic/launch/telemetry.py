"""What a Linux host tells of a process and of itself, as counters; a straggler's cause is in their differences.

Everything is read through a ``Source``, so that the same code reads this host and recorded readings. What a host does
not tell is None, and never a guess. Devices (temperature, power, clocks, ECC) are not read here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

_TICKS_PER_S = 100.0  # of /proc/<pid>/stat: USER_HZ, which is 100 on every Linux


class Source(Protocol):
    """Where text under /proc and /sys comes from."""

    def text(self, path: str) -> str | None:
        """The contents of ``path``; None where there is none, or it may not be read."""
        ...


class Files:
    """This host."""

    def text(self, path: str) -> str | None:
        """See ``Source``."""
        try:
            return Path(path).read_text(errors="replace")
        except OSError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counts since the start of the process (the first part) or of the host; None: not told."""

    cpu_s: float | None = None
    queued_s: float | None = None
    """Runnable, but another process had the CPU."""
    switched_away: int | None = None
    """Times that it lost the CPU before it was done."""
    major_faults: int | None = None
    """Pages that had to be read from disk."""
    throttled_s: float | None = None
    """Its control group was over its CPU quota."""
    cpu_stall_s: float | None = None
    io_stall_s: float | None = None
    memory_stall_s: float | None = None
    """Some process of the host waited for CPU, disk, memory (pressure stall information)."""
    tcp_retransmits: int | None = None
    link_drops: int | None = None
    """Packets that interfaces other than lo dropped, or received with errors."""
    cpu_mhz: float | None = None
    """Mean clock of the cores now; not a count."""


def read(source: Source, pid: int) -> Counters:
    """One reading for one process."""
    stat = source.text(f"/proc/{pid}/stat") or ""
    after = stat.rpartition(")")[2].split()
    queue = (source.text(f"/proc/{pid}/schedstat") or "").split()
    status = source.text(f"/proc/{pid}/status") or ""
    away = re.search(r"nonvoluntary_ctxt_switches:\s*(\d+)", status)
    return Counters(
        cpu_s=(int(after[11]) + int(after[12])) / _TICKS_PER_S if len(after) > 12 else None,
        major_faults=int(after[9]) if len(after) > 9 else None,
        queued_s=int(queue[1]) / 1e9 if len(queue) > 1 else None,
        switched_away=int(away[1]) if away else None,
        throttled_s=_throttled(source, pid),
        cpu_stall_s=_stall(source, "cpu"), io_stall_s=_stall(source, "io"), memory_stall_s=_stall(source, "memory"),
        tcp_retransmits=_retransmits(source), link_drops=_drops(source), cpu_mhz=_clock(source),
    )  # fmt: skip


def between(first: Counters, last: Counters) -> Counters:
    """What was counted from one reading to the next; the clock is that of the last."""
    values = {}
    for f in fields(Counters):
        a, b = getattr(first, f.name), getattr(last, f.name)
        values[f.name] = b if f.name == "cpu_mhz" else None if a is None or b is None else b - a
    return Counters(**values)


def _stall(source: Source, what: str) -> float | None:
    found = re.search(r"^some .*total=(\d+)", source.text(f"/proc/pressure/{what}") or "", re.MULTILINE)
    return int(found[1]) / 1e6 if found else None


def _throttled(source: Source, pid: int) -> float | None:
    """Of the control group, version 2 or 1."""
    for line in (source.text(f"/proc/{pid}/cgroup") or "").splitlines():
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            stat = source.text(f"/sys/fs/cgroup{path.rstrip('/')}/cpu.stat") or ""
            if found := re.search(r"^throttled_usec (\d+)", stat, re.MULTILINE):
                return int(found[1]) / 1e6
        if "cpu" in controllers.split(","):
            stat = source.text(f"/sys/fs/cgroup/cpu{path.rstrip('/')}/cpu.stat") or ""
            if found := re.search(r"^throttled_time (\d+)", stat, re.MULTILINE):
                return int(found[1]) / 1e9
    return None


def _retransmits(source: Source) -> int | None:
    rows = [line.split() for line in (source.text("/proc/net/snmp") or "").splitlines() if line.startswith("Tcp:")]
    if len(rows) != 2 or "RetransSegs" not in rows[0] or len(rows[1]) < len(rows[0]):
        return None
    return int(rows[1][rows[0].index("RetransSegs")])


def _drops(source: Source) -> int | None:
    lines = (source.text("/proc/net/dev") or "").splitlines()[2:]
    total, found = 0, False
    for line in lines:
        name, _, numbers = line.partition(":")
        values = numbers.split()
        if name.strip() != "lo" and len(values) >= 12:  # bytes, packets, errors, drops, ... received; then sent
            found = True
            total += int(values[2]) + int(values[3]) + int(values[10]) + int(values[11])
    return total if found else None


def _clock(source: Source) -> float | None:
    clocks = [
        float(x) for x in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", source.text("/proc/cpuinfo") or "", re.MULTILINE)
    ]
    return sum(clocks) / len(clocks) if clocks else None
