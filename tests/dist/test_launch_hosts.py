"""Two hosts in network namespaces of their own, each with its own launcher: one is lost, joins, is cut off."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler

from elastic.commands.launch import SAFE_CONF
from elastic.launch.torchelastic import rendezvous
from tests.dist.hosts import allowed, net
from tests.dist.launch import Line

pytestmark = pytest.mark.dist
needs_hosts = pytest.mark.skipif(not allowed(), reason="no network namespaces: not verified here")
RING = Path(__file__).parent / "ring.py"


def worlds(lines: list[Line]) -> dict[str, set[int]]:
    """Which ranks stepped in each generation."""
    seen: dict[str, set[int]] = {}
    for x in lines:
        if "step" in x:
            seen.setdefault(x["generation"], set()).add(x["rank"])
    return seen


def both(lines: list[Line]) -> bool:
    return any(ranks == {0, 1} for ranks in worlds(lines).values())


def since(lines: list[Line], pids: set[int]) -> set[int]:
    """Ranks that step in a process that is not among ``pids``."""
    return {x["rank"] for x in lines if "step" in x and x["pid"] not in pids}


def rendezvous_of(port: int) -> RendezvousHandler:
    return rendezvous(backend="c10d", endpoint=f"127.0.0.1:{port}", run_id="job", nodes=(1, 2), blind_s=10,
                      local_addr="127.0.0.1", conf={**SAFE_CONF, "is_host": "0"})  # fmt: skip


def test_a_joining_host_hears_where_the_workers_meet(tmp_path: Path) -> None:
    """Stock torchelastic tells only in the first round: a host that joins later waits in vain, and both end."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = rendezvous_of(server.port)
    assert first.next_rendezvous().world_size == 1
    with ThreadPoolExecutor(1) as pool:
        second = rendezvous_of(server.port)
        joins = pool.submit(second.next_rendezvous)
        end = time.monotonic() + 60
        while not first.num_nodes_waiting():
            assert time.monotonic() < end
            time.sleep(0.05)
        mine, theirs = first.next_rendezvous(), joins.result(60)
    assert (mine.rank, theirs.rank, mine.world_size, theirs.world_size) == (0, 1, 2, 2)
    assert mine.bootstrap_store_info == theirs.bootstrap_store_info
    first.shutdown()
    second.shutdown()


@needs_hosts
def test_a_host_is_lost_and_another_joins(tmp_path: Path) -> None:
    args = ("elastic", "100000", str(tmp_path / "log"))
    with net() as n, n.store(tmp_path), n.launch("a", tmp_path, RING, *args) as a:
        with n.launch("b", tmp_path, RING, *args) as b:
            pids = {x["pid"] for x in a.until(both, 120)}
            lost = time.monotonic()
            for process in b.members():
                os.kill(process.pid, signal.SIGKILL)
        a.until(lambda ls: since(ls, pids) == {0}, 60)
        shrunk_s = time.monotonic() - lost
        pids = {x["pid"] for x in a.lines()}
        with n.launch("b", tmp_path, RING, *args) as b:
            a.until(lambda ls: since(ls, pids) == {0, 1}, 60)
            assert two_at_once(a.lines()) == []
            assert shrunk_s < 40, shrunk_s
            b.process.terminate()
            a.process.terminate()
            a.process.wait(60)


def two_at_once(lines: list[Line]) -> list[tuple[str, str]]:
    """Pairs of generations whose steps overlap in time."""
    spans = {g: [x["t"] for x in lines if x.get("generation") == g] for g in worlds(lines)}
    return [
        (g, h) for g in spans for h in spans
        if g < h and max(min(spans[g]), min(spans[h])) < min(max(spans[g]), max(spans[h]))
    ]  # fmt: skip


@needs_hosts
def test_the_host_that_is_cut_off_ends_its_ranks_and_the_other_goes_on(tmp_path: Path) -> None:
    args = ("elastic", "100000", str(tmp_path / "log"))
    with net() as n, n.store(tmp_path), n.launch("a", tmp_path, RING, *args) as a:
        with n.launch("b", tmp_path, RING, *args) as b:
            pids = {x["pid"] for x in a.until(both, 120)}
            n.cut("b")
            cut = time.monotonic()
            assert b.wait(120) == 1, b.tail("the minority did not end itself")
            fenced_s = time.monotonic() - cut
            assert "cut off from the other hosts, so the ranks of this one were ended" in b.output.read_text()
            assert [p for p in b.members() if "ring.py" in " ".join(p.cmdline())] == []
        a.until(lambda ls: since(ls, pids) == {0}, 90)
        assert "is silent: all other ranks start again without it" in a.output.read_text()
        assert fenced_s < 60, fenced_s
        assert two_at_once(a.lines()) == []
