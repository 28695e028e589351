"""The only file that knows torchelastic from inside: its agent with our workers, its rendezvous with our fence.

Private names of torch that are relied upon are listed in ``PRIVATE``; a test looks whether they still are what they
were. Public classes do the rest: ``SimpleElasticAgent`` runs the loop (rendezvous, start, watch, restart), any
``RendezvousHandler`` brings the hosts together.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException as SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.run import determine_local_world_size

PRIVATE: Mapping[str, tuple[str, ...]] = {
    "torch.distributed.elastic.agent.server.api:SimpleElasticAgent": (
        "_start_workers", "_stop_workers", "_monitor_workers", "_shutdown", "_invoke_run", "_restart_workers",
    ),
    "torch.distributed.elastic.agent.server.api:SimpleElasticAgent.__init__": ("_remaining_restarts",),
    "torch.distributed:ProcessGroup": ("_get_sequence_number_for_group",),
}  # fmt: skip
"""Where they live -> names overridden, or attributes read and written, here."""

_WAIT = timedelta(seconds=300)
CUT_OFF = (RendezvousError, dist.DistError)
"""What the agent's loop raises when the store cannot be reached, or the rendezvous is over."""
BEAT_S = 1.0
POLL_S = 0.001  # the agent's own sleep between two looks; the waiting is done in ``Host.watch``


class Host(Protocol):
    """What the agent asks of our side: start, watch and stop the workers of this host."""

    def start(self, ranks: list[dict[str, str]]) -> dict[int, int]:
        """Start a worker for each environment, by local rank; their pids."""
        ...

    def watch(self) -> Mapping[int, tuple[int, int, bool]] | None:
        """Wait a little. None: all goes on. Else who has ended: {local rank: (pid, status, restart is worth it)};
        all of them with status 0 is the good end."""
        ...

    def stop(self, number: int | None) -> None:
        """End the workers: after a failure or because of new members (None), or as ``number`` asks the launcher."""
        ...


class Agent(SimpleElasticAgent):
    """torchelastic's agent loop over our workers."""

    def __init__(self, spec: WorkerSpec, host: Host) -> None:
        super().__init__(spec)
        self._host = host

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        handler = worker_group.spec.rdzv_handler
        pids = self._host.start([_environment(worker_group, w, handler) for w in worker_group.workers])
        inspect.stack()  # torch's rendezvous records who called it: the first time, that reads all of the sources
        return dict(pids)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ended = self._host.watch()
        if ended is None:
            return RunResult(state=WorkerState.HEALTHY)
        ranks = {w.local_rank: w.global_rank for w in worker_group.workers}
        if all(status == 0 for _, status, _ in ended.values()):
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks.values()))
        # our own budget decides: torchelastic's counter is set to what makes its loop do so
        self._remaining_restarts = int(all(again for _, _, again in ended.values()))
        failures = {
            ranks[local]: ProcessFailure(local_rank=local, pid=pid, exitcode=status, error_file="")
            for local, (pid, status, _) in ended.items()
            if status != 0
        }
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._host.stop(None)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._host.stop(death_sig)


def _environment(group: WorkerGroup, worker: Worker, handler: RendezvousHandler) -> dict[str, str]:
    """What torchrun sets for a worker, less what depends on how it was started."""
    spec = group.spec
    values = {
        "RANK": worker.global_rank, "LOCAL_RANK": worker.local_rank, "WORLD_SIZE": worker.world_size,
        "LOCAL_WORLD_SIZE": spec.local_world_size, "GROUP_RANK": group.group_rank,
        "GROUP_WORLD_SIZE": group.group_world_size, "ROLE_RANK": worker.role_rank, "ROLE_NAME": spec.role,
        "ROLE_WORLD_SIZE": worker.role_world_size, "MASTER_ADDR": group.master_addr, "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RUN_ID": handler.get_run_id(), "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": handler.use_agent_store,
    }  # fmt: skip
    return {k: str(v) for k, v in values.items()}


def rendezvous(
    *, backend: str, endpoint: str, run_id: str, nodes: tuple[int, int], local_addr: str | None,
    conf: Mapping[str, Any], blind_s: float,
) -> RendezvousHandler:  # fmt: skip
    """torchelastic's rendezvous of that name, fenced; for one host that needs no store, one of ours.

    ``blind_s`` bounds how long a dead connection to the store is believed in.
    """
    if backend == "c10d" and nodes == (1, 1):
        return Alone(run_id, local_addr)
    parameters = RendezvousParameters(
        backend=backend, endpoint=endpoint, run_id=run_id, min_nodes=nodes[0], max_nodes=nodes[1],
        local_addr=local_addr, **conf,
    )  # fmt: skip
    before = _tcp_sockets()
    handler = get_rendezvous_handler(parameters)
    for fd in _tcp_sockets() - before:
        _notice_silence(fd, blind_s)
    # the static rendezvous has no rounds by which agents could agree on a generation
    if backend == "static":
        return handler
    lost_s = float(conf.get("keep_alive_interval", 5)) * float(conf.get("keep_alive_max_attempt", 3))
    return Fenced(handler, local_addr, lost_s=lost_s)


