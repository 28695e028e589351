"""Any URL that fsspec knows, and S3 through s3fs where it is asked for: slower than obstore, but everywhere.

fsspec's own ``open(...)`` is never used for writing: leaving it by an exception publishes a truncated object.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast
from urllib.parse import urlsplit

import fsspec
from fsspec.asyn import sync

from ckpt.errors import AccessDenied, NoContainer, ObjectMissing, Refused, StorageError, Unreachable

from .contract import Buffer, Entry
from .keys import TEMP_PREFIX, join
from .remote import CHECK_S, RETRY_BUDGET_S, Failure, Remote, failure_of_answer, scrubbed, secrets_in
from .transfer import cut, part_bytes

# fsspec protocols where one call publishes a whole object or nothing, and ``mode="create"`` is one request.
_OBJECT_PROTOCOLS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}

_PART_BYTES = 16 << 20
_PARTS_AT_ONCE = 4  # with 16 MiB each: 64 MiB in flight, where s3fs would take 500

_S3_CONFIG: dict[str, Any] = {
    "connect_timeout": 5,
    # botocore's clock runs from the last byte sent to the first one received: a server that stores slowly,
    # not a slow link, needs this long. s3fs's 15 s makes it send the same part again and again.
    "read_timeout": 60,
    "max_pool_connections": 32,
    # Few and quick, for single parts; what lasts longer is tried again as a whole, with the budget in sight.
    "retries": {"mode": "standard", "total_max_attempts": 3},
    # Blocks carry their own checksums; a second one for every request costs a third of the speed.
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}


def open_filesystem(url: str, *, retry_budget_s: float = RETRY_BUDGET_S, **options: Any) -> FilesystemStore:
    """The store at any URL of fsspec's, with the options of that file system."""
    known = options | {"password in the URL": urlsplit(url).password}
    secrets = secrets_in(known)
    kind = S3fsStore if url.startswith(("s3://", "s3a://")) else FilesystemStore
    try:
        # A shared instance would keep the options and the caches of whoever made it first.
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **kind.prepared(options))
    except (ImportError, ValueError, TypeError, KeyError) as error:
        raise Refused(f"cannot open {scrubbed(url, secrets)} with fsspec: {scrubbed(str(error), secrets)}") from None
    except Exception as error:  # some file systems connect here
        failure = _explain(error)
        raise failure.kind(
            f"cannot open {scrubbed(url, secrets)}", facts=[("answer", scrubbed(failure.detail, secrets))]
        ) from None
    return kind(scrubbed(url.rstrip("/"), secrets), fs, root, known, retry_budget_s)


class FilesystemStore(Remote):
    """A folder of any fsspec file system.

    Where that is a service for objects, one call publishes an object; elsewhere it is written under another
    name and moved, and creating is looking and then writing, which ``conditional_put`` says. Nothing here can
    make a file durable: that is left to the file system.
    """

    def __init__(self, url: str, fs: Any, root: str, options: dict[str, Any], retry_budget_s: float) -> None:
        endpoint = options.get("endpoint_url") or dict(options.get("client_kwargs") or {}).get("endpoint_url") or ""
        super().__init__(url, endpoint=str(endpoint), options=options, retry_budget_s=retry_budget_s)
        self._fs = fs
        self._root = root.rstrip("/")
        protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
        self._objects = bool(_OBJECT_PROTOCOLS.intersection(protocols))
        self.conditional_put = None if self._objects else False

    @staticmethod
    def prepared(options: dict[str, Any]) -> dict[str, Any]:
        """Options as the file system takes them."""
        return options

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _send_check(self) -> None:
        """Nothing to ask: what a file system answers for a missing folder tells nothing."""

    def _send_put(self, key: str, views: Sequence[memoryview]) -> None:
        data = b"".join(views)
        if self._objects:
            self._fs.pipe_file(self._path(key), data)
            return
        folder, _, _ = self._path(key).rpartition("/")
        temporary = f"{folder}/{TEMP_PREFIX}{uuid.uuid4().hex}"
        self._fs.makedirs(folder, exist_ok=True)
        try:
            self._fs.pipe_file(temporary, data)
            self._fs.mv(temporary, self._path(key))
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def _send_create(self, key: str, data: bytes) -> None:
        self._fs.pipe_file(self._path(key), data, mode="create")

    def _send_get(self, key: str, max_bytes: int) -> bytes:
        size = self._send_size(key)
        if size > max_bytes:
            raise self._too_big(key, size, max_bytes)
        return cast(bytes, self._fs.cat_file(self._path(key)))

    def _send_get_range(self, key: str, start: int, end: int) -> Buffer | None:
        return cast(bytes, self._fs.cat_file(self._path(key), start=start, end=end))

    def _send_size(self, key: str) -> int:
        self._fs.invalidate_cache()
        info = self._fs.info(self._path(key))
        if info["type"] != "file":
            raise FileNotFoundError(key)
        return int(info["size"])

    def _send_list(self, folder: str, prefix: str) -> list[Entry]:
        self._fs.invalidate_cache()
        if self._objects:
            found = self._fs.find(self._path(folder), detail=True).values()
            return self._entries(found)
        # Not find(): it leaves out what it cannot read, and a hole in a listing must never look like absence.
        entries: list[Entry] = []
        folders = [self._path(folder)]
        while folders:
            here = folders.pop()
            try:
                found = self._fs.ls(here, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                continue  # not made yet, or gone since it was seen
            if any(info["type"] != "directory" and info["name"].rstrip("/") == here for info in found):
                if here == self._root:
                    raise NotADirectoryError(here)
                continue
            folders += [info["name"].rstrip("/") for info in found if info["type"] == "directory"]
            entries += self._entries(found)
        return entries

    def _entries(self, found: Any) -> list[Entry]:
        return [
            Entry(info["name"][len(self._root) + 1 :], info["size"])
            for info in found
            if info["type"] == "file" and not info["name"].endswith("/")
            and not info["name"].rpartition("/")[2].startswith(TEMP_PREFIX)
        ]  # fmt: skip

    def _send_delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._path(key))

    def _explain(self, error: Exception) -> Failure:
        failure = _explain(error)
        if isinstance(error, NotADirectoryError | FileExistsError) and self._fs.isfile(self._root):
            return replace(failure, kind=NoContainer, conflict=False)
        return failure


