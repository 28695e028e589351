"""An HTTP/1.1 proxy that breaks requests to S3 on purpose, between a real client and the real server.

The client signs for the proxy's own address and the ``Host`` header passes unchanged, so signatures still verify
upstream; that needs plain HTTP. Every request is logged with the action taken, so that one can count what a client
really sent::

    with FaultProxy(server.port) as proxy:
        proxy.add(is_put, LostReply())                       # once
        proxy.add(any_request, Status(503, "SlowDown"), times=5)
        ...
        assert proxy.count(is_put) == 2
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import unquote

from drills.faults.wire import Kept, close, copy_body, read_head, reset


@dataclass(frozen=True)
class Status:
    """Answer with an S3 error, or with ``body``; the server never sees the request."""

    code: int
    name: str = ""
    body: str = ""


@dataclass(frozen=True)
class Reset:
    """Reset the connection after ``request_bytes`` of the request's body reached the server."""

    request_bytes: int = 0


@dataclass(frozen=True)
class LostReply:
    """The server does it; the client gets a reset instead of the answer."""


@dataclass(frozen=True)
class CutResponse:
    """End the answer's body after ``body_bytes``: by a reset, or by an orderly close (``fin``)."""

    body_bytes: int
    fin: bool = False


@dataclass(frozen=True)
class Stall:
    """Hold the request back for ``seconds``, then pass it on: a late writer once the client has given up."""

    seconds: float


@dataclass(frozen=True)
class Twice:
    """Send the request to the server two times; the client hears the second answer."""


@dataclass
class Hold:
    """Keep the request back until ``release``; ``held`` is what was kept, None so far. Nothing reached the server."""

    deadline_s: float = 60.0
    held: Request | None = None
    held_t: float = 0.0
    drop: bool | None = None

    def release(self, *, drop: bool) -> None:
        """Let the request go on to the server, or throw it away with its connection."""
        self.drop = drop


@dataclass(frozen=True)
class FlipBit:
    """Flip the lowest bit of one byte of the answer's body."""

    offset: int


@dataclass(frozen=True)
class Pass:
    """Nothing: the request goes through unharmed."""


Action = Status | Reset | LostReply | CutResponse | Stall | Twice | Hold | FlipBit | Pass


@dataclass(frozen=True)
class Request:
    """One request as seen on the wire: ``path`` is unquoted, ``query`` raw, header names in lower case.

    ``peer`` is the client's port, from which its process can be told on the same machine.
    """

    method: str
    path: str
    query: str
    headers: dict[str, str]
    peer: int = 0


Match = Callable[[Request], bool]


@dataclass
class Rule:
    """``action`` on each matching request, ``times`` times (None: always), with ``probability``."""

    match: Match
    action: Action
    times: int | None = 1
    probability: float = 1.0


def any_request(request: Request) -> bool:
    """Every request."""
    return True


def is_put(request: Request) -> bool:
    """A write of an object or of a part."""
    return request.method == "PUT"


def is_create(request: Request) -> bool:
    """A write that must not replace anything."""
    return request.method == "PUT" and "if-none-match" in request.headers


def is_list(request: Request) -> bool:
    """A listing."""
    return request.method == "GET" and "list-type=2" in request.query


def is_get(request: Request) -> bool:
    """A read of an object."""
    return request.method == "GET" and not is_list(request)


def is_part(request: Request) -> bool:
    """A part of an upload."""
    return request.method == "PUT" and "partNumber=" in request.query


def is_complete(request: Request) -> bool:
    """The end of an upload in parts."""
    return request.method == "POST" and "uploadId=" in request.query


def is_delete(request: Request) -> bool:
    """A deletion of several objects."""
    return request.method == "POST" and request.query.startswith("delete")


