"""A real S3 server for the suite: SeaweedFS as one process, on ports and a folder of its own.

It checks signatures, keeps data on disk, honours ``If-None-Match: *`` and survives SIGKILL with what it acked.
Deleted objects keep their space until their bucket goes, so every test takes a bucket and drops it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

# Every one is passed: the defaults of the gRPC ports are "port + 10000", which collides or overflows.
_PORT_FLAGS = (
    "s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port",
    "volume.port.grpc", "filer.port", "filer.port.grpc", "admin.port", "admin.port.grpc",
)  # fmt: skip
_READY_BUCKET = "ready"


def free_ports(n: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listened on a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        return [s.getsockname()[1] for s in sockets]


class S3Server:
    """One ``weed mini`` below ``root``; `start` returns when a signed PUT has succeeded."""

    key = "testkey"
    secret = "testsecret12345"
    region = "us-east-1"

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "data").mkdir(parents=True, exist_ok=True)
        ports = free_ports(len(_PORT_FLAGS))
        self.port = ports[0]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._ports = dict(zip(_PORT_FLAGS, ports, strict=True))
        self._process: subprocess.Popen[bytes] | None = None
        self.admit((self.key, self.secret))

    def admit(self, *keys: tuple[str, str]) -> None:
        """Whose requests are answered from now on: pairs of key and secret."""
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        credentials = [{"accessKey": key, "secretKey": secret} for key, secret in keys]
        # one name: the server keeps identities that a new file no longer has
        identities = [{"name": "suite", "credentials": credentials, "actions": actions}]
        (self.root / "s3.json").write_text(json.dumps({"identities": identities}))
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    def start(self, *, timeout_s: float = 60.0) -> None:
        """Start the process, again after `kill` too: data and ports stay the same."""
        command = [
            str(Path(sys.executable).with_name("weed")), "mini",
            f"-dir={self.root}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            f"-s3.config={self.root}/s3.json",  # without it every request is allowed
            "-s3.autoCreateBucket=false",  # else a missing bucket appears at the first PUT
            "-s3.concurrentUploadLimitMB=128",  # uploads wait; unlimited, the process takes gigabytes
            "-master.telemetry=false", "-webdav=false", "-admin.ui=false",
            "-s3.port.iceberg=0", "-s3.port.lance=0", f"-bucket={_READY_BUCKET}",
            *(f"-{flag}={port}" for flag, port in self._ports.items()),
        ]  # fmt: skip
        with (self.root / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=self.root, start_new_session=True
            )
        end = time.monotonic() + timeout_s
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"the S3 server did not start:\n{(self.root / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def _ready(self) -> bool:
        # The port answers long before the volume server can store: only a signed PUT tells.
        try:
            self._boto.put_object(Bucket=_READY_BUCKET, Key="ready", Body=b"")
        except (BotoCoreError, ClientError):
            return False
        return True

    def kill(self) -> None:
        """SIGKILL: SIGTERM waits for idle keep-alive connections, and acked data survives this anyway."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._boto.close()

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        """A boto3 client without retries, for what a test does beside the store; one for all, as it is slow to make."""
        yield self._boto

    @functools.cached_property
    def _boto(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
        )


class S3:
    """What a test sees: the server, and buckets that are dropped when the block ends."""

    def __init__(self, server: S3Server) -> None:
        self.server = server
        self.endpoint = server.endpoint
        self._buckets: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop_buckets()

    @property
    def options(self) -> dict[str, Any]:
        """``storage_options`` in fsspec's style, for either client."""
        return self.options_for(self.endpoint)

    def options_for(self, endpoint: str) -> dict[str, Any]:
        """The same for another endpoint, such as a fault proxy in front of the server."""
        server = self.server
        return {
            "endpoint_url": endpoint,
            "key": server.key,
            "secret": server.secret,
            "client_kwargs": {"region_name": server.region},
        }

    def new_bucket(self) -> str:
        """Create an empty bucket and return its name; it is dropped with all its objects at the end."""
        name = f"t-{uuid.uuid4().hex[:12]}"
        with self.server.client() as boto:
            boto.create_bucket(Bucket=name)
        self._buckets.append(name)
        return name

    def url(self, bucket: str, path: str = "run") -> str:
        """The URL of a run in the bucket."""
        return f"s3://{bucket}/{path}".rstrip("/")

    def drop_buckets(self) -> None:
        """Delete every bucket made here, which frees its space at once."""
        with self.server.client() as boto:
            for name in self._buckets:
                for page in boto.get_paginator("list_objects_v2").paginate(Bucket=name):
                    keys = [{"Key": entry["Key"]} for entry in page.get("Contents", [])]
                    if keys:
                        boto.delete_objects(Bucket=name, Delete={"Objects": keys, "Quiet": True})
                boto.delete_bucket(Bucket=name)
        self._buckets.clear()
