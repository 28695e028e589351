"""What every remote store does alike: check keys, retry, explain failures, create only once.

A backend supplies seven requests (``_send_*``) that raise whatever its client raises, and ``_explain``, which
boils such an exception down to a :class:`Failure`. Everything a caller may rely on is decided here, once.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from ckpt.errors import (
    AccessDenied,
    CkptError,
    Incomplete,
    NoContainer,
    ObjectMissing,
    StorageError,
    Unreachable,
)

from .contract import Buffer, Entry
from .keys import checked_key, checked_prefix, join
from .transfer import byte_view, read_ranges

T = TypeVar("T")

RETRY_BUDGET_S = 120.0

# How long `check` may take: a wrong address must be told while the user is still looking.
CHECK_S = 8.0

_HINTS: dict[type[StorageError], str] = {
    AccessDenied: "check key, secret and token (storage options, AWS_* variables), the clock and the policy",
    NoContainer: "check the name and the endpoint; a missing bucket is never created here",
    Unreachable: "check endpoint_url, the network and that the server runs",
}
_NO_CONTAINER = {"NoSuchBucket", "ContainerNotFound", "InvalidBucketName", "ContainerBeingDeleted"}
_NO_CREDENTIALS = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "CredentialsNotSupported"}
_PASSING = {"RequestTimeout", "NoSuchUpload", "IncompleteBody"}
_SECRET_NAME = re.compile(r"key|secret|token|passw|credential|sas|signature|connection_string", re.IGNORECASE)
_SECRET_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY")


@dataclass(frozen=True, slots=True)
class Failure:
    """What a client's exception comes down to.

    ``answered``: the endpoint gave an answer. ``passing``: worth another try. ``conflict``: a create-only
    write met an object. ``unsupported``: the backend does not know such a request.
    """

    kind: type[StorageError]
    detail: str
    answered: bool = False
    passing: bool = False
    conflict: bool = False
    unsupported: bool = False


def failure_of_answer(status: int, code: str = "", message: str = "") -> Failure:
    """The meaning of an HTTP status with a service's error code, for every service that speaks HTTP."""
    kind: type[StorageError] = StorageError
    if code in _NO_CONTAINER:
        kind = NoContainer
    elif status in (401, 403) or code in _NO_CREDENTIALS:
        kind = AccessDenied
    elif status == 404 and code not in _PASSING:
        kind = ObjectMissing
    elif status in (408, 429) or status >= 500:
        kind = Unreachable
    return Failure(
        kind,
        " ".join(filter(None, [str(status), code, message and f"({message})"])),
        answered=True,
        passing=(kind is Unreachable and status != 501) or code in _PASSING,
        conflict=status in (409, 412),
        unsupported=status == 501,
    )


