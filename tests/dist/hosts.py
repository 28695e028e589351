"""Two hosts and a third machine for their store, as network namespaces on one bridge. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.dist.launch import Job, free_port

NET = "10.207.41"


def allowed() -> bool:
    """Whether this machine lets us have network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    return subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode == 0


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Net:
    """A bridge with namespaces ``a`` and ``b`` on it; the bridge's own address is that of the store's machine."""

    def __init__(self) -> None:
        self.tag = "tr" + uuid.uuid4().hex[:6]
        self.port = free_port()
        _ip("link", "add", self.tag, "type", "bridge")
        _ip("addr", "add", f"{NET}.1/24", "dev", self.tag)
        _ip("link", "set", self.tag, "up")
        for n, host in enumerate("ab", 2):
            ns, outer = f"{self.tag}{host}", f"{self.tag}v{host}"
            _ip("netns", "add", ns)
            _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", ns)
            _ip("link", "set", outer, "master", self.tag, "up")
            _ip("-n", ns, "addr", "add", f"{NET}.{n}/24", "dev", "eth0")
            _ip("-n", ns, "link", "set", "eth0", "up")
            _ip("-n", ns, "link", "set", "lo", "up")

    def cut(self, host: str) -> None:
        """Packets from and to ``host`` are lost from now on, without a word to either side."""
        _ip("link", "set", f"{self.tag}v{host}", "nomaster")

    def mend(self, host: str) -> None:
        """Undo ``cut``."""
        _ip("link", "set", f"{self.tag}v{host}", "master", self.tag)

    def store(self, folder: Path) -> Job:
        """The machine that holds the store."""
        command = [sys.executable, "-m", "elastic.cli", "store", "--host", f"{NET}.1", "--port", str(self.port)]
        return Job(command, log=folder / "store", output=folder / "store.out", env={})

    def launch(self, host: str, folder: Path, script: Path, *args: str, options: tuple[str, ...] = ()) -> Job:
        """One host of a job of one or two hosts, one rank each; its output and events in ``folder``."""
        address = f"{NET}.{'ab'.index(host) + 2}"
        command = ["ip", "netns", "exec", f"{self.tag}{host}", sys.executable, "-m", "elastic.cli", "launch"]
        command += ["--nnodes", "1:2", "--rdzv-endpoint", f"{NET}.1:{self.port}", "--rdzv-conf", "is_host=0"]
        command += ["--rdzv-id", "job", "--local-addr", address, *options]
        command += ["--events", str(folder / f"{host}.events"), str(script), *args]
        return Job(command, log=folder / "log", output=folder / f"{host}.out", env={"GLOO_SOCKET_IFNAME": "eth0"})

    def close(self) -> None:
        """Nothing is left of it."""
        for host in "ab":
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", f"{self.tag}{host}")
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", self.tag)


@contextlib.contextmanager
def net() -> Iterator[Net]:
    """A net for the length of a block."""
    it = Net()
    try:
        yield it
    finally:
        it.close()
