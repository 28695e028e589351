"""Who is in this generation of the job: a process group that survives restarts.

torchelastic keeps one store for the whole life of a job. Stock ``init_process_group`` uses it without a
prefix, so the ranks of a restart read the addresses of the dead generation and never meet. Here the ranks
first agree, over the same store, on a token that is new in every generation, and build the group below it::

    <job>/leader             rank 0 writes a fresh token L here, over that of the generation before
    <job>/L/join/<r>of<n>    rank r reads L, which may be the old one, and puts a nonce of its own here
    <job>/L/go/<nonce>       rank 0 answers every nonce once all have come; an old L is never answered

A rank that waits for its answer keeps reading ``leader`` and joins again when it changes. Neither clocks nor
the restart count, which every agent counts for itself, play a part. A rank 0 that finds another token there
has been replaced, and stops.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ckpt.errors import RankFailed, Refused, Superseded
from elastic.ledger import marks

JOIN_TIMEOUT_S = 300.0
PARTING_S = 10.0
_ENV = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_GO = "go"

_SUPERSEDED = "superseded"

_generation: str | None = None
_job: Store | None = None  # outlives a generation where an agent holds it
_job_name = ""
_timeout: timedelta | None = None


def init(backend: str | None = None, *, timeout_s: float | None = None) -> None:
    """Set up the default process group so that restarts can, too; every rank calls it once, before all else.

    Reads the environment that torchrun, or any ``env://`` launcher, sets: RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT. With neither of the first two the process is alone (world size 1) and nothing is done.
    ``backend`` defaults to gloo, joined by the accelerator's own where there is one; LOCAL_RANK then picks
    the current device, unless gloo alone is asked for. ``timeout_s`` bounds the wait for the other ranks
    (default 300 s) and every later collective (default: torch's). A second call does nothing. The group is
    destroyed when the process ends normally.

    Raises ``RankFailed`` naming the ranks that did not come, ``Superseded`` when a newer generation has started, or
    when the job has lost its run to another job, ``Refused`` for half an environment, or when something else has set
    up a process group before.
    """
    global _generation, _job, _job_name, _timeout  # noqa: PLW0603 - a process has one default group
    if dist.is_initialized():
        if _generation is not None:
            return
        raise Refused(
            "a process group exists already that elastic.init() did not set up",
            hint="call elastic.init() in place of torch.distributed.init_process_group()",
        )
    if not os.environ.get("RANK") and not os.environ.get("WORLD_SIZE"):
        _refuse_lone_srun_task()
        return
    if missing := [name for name in _ENV if not os.environ.get(name)]:
        raise Refused(
            f"the environment names a rank or a world, but {', '.join(missing)} is not set",
            hint="start the workers with torchrun, or export all of " + ", ".join(_ENV),
        )
    marks.asked()
    backend = backend or _default_backend()
    _take_device(backend)
    join_s = JOIN_TIMEOUT_S if timeout_s is None else timeout_s
    _timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _job_store(rank, world, join_s)
    job = PrefixStore(f"torchrelay/{os.environ.get('TORCHELASTIC_RUN_ID', 'env')}", store)
    if job.check([_SUPERSEDED]):
        raise Superseded("another job has taken over this job's run, so it is not started again",
                         facts=[("then", job.get(_SUPERSEDED).decode())],
                         hint="stop this job; or start it anew, to take the run back")  # fmt: skip
    token = join(job, rank, world, timeout_s=join_s)
    _job = job
    _job_name = job.compare_set("name", "", token).decode()  # as long as an agent holds the store, of its first start
    dist.init_process_group(
        backend,
        store=PrefixStore(token, job),
        rank=rank,
        world_size=world,
        timeout=_timeout,
    )
    _generation = token
    marks.joined()
    atexit.register(_leave, PrefixStore(token, job), rank, world)


def generation() -> str | None:
    """The token of this generation, the same on all ranks; None where ``init`` set up no process group."""
    return _generation if dist.is_initialized() else None


def job_name() -> str:
    """A name that this start shares with all restarts of its job and with no other; "" where there is no telling.

    A job is what one torchrun starts and restarts, or, across several of those, a Slurm batch job with its requeues.
    """
    slurm = os.environ.get("SLURM_JOB_ID")
    if slurm and os.environ.get("SLURM_JOB_NAME") != "interactive":
        return f"slurm-{slurm}-{os.environ.get('SLURM_STEP_ID', '')}"
    return _job_name


def give_up(reason: str) -> None:
    """Let no restart of this job by its agent set up a group again: another job owns its run now."""
    if _job is not None:
        with contextlib.suppress(dist.DistError):
            _job.set(_SUPERSEDED, reason)


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the world size; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def collective_timeout() -> timedelta | None:
    """What ``init`` was told to bound collectives with; None: torch's own limits."""
    return _timeout


def restarts_on_a_used_store() -> bool:
    """True under a torchelastic agent that may restart the workers over a store that they have used."""
    return (
        os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )


def join(store: Store, rank: int, world: int, *, timeout_s: float) -> str:
    """Agree with all other ranks on a token that no earlier generation had; blocks up to ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    poll_s = min(0.01 + world * 2e-5, 0.2)  # one store answers thousands of ranks
    if rank == 0:
        return _lead(store, world, deadline, poll_s)
    return _follow(store, rank, world, deadline, poll_s)


def _job_store(rank: int, world: int, timeout_s: float) -> TCPStore:
    """The store at MASTER_ADDR: the agent's, or else one that rank 0 holds."""
    try:
        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,  # the handshake names those who do not come
            multi_tenant=True,
        )
    except dist.DistNetworkError as error:
        if rank == 0:
            raise
        raise _did_not_come([0], world) from error


