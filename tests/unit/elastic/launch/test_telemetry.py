"""Host counters: from readings that were recorded on a Linux 6.18 host, and from this one."""

from __future__ import annotations

import os
import time

from elastic.launch.telemetry import Counters, Files, between, read

RECORDED = {
    "/proc/7/stat": "7 (a (b) c) R 14323 14323 31291 0 -1 4194304 101 0 12 0 250 30 0 0 20 0 1 0 2805023 3133440 413",
    "/proc/7/schedstat": "2801234567 1500000000 913",
    "/proc/7/status": "Name:\tx\nvoluntary_ctxt_switches:\t150\nnonvoluntary_ctxt_switches:\t57\n",
    "/proc/7/cgroup": "9:name=systemd:/\n2:cpuacct:/\n1:cpu:/jobs/a\n0::/\n",
    "/sys/fs/cgroup/cpu/jobs/a/cpu.stat": "nr_periods 90\nnr_throttled 31\nthrottled_time 2500000000\nnr_bursts 0\n",
    "/proc/pressure/cpu": "some avg10=53.51 avg60=61.33 avg300=62.75 total=11835948026\n"
    "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    "/proc/pressure/io": "some avg10=0.06 avg60=0.15 avg300=0.33 total=352637364\nfull avg10=0.00 total=130476906\n",
    "/proc/net/snmp": "Ip: Forwarding\nIp: 1\n"
    "Tcp: RtoAlgorithm RtoMin RtoMax MaxConn ActiveOpens PassiveOpens AttemptFails EstabResets CurrEstab InSegs "
    "OutSegs RetransSegs InErrs OutRsts InCsumErrors\n"
    "Tcp: 1 200 120000 -1 86650 77074 9462 16126 4 14037339 13999960 24497 0 19922 0\n",
    "/proc/net/dev": "Inter-|   Receive                                                |  Transmit\n"
    " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls\n"
    "    lo: 158567280557 13995437    9    9    0     0          0         0 158567280557 13995437    0    0    0\n"
    "  eth0:       0       0    1    2    0     0          0         0        0       0    3    4    0     0   0   0\n",
    "/proc/cpuinfo": "processor\t: 0\ncpu MHz\t\t: 2300.000\nprocessor\t: 1\ncpu MHz\t\t: 2100.000\n",
}


class Recorded:
    def __init__(self, texts: dict[str, str]) -> None:
        self.text = texts.get


def test_recorded_readings() -> None:
    assert read(Recorded(RECORDED), 7) == Counters(
        cpu_s=2.8, queued_s=1.5, switched_away=57, major_faults=12, throttled_s=2.5, cpu_stall_s=11835.948026,
        io_stall_s=352.637364, memory_stall_s=None, tcp_retransmits=24497, link_drops=10, cpu_mhz=2200.0,
    )  # fmt: skip


def test_cgroup_version_2() -> None:
    texts = {
        "/proc/7/cgroup": "0::/jobs/a\n",
        "/sys/fs/cgroup/jobs/a/cpu.stat": "usage_usec 5\nthrottled_usec 1500000\n",
    }
    assert read(Recorded(texts), 7) == Counters(throttled_s=1.5)


def test_a_host_that_tells_nothing_is_not_guessed_at() -> None:
    assert read(Recorded({}), 7) == Counters()
    assert between(Counters(), Counters(cpu_s=1.0, cpu_mhz=9.0)) == Counters(cpu_mhz=9.0)


def test_every_prefix_of_what_is_recorded_can_be_read() -> None:
    """A file may end early; numbers that are there are taken, the rest is unknown."""
    for path, text in RECORDED.items():
        for end in range(0, len(text), 7):
            read(Recorded({**RECORDED, path: text[:end]}), 7)


def test_this_host_while_it_computes() -> None:
    first = read(Files(), os.getpid())
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    used = between(first, read(Files(), os.getpid()))
    assert used.cpu_s is not None
    assert 0.15 <= used.cpu_s < 2.0
    assert used.queued_s is None or used.queued_s >= 0
