"""The process that starts workers: it imports torch once, so a worker is a fork away from the script's first line.

It does nothing but fork, tell how its children end, and end them all when the launcher is gone. It has one thread,
never touches a device, and answers the launcher over a socket, a JSON line each way::

    launcher                            here
                                        {"ready": null | why workers are started by exec instead}
    {"start": [task, ...]}              {"started": {local rank: pid}}
                                        {"ended": local rank, "pid": pid, "status": exit code or -signal}
    {"sweep": true}                     {"swept": [pid, ...]}     what its dead workers had left behind, now killed
    (end of file: the launcher is gone) kills everything, ends

Forking is refused, and ``exec`` used, when something that was imported has started a Python thread or opened a device:
neither survives a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from elastic.launch import prctl
from elastic.launch.task import PROGRAM, Task

PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",  # half a second, which else the first optimizer takes
    "torch.utils.data",
    "obstore",
    "ckpt.checkpoints",
    "ckpt.store.local",
    "ckpt.store.remote",
    "ckpt.store.transfer",
    "elastic.data",
    "elastic.run",
    "elastic.launch.torchelastic",
)
"""What most training scripts import; the rest of a script's imports can be named with ``--preload``."""

WORKER_VARIABLE = "_TORCHRELAY_WORKER"
_IDLE_MS = 1000


def main() -> None:
    """Serve until the launcher is gone; in a forked worker: run its script, and end as Python would."""
    prctl.signal_when_parent_ends(signal.SIGCONT, int(sys.argv[2]))  # it may be stopped, and has to clean up
    prctl.adopt_orphans()
    server = _Server(Connection(int(sys.argv[1])), sys.argv[3])
    server.load(json.loads(sys.argv[4]))
    if (task := server.serve()) is None:
        return
    from elastic.launch import worker

    worker.run(task)


class _Server:
    def __init__(self, control: Connection, method: str) -> None:
        self._control, self._method = control, method
        self._pids: dict[int, int] = {}  # pid -> local rank
        self._pidfds: dict[int, int] = {}  # pidfd -> pid
        self._me = os.getpid()

    def load(self, modules: list[str]) -> None:
        """Import, and find out whether forking is safe."""
        why = "asked for" if self._method == "spawn" else None
        if why is None:
            for name in modules:
                try:
                    importlib.import_module(name)
                except ModuleNotFoundError:
                    if name not in PRELOAD:  # those only save time
                        raise
            why = unsafe_to_fork()
            gc.collect()
            gc.freeze()  # the collector of a child would otherwise write to, and so copy, all pages
        self._exec = why is not None
        self._say(ready=None if self._method == "spawn" else why)

    def serve(self) -> Task | None:
        """The loop. Returns None when the launcher is gone, and in a forked worker what it is to run."""
        while True:
            poll = select.poll()
            for fd in (self._control.fileno(), *self._pidfds):
                poll.register(fd, select.POLLIN)
            ready = [fd for fd, _ in poll.poll(_IDLE_MS)]
            self._reap()
            if self._control.fileno() not in ready:
                continue
            try:
                message = json.loads(self._control.recv_bytes())
            except (EOFError, OSError):
                self._sweep(everything=True)
                return None
            if "sweep" in message:
                self._say(swept=self._sweep(everything=False))
            elif (task := self._start(message["start"])) is not None:
                return task

    def _start(self, lines: list[str]) -> Task | None:
        tasks = [Task.from_json(line) for line in lines]
        sys.stdout.flush()
        sys.stderr.flush()
        for task in tasks:
            pid = os.fork()
            if pid == 0:
                self._leave_to(task)
                if self._exec or task.kind == PROGRAM:
                    _execute(task)
                return task
            self._pids[pid] = task.local_rank
            self._pidfds[os.pidfd_open(pid)] = pid
        self._say(started={task.local_rank: pid for pid, rank in self._pids.items() for task in tasks
                           if task.local_rank == rank})  # fmt: skip
        return None

    def _leave_to(self, task: Task) -> None:
        """In the child: a session of its own, no way back to the launcher, no life without its parent."""
        os.setsid()
        prctl.signal_when_parent_ends(signal.SIGKILL, self._me)
        self._control.close()
        for fd in self._pidfds:
            os.close(fd)
        for path, fd in ((task.stdout, 1), (task.stderr, 2)):
            if path:
                file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
                os.dup2(file, fd)
                os.close(file)

    def _reap(self) -> None:
        """Tell of workers that have ended; orphans that were adopted are reaped without a word."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (rank := self._pids.pop(pid, None)) is None:
                continue
            fd = next(fd for fd, owner in self._pidfds.items() if owner == pid)
            del self._pidfds[fd]
            os.close(fd)
            self._say(ended=rank, pid=pid, status=os.waitstatus_to_exitcode(status))

    def _sweep(self, *, everything: bool) -> list[int]:
        """Kill what workers have left behind (``everything``: the workers, too), and reap it; their pids."""
        swept: list[int] = []
        for _ in range(50):  # a killed child's own children become ours
            mine = {pid for pid in children(self._me) if everything or pid not in self._pids}
            if not mine:
                break
            for pid in mine:
                for kill in (os.killpg, os.kill) if os.getpgid(pid) == pid else (os.kill,):
                    with contextlib.suppress(ProcessLookupError):
                        kill(pid, signal.SIGKILL)
                if pid not in self._pids and pid not in swept:
                    swept.append(pid)
            for pid in mine - set(self._pids):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0 if _kills(pid) else os.WNOHANG)
            self._reap()
        return swept

    def _say(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone: the loop sees it
            self._control.send_bytes(json.dumps(message).encode())


def unsafe_to_fork() -> str | None:
    """Why this process must not be forked: a thread or an open device; None when it may be."""
    if names := [t.name for t in threading.enumerate() if t is not threading.main_thread()]:
        return f"an import has started the thread {names[0]!r}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "an import has initialised CUDA"
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/habanalabs", "/dev/accel")):
                return f"an import has opened the device {target}"
    return None


def _execute(task: Task) -> None:
    try:
        if task.kind == PROGRAM:
            os.execvpe(task.argv[0], list(task.argv), dict(task.env))
        env = {**task.env, WORKER_VARIABLE: task.to_json()}
        os.execve(sys.executable, [sys.executable, "-c", command("elastic.launch.worker")], env)
    except OSError as error:
        print(f"{task.argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def command(module: str) -> str:
    """Code for ``python -c`` that calls ``module``'s main, with nothing of the working directory in between."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return (
        "import sys\n"
        "if sys.path[:1] == ['']: del sys.path[0]\n"
        f"if {root!r} not in sys.path: sys.path.append({root!r})\n"
        f"from {module} import main; main()"
    )


def children(parent: int) -> list[int]:
    """Pids of all children of a process, zombies included."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == parent:
                    found.append(int(entry))
    return found


def _kills(pid: int) -> bool:
    """Whether a process that was sent SIGKILL will end soon; one in uninterruptible sleep is not waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"D"
    except OSError:
        return True


if __name__ == "__main__":
    main()
