"""What the proxy does besides answering, resetting and cutting: hold a request, and have it done twice."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from drills.faults import Site
from drills.faults.gates import ProxyGate
from drills.faults.proxy import FaultProxy, Hold, Twice, is_put
from drills.faults.storage import StorageFault
from drills.processes import proc_of


class Server(ThreadingHTTPServer):
    """A real server that remembers what reached it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, str, bytes]] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        assert isinstance(self.server, Server)
        self.server.seen.append((self.command, self.path, body))
        text = f"answer {len(self.server.seen)}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_PUT = do_GET = answer  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def send(proxy: FaultProxy, method: str, path: str, body: bytes = b"") -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)
    try:
        connection.request(method, path, body)
        return connection.getresponse().read()
    finally:
        connection.close()


def begun(proxy: FaultProxy, path: str) -> socket.socket:
    """A PUT that is under way on a connection of its own."""
    client = socket.create_connection(("127.0.0.1", proxy.port), timeout=30)
    client.sendall(f"PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi".encode())
    return client


def until(true: Any) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_write_that_is_done_twice_is_answered_once(server: Server) -> None:
    with FaultProxy(server.server_port) as proxy:
        proxy.add(is_put, Twice())
        assert send(proxy, "PUT", "/a", b"body") == b"answer 2"
        assert server.seen == [("PUT", "/a", b"body")] * 2


@pytest.mark.parametrize("drop", [True, False])
def test_a_held_request_reaches_the_server_only_when_it_is_let_go(server: Server, drop: bool) -> None:
    with FaultProxy(server.server_port) as proxy:
        hold = Hold()
        proxy.add(is_put, hold)
        with begun(proxy, "/held") as client:
            until(lambda: hold.held is not None)
            assert send(proxy, "GET", "/other") == b"answer 1"  # nobody else waits
            assert [path for _, path, _ in server.seen] == ["/other"]
            hold.release(drop=drop)
            if drop:
                with pytest.raises(ConnectionResetError):
                    client.recv(100)
                assert len(server.seen) == 1
            else:
                assert client.recv(100).startswith(b"HTTP/1.1 200")
                assert server.seen[-1] == ("PUT", "/held", b"hi")


def test_the_gate_holds_the_commit_and_knows_whose_it_is(server: Server) -> None:
    with FaultProxy(server.server_port) as proxy:
        gate = ProxyGate(proxy)
        gate.close("commit", 6)
        workers = {3: proc_of(os.getpid(), 3)}
        assert send(proxy, "PUT", "/b/run/commits/000000000006-e00000001-0.json") == b"answer 1"  # too early
        assert send(proxy, "PUT", "/b/run/steps/000000000007/e00000001-0/x") == b"answer 2"
        assert gate.held(workers) is None
        with begun(proxy, "/b/run/commits/000000000007-e00000001-0.json") as client:
            until(lambda: gate.held(workers) is not None)
            held = gate.held(workers)
            assert held is not None
            assert (held.rank, held.pid) == (3, os.getpid())
            assert held.what == "its PUT of commits/000000000007-e00000001-0.json"
            gate.open(drop=False)
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        assert proxy.rules == []


def test_only_the_requests_of_one_rank_are_harmed(server: Server, tmp_path: Any) -> None:
    with subprocess.Popen(["sleep", "60"]) as other, FaultProxy(server.server_port) as proxy:
        site = Site(folder=tmp_path, owner="a:drilled", proxy=proxy, rank=0, workers={0: proc_of(other.pid, 0)})
        fault = StorageFault(kind="status", which="one")
        fault.inject(site)
        assert send(proxy, "GET", "/x") == b"answer 1"  # not of that process
        mine = Site(folder=tmp_path, owner="b:drilled", proxy=proxy, rank=0, workers={0: proc_of(os.getpid(), 0)})
        fault.inject(mine)
        assert b"SlowDown" in send(proxy, "GET", "/x")
        assert "1 requests were harmed" in fault.heal(mine)
        assert send(proxy, "GET", "/x") == b"answer 2"
        other.kill()