@dataclass
class FaultProxy:
    """Listens on 127.0.0.1; one upstream connection a request. Use as a context manager."""

    upstream_port: int
    seed: int = 0
    upstream_host: str = "127.0.0.1"
    rules: list[Rule] = field(default_factory=list)
    log: list[tuple[Request, Action]] = field(default_factory=list)
    port: int = 0

    @property
    def endpoint(self) -> str:
        """What a client takes for the server."""
        return f"http://127.0.0.1:{self.port}"

    def add(self, match: Match, action: Action, *, times: int | None = 1, probability: float = 1.0) -> None:
        """Append a rule; the first rule that matches and is not used up decides."""
        self.rules.append(Rule(match, action, times, probability))

    def heal(self) -> None:
        """Forget all rules and the log."""
        self.rules.clear()
        self.log.clear()

    def count(self, match: Match = any_request) -> int:
        """How many requests of that kind were seen."""
        return sum(match(request) for request, _ in self.log)

    def faults(self) -> int:
        """How many requests were harmed."""
        return sum(not isinstance(action, Pass) for _, action in self.log)

    def __enter__(self) -> Self:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        self._thread.start()
        started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._random = random.Random(self.seed)
        self._connections: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=1 << 20)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await self._stop.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._connection(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    def _choose(self, request: Request) -> Action:
        action: Action = Pass()
        for rule in self.rules:
            if rule.times == 0 or not rule.match(request):
                continue
            if self._random.random() < rule.probability:
                rule.times = None if rule.times is None else rule.times - 1
                action = rule.action
                break
        self.log.append((request, action))
        return action

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            await close(writer)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; False when the client's connection is not to be used again."""
        head, first, headers = await read_head(reader)
        method, target, _ = first.split(" ", 2)
        path, _, query = target.partition("?")
        peer = int(writer.get_extra_info("peername")[1])
        request = Request(method, unquote(path), query, headers, peer)
        action = self._choose(request)
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = b"\r\n".join(x for x in head.split(b"\r\n") if not x.lower().startswith(b"expect:"))
        match action:
            case Status(code, name, body):
                await copy_body(reader, None, headers)
                body = body or f"<Error><Code>{name}</Code><Message>injected</Message></Error>"
                answer = f"HTTP/1.1 {code} X\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write((answer + ("" if method == "HEAD" else body)).encode())
                await writer.drain()
                return method != "HEAD"
            case Stall(seconds):
                await asyncio.sleep(seconds)
            case Hold():
                if await _held(action, request):
                    reset(writer)
                    return False
            case Twice():
                return await self._twice(reader, writer, head, headers, method)
            case _:
                pass
        up_reader, up_writer = await asyncio.open_connection(self.upstream_host, self.upstream_port, limit=1 << 20)
        try:
            up_writer.write(head)
            await copy_body(
                reader, up_writer, headers, limit=action.request_bytes if isinstance(action, Reset) else None
            )
            if isinstance(action, Reset):
                reset(writer, up_writer)
                return False
            answer_head, answer_first, answer_headers = await read_head(up_reader)
            if isinstance(action, LostReply):
                reset(writer)
                return False
            writer.write(answer_head)
            if method == "HEAD" or answer_first.split()[1] in ("204", "304"):
                await writer.drain()
                return True
            await copy_body(
                up_reader, writer, answer_headers,
                limit=action.body_bytes if isinstance(action, CutResponse) else None,
                flip=action.offset if isinstance(action, FlipBit) else None,
            )  # fmt: skip
            if isinstance(action, CutResponse):
                await writer.drain()
                if not action.fin:
                    reset(writer)
                return False
            return True
        finally:
            await close(up_writer)

    async def _twice(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, headers: dict[str, str],
        method: str,
    ) -> bool:  # fmt: skip
        body = Kept()
        await copy_body(reader, body, headers)
        for last in (False, True):
            up_reader, up_writer = await asyncio.open_connection(self.upstream_host, self.upstream_port, limit=1 << 20)
            try:
                up_writer.write(head + bytes(body.data))
                answer, first, answer_headers = await read_head(up_reader)
                if last:
                    writer.write(answer)
                if method != "HEAD" and first.split()[1] not in ("204", "304"):
                    await copy_body(up_reader, writer if last else None, answer_headers)
            finally:
                await close(up_writer)
        return True


async def _held(action: Hold, request: Request) -> bool:
    """Wait for the release; whether the request is to be thrown away."""
    action.held, action.held_t = request, time.time()
    end = time.monotonic() + action.deadline_s
    while action.drop is None and time.monotonic() < end:
        await asyncio.sleep(0.002)
    return bool(action.drop)