class Alone(RendezvousHandler):
    """The rendezvous of one host, which has nobody to wait for: a new store for the workers of each generation.

    Stock torchelastic gives all generations one store, in which a restarted rank reads the addresses of dead ones.
    """

    def __init__(self, run_id: str, local_addr: str | None) -> None:
        self._run_id, self._addr = run_id, local_addr
        self._server: TCPStore | None = None
        self._closed = False

    def lost(self) -> list[int]:
        """There are no others."""
        return []

    def next_rendezvous(self) -> RendezvousInfo:
        """At once."""
        store = HashStore()
        self._server, found = _serve(self._addr, store, 0)
        return RendezvousInfo(store, 0, 1, found)

    @property
    def use_agent_store(self) -> bool:
        """True: the store is in the agent, and outlives the workers."""
        return True

    def get_backend(self) -> str:
        """A name of its own."""
        return "alone"

    def is_closed(self) -> bool:
        """After ``set_closed``."""
        return self._closed

    def set_closed(self) -> None:
        """No more generations."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Nobody ever waits."""
        return 0

    def get_run_id(self) -> str:
        """Of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """The last store goes."""
        self._closed, self._server = True, None
        return True


class Fenced(Alone):
    """Another rendezvous, that of several hosts, with a store for the workers that is new in every generation.

    Rank 0 of the hosts opens it and tells the others through the rendezvous, in a place of this generation: stock
    torchelastic publishes its address once, and a joining host waits for it in vain.
    """

    def __init__(self, inner: RendezvousHandler, local_addr: str | None, *, lost_s: float) -> None:
        super().__init__(inner.get_run_id(), local_addr)
        self._inner, self._lost_s = inner, lost_s
        self._hosts: _Hosts | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """As the other one does it."""
        self._hosts = None
        # with a store of its own to share, torch's rendezvous publishes where it is only once
        with _environ(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"):
            info = self._inner.next_rendezvous()
        store = PrefixStore("torchrelay/workers", info.store)
        self._server, found = _serve(self._addr, store, info.rank)
        self._hosts = _Hosts(PrefixStore("torchrelay/hosts", info.store), info.rank, info.world_size, self._lost_s)
        return RendezvousInfo(info.store, info.rank, info.world_size, found)

    def lost(self) -> list[int]:
        """Hosts of this generation, by group rank, that have not beaten for too long.

        Torchelastic forgets a silent host, too, but starts nothing for it: the others would wait in their collective.
        """
        return [] if self._hosts is None else self._hosts.look()

    def get_backend(self) -> str:
        """Of the other one, as all below."""
        return self._inner.get_backend()

    def is_closed(self) -> bool:
        """See torch."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """See torch."""
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        """See torch."""
        return self._inner.num_nodes_waiting()

    def shutdown(self) -> bool:
        """See torch."""
        self._server = None
        return self._inner.shutdown()


@contextlib.contextmanager
def _environ(**values: str) -> Iterator[None]:
    before = {k: os.environ.get(k) for k in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for k, v in before.items():
            if v is None:
                del os.environ[k]
            else:
                os.environ[k] = v


class _Hosts:
    """Each host counts in the store, once a second; the others look whether it moves. No clock is compared."""

    def __init__(self, store: Store, rank: int, world: int, lost_s: float) -> None:
        self._store, self._rank, self._lost_s = store, rank, lost_s
        self._others = [n for n in range(world) if n != rank]
        self._seen: dict[int, tuple[int, float]] = {n: (-1, time.monotonic()) for n in self._others}
        self._due = 0.0

    def look(self) -> list[int]:
        now = time.monotonic()
        if now >= self._due and self._others:
            self._due = now + BEAT_S
            self._store.add(str(self._rank), 1)
            for n in self._others:
                count = self._store.add(str(n), 0)
                if count != self._seen[n][0]:
                    self._seen[n] = (count, now)
        return [n for n, (_, moved) in self._seen.items() if now - moved > self._lost_s]


def _serve(addr: str | None, told: Store, rank: int) -> tuple[TCPStore | None, RendezvousStoreInfo]:
    """The store of a generation's workers, opened by rank 0 of the hosts; and where it is."""
    server = None
    if rank == 0:
        server = TCPStore(addr or socket.getfqdn(), 0, is_master=True, wait_for_workers=False, timeout=_WAIT)
    port = server.port if server is not None else 0
    return server, RendezvousStoreInfo.build(rank, told, local_addr=addr, server_port=port)


def run(
    *, handler: RendezvousHandler, nproc: int, role: str, max_restarts: int, host: Host
) -> None:  # fmt: skip
    """Run the agent to its end. What happened is with ``host``; raises what the rendezvous raises.

    ``SignalException`` passes through. The rendezvous is closed for good except after a signal, for then the job may go
    on with other hosts.
    """
    spec = WorkerSpec(
        role=role, local_world_size=nproc, rdzv_handler=handler, entrypoint="elastic", max_restarts=max_restarts,
        monitor_interval=POLL_S,
    )  # fmt: skip
    agent = Agent(spec, host)
    close = True
    try:
        agent.run()
    except SignalException:
        close = False
        raise
    finally:
        if close:
            handler.shutdown()


def workers_per_host(text: str) -> int:
    """A number, or what "cpu", "gpu", "auto" and the like mean on this host, as torchrun counts; ``ValueError``."""
    return int(determine_local_world_size(text))


def hold_store(host: str, port: int, *, told: Callable[[int], object]) -> None:
    """Serve a store until a signal ends the process; ``told`` gets its port."""
    server = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=_WAIT)
    told(server.port)
    signal.pause()


def collectives() -> int:
    """Collectives entered in the default process group of this process; 0 without one. Waits for nothing."""
    if not dist.is_initialized():
        return 0
    try:
        return int(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
    except RuntimeError:  # a backend that keeps no count, or a group on its way out
        return 0


def _tcp_sockets() -> set[int]:
    """Descriptors of connected TCP sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as s:
                    if s.family in (socket.AF_INET, socket.AF_INET6) and s.getpeername():
                        found.add(fd)
        except OSError:
            continue
    return found


def _notice_silence(fd: int, seconds: float) -> None:
    """Let the kernel give up a connection whose other end has been silent for ``seconds``, in place of 15 minutes."""
    with socket.socket(fileno=os.dup(fd)) as s:
        probe = max(1, int(seconds / 3))
        s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