def _lead(store: Store, world: int, deadline: float, poll_s: float) -> str:
    token = uuid.uuid4().hex[:16]
    store.set("leader", token)
    joins = [_join_key(token, r, world) for r in range(1, world)]
    while joins and not store.check(joins):
        if store.get("leader").decode() != token:
            raise Superseded("another rank 0 of this job has started: this one is of an older generation")
        if time.monotonic() > deadline:
            came = {key for key in joins if store.check([key])}
            absent = [r for r, key in enumerate(joins, 1) if key not in came]
            for key in came:
                store.set(_go_key(token, store.get(key).decode()), ",".join(map(str, absent)))
            raise _did_not_come(absent, world)
        time.sleep(poll_s)
    for nonce in store.multi_get(joins) if joins else ():
        store.set(_go_key(token, nonce.decode()), _GO)
    return token


def _follow(store: Store, rank: int, world: int, deadline: float, poll_s: float) -> str:
    token, go = "", ""
    while True:
        leader = store.get("leader").decode() if store.check(["leader"]) else ""
        if leader != token:
            token, nonce = leader, uuid.uuid4().hex[:16]
            go = _go_key(token, nonce)
            store.set(_join_key(token, rank, world), nonce)
        if token and store.check([go]):
            answer = store.get(go).decode()
            if answer == _GO:
                return token
            raise _did_not_come([int(r) for r in answer.split(",")], world)
        if time.monotonic() > deadline:
            raise _did_not_come([0], world)
        time.sleep(poll_s)


def _join_key(token: str, rank: int, world: int) -> str:
    return f"{token}/join/{rank}of{world}"


def _go_key(token: str, nonce: str) -> str:
    return f"{token}/go/{nonce}"


def _did_not_come(ranks: list[int], world: int) -> RankFailed:
    named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return RankFailed(
        f"rank {named} of {world} did not come to the process group in time",
        hint="read that rank's own output; elastic.init(timeout_s=...) sets how long to wait",
    )


def _refuse_lone_srun_task() -> None:
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks.isdigit() and int(tasks) > 1:
        raise Refused(
            f"srun started {tasks} tasks, but neither RANK nor WORLD_SIZE is set: each would train alone",
            hint="srun torchrun ..., or export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS and "
            "MASTER_ADDR, MASTER_PORT",
        )


def _default_backend() -> str:
    device = torch.accelerator.current_accelerator()
    if device is None or not torch.accelerator.is_available():
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"


def _take_device(backend: str) -> None:
    if backend == "gloo" or not torch.accelerator.is_available():
        return
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
    if local >= count:
        raise Refused(
            f"local rank {local} has no device: this host has {count}",
            hint=f"torchrun --nproc-per-node {count}, or elastic.init('gloo') to train on the CPU",
        )
    torch.accelerator.set_device_index(local)


def _leave(store: Store, rank: int, world: int) -> None:
    # After an uncaught exception the peers may be dead or inside a collective. A shutdown that talks to them could
    # hang, while the launcher waits for this process to end.
    if not dist.is_initialized() or hasattr(sys, "last_value"):
        return
    dist.destroy_process_group()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    # Rank 0 holds the store, and the others may still read the outcome of the last save from it.
    end = time.monotonic() + PARTING_S
    with contextlib.suppress(dist.DistError):
        gone = store.add("gone", 1)
        while rank == 0 and gone < world and time.monotonic() < end:
            time.sleep(0.01)
            gone = store.add("gone", 0)
