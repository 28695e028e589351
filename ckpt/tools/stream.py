"""Objects read from front to end, a few side by side, in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ckpt.errors import StorageError
from ckpt.format.digest import Buffer
from ckpt.store.contract import Store
from ckpt.store.local import LocalStore

WINDOW_BYTES = 32 << 20  # fetched at once, in pieces that a store may fetch side by side
PIECE_BYTES = 8 << 20
OBJECTS_IN_FLIGHT = 4


@dataclass(slots=True)
class Stream:
    """An object's bytes in order, fetched a window at a time; ``seen`` gets every fetched piece."""

    store: Store
    key: str
    end: int
    seen: Callable[[Buffer], None]
    advance: Callable[[int], None]
    at: int = 0
    _ahead: list[memoryview] = field(default_factory=list)
    _source: Iterator[memoryview] | None = None
    _untold: int = 0

    def take(self, n: int) -> Iterator[Buffer]:
        """The next ``n`` bytes, as views, each to be used before the next is asked for."""
        while n > 0:
            if not self._ahead:
                self._fetch()
            piece = self._ahead[0]
            part, rest = piece[:n], piece[n:]
            self._ahead[:1] = [rest] if rest else []
            n -= len(part)
            self.at += len(part)
            yield part

    def _fetch(self) -> None:
        lo = self.at
        if self._source is None and isinstance(self.store, LocalStore):
            self._source = self.store.stream(self.key, lo, self.end)
        if self._source is not None:
            view = next(self._source)  # what was taken of the one before is done with
            self.seen(view)
            self._ahead.append(view)
            self._told(len(view))
            return
        hi = min(lo + WINDOW_BYTES, self.end)
        ranges = [(cut, min(cut + PIECE_BYTES, hi)) for cut in range(lo, hi, PIECE_BYTES)]
        for piece in self.store.get_ranges(self.key, ranges):
            self.seen(piece)
            self._ahead.append(memoryview(piece))
        self.advance(hi - lo)

    def _told(self, n: int) -> None:
        """Tell of progress now and then only: each time takes a lock."""
        self._untold += n
        if self._untold >= WINDOW_BYTES or self.at + n >= self.end:
            self.advance(self._untold)
            self._untold = 0


class Stopped(StorageError):
    """A read was given up because another one has failed."""


class Reading:
    """A few objects read side by side; the first error ends all and is raised when the block is left."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._pool = ThreadPoolExecutor(OBJECTS_IN_FLIGHT, thread_name_prefix="ckpt-validate")
        self._slots = threading.Semaphore(2 * OBJECTS_IN_FLIGHT)  # so that no more than a few indexes are held
        self._errors: list[BaseException] = []

    def start(self, work: Callable[[], None]) -> None:
        """Run it soon; waits while enough are under way. Raises ``Stopped`` once one has failed."""
        self._slots.acquire()
        if self._errors:
            raise Stopped("another read failed")
        self._pool.submit(self._run, work)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:
            self._errors.append(e)  # the first one is the cause; the others may be "stopped"
            self._stop.set()
        finally:
            self._slots.release()

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._stop.set()
        self._pool.shutdown()
        if self._errors and (kind is None or issubclass(kind, Stopped)):
            raise self._errors[0] from None