def secrets_in(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Values of options (nested too) and variables that must never be shown, also as they look in a URL."""
    found = {os.environ[name] for name in _SECRET_VARIABLES if name in os.environ}

    def collect(values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                collect(value)
            elif isinstance(value, str) and _SECRET_NAME.search(name) and len(value) >= 4:
                found.add(value)

    collect(options)
    return tuple(sorted(found | {quote(value, safe="") for value in found}, key=len, reverse=True))


def scrubbed(text: str, secrets: Iterable[str]) -> str:
    """One line without secrets and without the query of any URL, where signatures travel."""
    for secret in secrets:
        text = text.replace(secret, "***")
    text = re.sub(r"(https?://[^\s?]+)\?\S+", r"\1", text)
    text = re.sub(r"(?<!abfs)(?<!abfss)://[^/\s@]+@", "://", text)  # abfs://container@account has no secret
    return " ".join(text.split())[:300]


class Remote(ABC):
    """A store behind a network; see :class:`ckpt.store.contract.Store` for what its calls promise."""

    conditional_put: bool | None = None  #: False where create-only writes are known not to be atomic

    def __init__(self, url: str, *, endpoint: str, options: Mapping[str, Any], retry_budget_s: float) -> None:
        self._secrets = secrets_in(options)
        self.url = url
        self._endpoint = scrubbed(endpoint, self._secrets)
        self._retry_budget_s = retry_budget_s
        self._reached = False
        self._silence: Failure | None = None
        self._checked = float("-inf")
        self._reaching = threading.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    # ---- the contract

    def put(self, key: str, data: Sequence[Buffer]) -> None:
        """Write one object; whole when this returns, and not there, or as it was, when it raises."""
        views = [view for part in data if (view := byte_view(part)).nbytes]
        self._call("write", checked_key(self.url, key), lambda: self._send_put(key, views))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create a small object; True if it is this call's. Raises only while the outcome is not known."""
        checked_key(self.url, key)
        self._reach("create", key)
        if self.conditional_put is False:
            return self._create_unguarded(key, data)
        last, renewed = Failure(StorageError, "no answer"), False
        for _ in self._tries():
            try:
                self._send_create(key, data)
            except Exception as error:
                last = self._understand(error)
            else:
                return True
            if last.kind is AccessDenied and not renewed and (renewed := self._renew()):
                continue
            if last.unsupported:
                self.conditional_put = False
                return self._create_unguarded(key, data)
            if not (last.conflict or last.passing):
                break
            # Ours after a lost answer, or somebody else's: only the bytes tell. Nothing there means that the
            # request was lost, or that two creations met (409): asking again is safe, as it is conditional.
            with suppress(ObjectMissing):
                return self.get(key) == data
        raise self._error(last, "create", key) from None

    def get(self, key: str, *, max_bytes: int = 1 << 28) -> bytes:
        """Read a small object; ``StorageError`` before its body is read if it is over ``max_bytes``."""
        return self._call("read", checked_key(self.url, key), lambda: self._send_get(key, max_bytes))

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Read byte ranges; near ones in one request, long ones in several, up to eight requests at a time."""
        checked_key(self.url, key)
        return read_ranges(lambda start, end: self._get_range(key, start, end), ranges)

    def list(self, prefix: str = "") -> list[Entry]:
        """All objects whose key starts with the prefix."""
        folder = checked_prefix(self.url, prefix)
        entries = self._call("list", prefix, lambda: self._send_list(folder, prefix))
        return [entry for entry in entries if entry.key.startswith(prefix)]

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are not there count as deleted."""
        wanted = [checked_key(self.url, key) for key in keys]
        if wanted:
            self._call("delete", wanted[0], lambda: self._send_delete(wanted))

    def check(self) -> None:
        """Ask the endpoint for a listing of nothing, for at most about ``CHECK_S`` seconds.

        Raises what any call would, sooner: data requests keep trying until the retry budget is spent.
        """
        try:
            self._send_check()
        except Exception as error:
            raise self._error(self._understand(error), "reach", "") from None

    # ---- what a backend supplies: requests that raise the client's own exceptions

    @abstractmethod
    def _explain(self, error: Exception) -> Failure: ...

    @abstractmethod
    def _send_check(self) -> None: ...

    @abstractmethod
    def _send_put(self, key: str, views: Sequence[memoryview]) -> None: ...

    @abstractmethod
    def _send_create(self, key: str, data: bytes) -> None: ...

    @abstractmethod
    def _send_get(self, key: str, max_bytes: int) -> bytes: ...

    @abstractmethod
    def _send_get_range(self, key: str, start: int, end: int) -> Buffer | None:
        """The bytes there are of the range; None where the service says that it starts after the end."""

    @abstractmethod
    def _send_size(self, key: str) -> int: ...

    @abstractmethod
    def _send_list(self, folder: str, prefix: str) -> Iterable[Entry]: ...

    @abstractmethod
    def _send_delete(self, keys: Sequence[str]) -> None: ...

    def _renew(self) -> bool:
        """Read the credentials anew where they may have been replaced; whether asking once more makes sense."""
        return False

    # ---- shared machinery

    def _too_big(self, key: str, size: int, max_bytes: int) -> StorageError:
        return StorageError(f"{join(self.url, key)} has {size} bytes; at most {max_bytes} were expected")

    def _get_range(self, key: str, start: int, end: int) -> Buffer:
        data = self._call("read", key, lambda: self._send_get_range(key, start, end))
        if data is not None and len(data) == end - start:
            return data
        # Incomplete counts as damage, so a short answer alone does not prove it: the object's size does.
        size = self._call("read", key, lambda: self._send_size(key))
        place = join(self.url, key)
        if size < end:
            raise Incomplete(f"{place} ends at byte {size}; bytes {start} to {end} were wanted")
        raise StorageError(f"{place}: a short answer, {len(data or b'')} of bytes {start} to {end}")

    def _create_unguarded(self, key: str, data: bytes) -> bool:
        """Look, then write: two writers may both win, so callers make the names of rivals differ."""
        with suppress(ObjectMissing):
            return self.get(key) == data
        self.put(key, [data])
        return True

    def _call(self, operation: str, key: str, send: Callable[[], T]) -> T:
        self._reach(operation, key)
        failure, renewed = Failure(StorageError, "not tried"), False
        for _ in self._tries():
            try:
                return send()
            except Exception as error:
                failure = self._understand(error)
            if failure.kind is AccessDenied and not renewed and (renewed := self._renew()):
                continue
            if not failure.passing:
                break
        raise self._error(failure, operation, key) from None

    def _tries(self) -> Iterator[None]:
        """One item a try: the first at once, more until the retry budget is spent."""
        end = time.monotonic() + self._retry_budget_s
        pause = 0.1
        yield
        while time.monotonic() + pause < end:
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, 5.0)
            yield

    def _reach(self, operation: str, key: str) -> None:
        """Before the first request: find out fast whether anything answers there at all."""
        if self._reached:
            return
        asked = time.monotonic()
        with self._reaching:
            self._find_out(asked)
        if self._silence:
            raise self._error(self._silence, operation, key)

    def _find_out(self, asked: float) -> None:
        if self._reached or self._checked > asked:  # another thread has, while this one waited
            return
        self._silence = None
        try:
            self._send_check()
        except Exception as error:
            failure = self._understand(error)
            # A refusal is for the request itself to meet: it may be allowed where a listing is not.
            self._silence = None if failure.answered else failure
        self._checked = time.monotonic()
        self._reached = self._silence is None

    def _understand(self, error: Exception) -> Failure:
        if isinstance(error, CkptError):
            raise error
        return self._explain(error)

    def _error(self, failure: Failure, operation: str, key: str) -> StorageError:
        kind = failure.kind
        if kind is ObjectMissing and operation != "read":
            # Only reading needs an object: for the rest, what is missing is the place.
            kind = NoContainer if operation in ("list", "reach") else StorageError
        facts = [("endpoint", self._endpoint)] if self._endpoint else []
        return kind(
            f"cannot {operation} {join(self.url, key)}: {_WORDS[kind]}",
            facts=[*facts, ("answer", scrubbed(failure.detail, self._secrets))],
            hint=_HINTS.get(kind),
        )


_WORDS: dict[type[StorageError], str] = {
    StorageError: "the store did not do it",
    AccessDenied: "access denied",
    NoContainer: "no such bucket or folder",
    ObjectMissing: "no such object",
    Unreachable: "no usable answer in time",
}
