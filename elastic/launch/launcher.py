"""One launch from beginning to end; what it returns is the exit status of the command."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from ckpt.errors import Superseded
from elastic.launch.host import LocalHost, Outcome
from elastic.launch.options import Options
from elastic.launch.verdict import DONE, STOPPED, exit_status

if TYPE_CHECKING:
    from elastic.launch.torchelastic import SignalException

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1,)


def launch(options: Options) -> int:
    """Run the workers of this host until they are done, or not to be started again. Blocks; main thread only.

    SIGTERM and the like end the workers with ``options.shutdown_s`` to save; SIGUSR1 is passed on to them.
    """
    host = LocalHost(options)
    try:
        return _run(options, host)
    finally:
        host.close()


def _run(options: Options, host: LocalHost) -> int:
    from elastic.launch import torchelastic  # while the fork server imports torch, too

    _Signals(host, torchelastic.SignalException).install()
    try:
        handler = torchelastic.rendezvous(
            backend=options.backend, endpoint=options.endpoint, run_id=options.run_id, nodes=options.nodes,
            local_addr=options.local_addr, conf=options.conf, blind_s=options.blind_s,
        )  # fmt: skip
        host.waiting = handler.num_nodes_waiting
        if isinstance(handler, torchelastic.Alone):
            host.lost = handler.lost
        torchelastic.run(handler=handler, nproc=options.nproc, role=options.role,
                         max_restarts=options.max_restarts, host=host)  # fmt: skip
    except torchelastic.SignalException as stop:
        return _after_signal(host, stop.sigval)
    except Superseded as error:
        print(f"elastic launch: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    except torchelastic.CUT_OFF as error:
        print(_cut_off(error, options.endpoint), file=sys.stderr, flush=True)
        return 1
    outcome = host.outcome or Outcome(status=1)
    if text := host.failure_text() if host.outcome else "":
        print(text, file=sys.stderr, flush=True)
    if outcome.status == STOPPED:
        _say_stopped()
    return exit_status(outcome.status)


def _after_signal(host: LocalHost, number: signal.Signals) -> int:
    ends = set(host.statuses)
    if ends and ends <= {DONE, STOPPED}:
        if STOPPED in ends:
            _say_stopped()
        return max(ends)
    print(f"elastic launch: ended by {number.name}; not every rank had saved", file=sys.stderr, flush=True)
    return exit_status(-number)


def _cut_off(error: Exception, endpoint: str) -> str:
    if type(error).__name__ == "RendezvousClosedError":
        return "elastic launch: the job has ended on its other hosts; a new start needs another --rdzv-id"
    cause = str(error.__cause__ or error).splitlines()[0]
    return (
        "elastic launch: cut off from the other hosts, so the ranks of this one were ended\n"
        f"  rendezvous  {endpoint}\n  cause       {cause}\n"
        "  next        start the same command again when the rendezvous can be reached"
    )


def _say_stopped() -> None:
    print("elastic launch: stopped on request, state saved; start the same command again", file=sys.stderr, flush=True)


class _Signals:
    """Turns the first signal into an exception in the agent's loop; the second ends the grace period."""

    def __init__(self, host: LocalHost, error: type[SignalException]) -> None:
        self._host, self._error = host, error
        self._came = False

    def install(self) -> None:
        """For the rest of the process."""
        for number in ENDING:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._end)
        for number in PASSED_ON:
            signal.signal(number, lambda n, _: self._host.pass_on(n))

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            self._host.hurry()
            return
        self._came = True
        sigval = signal.Signals(number)
        raise self._error(f"process {os.getpid()} got {sigval.name}", sigval)