class S3fsStore(FilesystemStore):
    """A bucket and prefix through s3fs. ``CreateBucket`` is never sent, and no listing comes from a cache."""

    def __init__(self, url: str, fs: Any, root: str, options: dict[str, Any], retry_budget_s: float) -> None:
        super().__init__(url, fs, root, options, retry_budget_s)
        fs.retries = 1  # its own layer of retries multiplies botocore's
        self._bucket, _, self._prefix = self._root.partition("/")

    @staticmethod
    def prepared(options: dict[str, Any]) -> dict[str, Any]:
        """s3fs's options: region in its own place, limits of time, no cache of listings."""
        options = {name: value for name, value in options.items() if value is not None}
        region = options.pop("region", options.pop("region_name", None))
        client = dict(options.pop("client_kwargs", {}))
        if region:
            client.setdefault("region_name", region)
        config = _S3_CONFIG | dict(options.pop("config_kwargs", {}))
        return options | {"client_kwargs": client, "config_kwargs": config, "use_listings_cache": False}

    def _renew(self) -> bool:
        if self._fs.key or self._fs.anon:  # given by the caller, who alone could replace them
            return False
        self._fs.connect(refresh=True)
        return True

    def _request(self, method: str, **arguments: Any) -> Any:
        return self._fs.call_s3(method, Bucket=self._bucket, **arguments)

    def _key(self, key: str) -> str:
        return join(self._prefix, key)

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def run() -> Any:
            return await work

        return sync(self._fs.loop, run)

    def _send_check(self) -> None:
        probe = self._fs._call_s3("list_objects_v2", Bucket=self._bucket, Prefix=self._key(".check"), MaxKeys=1)
        self._wait(asyncio.wait_for(probe, CHECK_S))

    def _send_put(self, key: str, views: Sequence[memoryview]) -> None:
        self._wait(self._upload({"Bucket": self._bucket, "Key": self._key(key)}, views))

    async def _upload(self, place: dict[str, Any], views: Sequence[memoryview]) -> None:
        # Not pipe_file: it needs the object in one piece, and lets parts run on after one has failed.
        call = self._fs._call_s3
        size = sum(view.nbytes for view in views)
        if size <= _PART_BYTES:
            await call("put_object", Body=b"".join(views), **place)
            return
        place = place | {"UploadId": (await call("create_multipart_upload", **place))["UploadId"]}
        gate = asyncio.Semaphore(_PARTS_AT_ONCE)

        async def send(n: int, part: list[memoryview]) -> dict[str, Any]:
            async with gate:
                answer = await call("upload_part", PartNumber=n, Body=b"".join(part), **place)
            return {"PartNumber": n, "ETag": answer["ETag"]}

        try:
            async with asyncio.TaskGroup() as group:
                parts = cut(views, part_bytes(size, _PART_BYTES))
                tasks = [group.create_task(send(n, part)) for n, part in enumerate(parts, 1)]
            done = {"Parts": [task.result() for task in tasks]}
            await call("complete_multipart_upload", MultipartUpload=done, **place)
        except BaseException as error:
            with suppress(Exception):
                await call("abort_multipart_upload", **place)
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise

    def abort_uploads(self, prefix: str, *, older_s: float) -> int:
        """Abort uploads in parts below ``prefix`` that began ``older_s`` seconds ago or more; returns how many.

        A killed writer leaves them: they are in no listing, cost as much as objects, and never end by themselves.
        """
        return self._call("clean", prefix, lambda: self._send_abort_uploads(prefix, older_s))

    def _send_abort_uploads(self, prefix: str, older_s: float) -> int:
        aborted = 0
        more: dict[str, Any] = {}
        while True:
            page = self._request("list_multipart_uploads", Prefix=self._key(prefix), **more)
            for found in page.get("Uploads", []):
                if time.time() - found["Initiated"].timestamp() >= older_s:
                    self._request("abort_multipart_upload", Key=found["Key"], UploadId=found["UploadId"])
                    aborted += 1
            if not page.get("IsTruncated"):
                return aborted
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _send_create(self, key: str, data: bytes) -> None:
        self._request("put_object", Key=self._key(key), Body=data, IfNoneMatch="*")

    def _send_get(self, key: str, max_bytes: int) -> bytes:
        return cast(bytes, self._wait(self._read(key, max_bytes)))

    def _send_get_range(self, key: str, start: int, end: int) -> Buffer | None:
        try:
            return cast(bytes, self._wait(self._read(key, None, Range=f"bytes={start}-{end - 1}")))
        except OSError as error:
            if _answer(error)[0] == 416:
                return None
            raise

    async def _read(self, key: str, max_bytes: int | None, **arguments: Any) -> bytes:
        # Not cat_file: it asks for the size first, where a missing bucket looks like a missing key.
        answer = await self._fs._call_s3("get_object", Bucket=self._bucket, Key=self._key(key), **arguments)
        body, size = answer["Body"], answer["ContentLength"]
        try:
            if max_bytes is not None and size > max_bytes:
                raise self._too_big(key, size, max_bytes)
            return cast(bytes, await body.read())
        finally:
            body.close()

    def _send_size(self, key: str) -> int:
        return int(self._request("head_object", Key=self._key(key))["ContentLength"])

    def _send_list(self, folder: str, prefix: str) -> list[Entry]:
        entries: list[Entry] = []
        cut = len(self._prefix) + 1 if self._prefix else 0
        more: dict[str, Any] = {}
        while True:
            start = self._key(prefix) if prefix else f"{self._prefix}/" if self._prefix else ""
            page = self._request("list_objects_v2", Prefix=start, **more)
            if "IsTruncated" not in page:  # botocore takes any page of XML or HTML for an empty listing
                raise OSError("the answer is not a listing; is there an S3 service at this address?")
            entries += [
                Entry(found["Key"][cut:], found["Size"])
                for found in page.get("Contents", [])
                if not found["Key"].endswith("/")
            ]
            if not page.get("IsTruncated"):
                return entries
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _send_delete(self, keys: Sequence[str]) -> None:
        for first in range(0, len(keys), 1000):
            objects = [{"Key": self._key(key)} for key in keys[first : first + 1000]]
            answer = self._request("delete_objects", Delete={"Objects": objects, "Quiet": True})
            for error in answer.get("Errors", []):  # the request as a whole succeeds all the same
                kind = PermissionError if error.get("Code") == "AccessDenied" else OSError
                raise kind(f"{error.get('Code')}: {error.get('Message')} ({error.get('Key')})")


