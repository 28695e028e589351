"""The command ``launch``."""

from __future__ import annotations

import os
import re
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from elastic.commands.economics.options import DURATION, Quantity
from elastic.launch import forkserver, options
from elastic.launch.task import MODULE, PROGRAM, SCRIPT
from elastic.units import parse_duration

F = TypeVar("F", bound=Callable[..., Any])

SAFE_CONF = {"keep_alive_interval": "1", "keep_alive_max_attempt": "5", "last_call_timeout": "3"}
"""Of the rendezvous of several hosts: as quick as is safe. Fewer attempts than three declare living hosts dead."""


def _seconds(text: str) -> float:
    return float(text) if re.fullmatch(r"\d+\.?\d*|\.\d+", text) else parse_duration(text)


def _hang(text: str) -> float | None:
    return options.parse_hang(text, None if text in ("auto", "off") else _seconds(text))


SECONDS = Quantity("time", _seconds)


def _as_torchrun(name: str, **settings: Any) -> Callable[[F], F]:
    """An option in both of torchrun's spellings, which may come from its environment variable."""
    spellings = [f"--{name}", *([f"--{name.replace('-', '_')}"] if "-" in name else [])]
    return click.option(*spellings, name.replace("-", "_"), envvar="PET_" + name.upper().replace("-", "_"), **settings)