def _answer(error: BaseException) -> tuple[int, str, str]:
    """HTTP status, code and message of a botocore error or of s3fs's translation of one; 0 for neither."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    if not isinstance(response, dict):
        return 0, "", ""
    said = response.get("Error", {})
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return int(status), str(said.get("Code", "")), str(said.get("Message", ""))


_NETWORK = re.compile(r"Connection|Timeout|Endpoint|Payload|HTTPClient|Disconnected|IncompleteRead|ResponseParser")
_CREDENTIALS = re.compile(r"Credential|SSOToken|Unauthorized|ProfileNotFound")


def _explain(error: Exception) -> Failure:
    status, code, message = _answer(error)
    if status:
        return failure_of_answer(status, code, message)
    names = " ".join(kind.__name__ for kind in type(error).__mro__)
    detail = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, FileExistsError):
        return Failure(StorageError, detail, answered=True, conflict=True)
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return Failure(ObjectMissing, detail, answered=True)
    if isinstance(error, PermissionError) or _CREDENTIALS.search(names):
        return Failure(AccessDenied, detail)
    if isinstance(error, NotImplementedError):
        return Failure(StorageError, detail, answered=True, unsupported=True)
    if isinstance(error, TimeoutError | ConnectionError | EOFError) or _NETWORK.search(names):
        return Failure(Unreachable, detail, passing=True)
    return Failure(StorageError, detail, answered=True)