@click.command(
    "launch",
    short_help="Start the ranks of a job, watch them, start them again in under a second.",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@_as_torchrun("nproc-per-node", default="1", metavar="N|auto", help="Ranks on this host.")
@_as_torchrun("nnodes", default="1", metavar="N|MIN:MAX", help="Hosts.")
@_as_torchrun("max-restarts", default=3, type=click.IntRange(min=0), metavar="N",
              help="Restarts without progress in between; getting further fills them up again. Default 3.")  # fmt: skip
@_as_torchrun("rdzv-endpoint", default="", metavar="HOST:PORT", help="Where the hosts meet; not needed for one.")
@_as_torchrun("rdzv-backend", default="", metavar="NAME", help="c10d (default) or another one of torchelastic.")
@_as_torchrun("rdzv-id", default="", metavar="ID", help="Name of the job, the same on all hosts.")
@_as_torchrun("rdzv-conf", default="", metavar="K=V,…", help="Settings of the rendezvous, over safe ones of ours.")
@_as_torchrun("standalone", is_flag=True, help="One host; that is the default without --rdzv-endpoint.")
@_as_torchrun("node-rank", default=0, metavar="N", help="Rank of this host, for --rdzv-backend static.")
@_as_torchrun("master-addr", default="127.0.0.1", metavar="HOST", help="For --rdzv-backend static.")
@_as_torchrun("master-port", default=29500, metavar="PORT", help="For --rdzv-backend static.")
@_as_torchrun("local-addr", metavar="HOST", help="Address of this host as the others reach it.")
@_as_torchrun("role", default="default", metavar="NAME", help="Put into ROLE_NAME of each rank.")
@_as_torchrun("monitor-interval", default="0.1", type=SECONDS, metavar="TIME",
              help="Between looks at the heartbeats; a death is seen at once. Default 0.1 s.")  # fmt: skip
@_as_torchrun("start-method", default="forkserver", type=click.Choice(["forkserver", "spawn"]),
              help="Fork ranks from a process that has imported torch, or start each anew.")  # fmt: skip
@click.option("--preload", multiple=True, metavar="MODULE", help="Import this before the fork, too; may be repeated.")
@_as_torchrun("shutdown-timeout", default="30", type=SECONDS, metavar="TIME",
              help="From a request to stop to SIGKILL: has to cover a step and a save. Default 30 s.")  # fmt: skip
@click.option("--restart-grace", default="300ms", type=DURATION, metavar="TIME",
              help="From a failure to SIGKILL of the other ranks. Default 300ms.")  # fmt: skip
@click.option("--hang-timeout", default="auto", type=Quantity("time", lambda t: _hang(t) or -1.0), metavar="TIME",
              help="No progress for so long is a hang: auto (3 x p99 step, at least 3s), off, or a time.")  # fmt: skip
@click.option("--quiet-timeout", default="10m", type=DURATION, metavar="TIME",
              help="The same before the first step, in saves, and for a rank that computes. Default 10m.")  # fmt: skip
@_as_torchrun("log-dir", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
              help="Keep what each rank of each generation says, and its stacks, here.")  # fmt: skip
@_as_torchrun("redirects", default=0, type=click.IntRange(0, 3), metavar="0-3",
              help="With --log-dir: 1 stdout, 2 stderr, 3 both to files only.")  # fmt: skip
@_as_torchrun("tee", default=0, type=click.IntRange(0, 3), metavar="0-3",
              help="With --log-dir: to files and here. Without both options: both streams, both places.")  # fmt: skip
@click.option("--events", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Append a JSON line for each thing done, schema elastic.launch/1.")  # fmt: skip
@click.option("-m", "--module", is_flag=True, help="The script is a module, as for python -m.")
@_as_torchrun("no-python", is_flag=True, help="The script is a program of any kind.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(**o: Any) -> None:
    """Start SCRIPT once per rank, with the environment that torchrun gives it, and keep it going.

    A rank that dies is seen at once, one that hangs after three times the longest usual step; it is named, the stacks
    of all ranks are written, and all start again from the last saved step. A rank that ends with 75 was stopped on
    request: nothing is started again, and this ends with 75, too. SIGTERM is passed on to the ranks.

    \b
    Examples:
      elastic launch --nproc-per-node 4 train.py s3://bucket/run42
      elastic launch --nnodes 2:4 --rdzv-endpoint store.example:29400 --rdzv-id run42 train.py s3://bucket/run42

    \b
    Exit status: 0 done · 2 usage · 6 another start has taken over · 75 stopped on request, state saved;
    otherwise that of the rank that failed first, 128 + N for signal N.
    """
    sys.exit(_launch(o))


def _launch(o: dict[str, Any]) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1") if o["nproc_per_node"] != "1" else None
    chosen = _options(o)
    from elastic.launch.launcher import launch

    return launch(chosen)


def _options(o: dict[str, Any]) -> options.Options:
    nodes = options.parse_nodes(o["nnodes"])
    backend = o["rdzv_backend"] or options.BACKEND
    alone = o["standalone"] or (not o["rdzv_endpoint"] and backend == options.BACKEND)
    if alone and nodes[1] > 1:
        raise click.UsageError("several hosts need --rdzv-endpoint HOST:PORT, the same on each")
    if (o["redirects"] or o["tee"]) and o["log_dir"] is None:
        raise click.UsageError("--redirects and --tee need --log-dir")
    if o["module"] and o["no_python"]:
        raise click.UsageError("--module and --no-python exclude each other")
    conf = dict(part.partition("=")[::2] for part in o["rdzv_conf"].split(",") if part)
    if backend == "static":
        endpoint, conf = (
            o["rdzv_endpoint"] or f"{o['master_addr']}:{o['master_port']}",
            {"rank": o["node_rank"], **conf},
        )
    else:
        endpoint, conf = "localhost:0" if alone else o["rdzv_endpoint"], {**SAFE_CONF, **conf}
    return options.Options(
        kind=MODULE if o["module"] else PROGRAM if o["no_python"] else SCRIPT,
        argv=(o["script"], *o["arguments"]), nproc=_nproc(o["nproc_per_node"]), nodes=nodes, backend=backend,
        endpoint=endpoint, run_id=o["rdzv_id"] or uuid.uuid4().hex[:12], conf=conf,
        local_addr=o["local_addr"] or ("127.0.0.1" if nodes == (1, 1) else None), role=o["role"],
        max_restarts=o["max_restarts"], monitor_s=o["monitor_interval"], method=o["start_method"],
        preload=(*forkserver.PRELOAD, *o["preload"]), log_dir=o["log_dir"], redirect=o["redirects"], tee=o["tee"],
        shutdown_s=o["shutdown_timeout"], restart_grace_s=o["restart_grace"],
        hang_s=None if o["hang_timeout"] < 0 else o["hang_timeout"], quiet_s=o["quiet_timeout"], events=o["events"],
    )  # fmt: skip


def _nproc(text: str) -> int:
    if text.isdigit() and int(text) > 0:
        return int(text)
    from elastic.launch.torchelastic import workers_per_host

    try:
        return workers_per_host(text)
    except ValueError as error:
        raise click.UsageError(f"--nproc-per-node {text}: {error}") from None
