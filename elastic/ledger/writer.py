"""Appends to a run's ledger, in the background: whole objects ``ledger/<epoch>-r<rank>-<n>.jsonl``."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid

from ckpt.format.layout import LEDGER
from ckpt.store.contract import Store
from elastic.ledger.events import Event, Payload, encode, utc

_log = logging.getLogger("elastic.ledger")
_KEEP = 10_000  # lines kept for the next try while the store does not take them


class Writer:
    """The ledger of one rank in one epoch. Any thread may record; nothing here ever fails training.

    Events are buffered until ``flush``, which returns at once; a store that fails is warned about once, and
    the events are tried again with the next flush. ``close`` waits for what is left, at most ``timeout_s``.
    """

    def __init__(self, store: Store, *, epoch: str, rank: int, world: int, generation: str | None) -> None:
        self.epoch, self.rank, self.world = epoch, rank, world
        self.start = uuid.uuid4().hex[:8]
        """The random id of this stay in the run."""
        self._store, self._generation = store, generation
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._lines: list[str] = []
        self._objects = 0
        self._asked, self._closing, self._warned = False, False, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="elastic-ledger", daemon=True)
        self._thread.start()

    def record(self, data: Payload, *, step: int, unix_s: float | None = None) -> Event:
        """Buffer one event at ``step`` completed steps; ``unix_s`` where it happened earlier than now."""
        event = Event(
            epoch=self.epoch,
            generation=self._generation,
            start=self.start,
            rank=self.rank,
            world=self.world,
            step=step,
            time=utc(time.time() if unix_s is None else unix_s),
            mono_s=time.monotonic(),
            host=self._host,
            pid=self._pid,
            data=data,
        )
        with self._changed:
            self._lines.append(encode(event))
        return event

    def flush(self) -> None:
        """Ask for the buffered events to be written; does not wait."""
        with self._changed:
            self._asked = True
            self._changed.notify()

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is left and stop; gives up after ``timeout_s``."""
        with self._changed:
            if self._closing:
                return
            self._asked = self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked)
                self._asked = False
                lines, self._lines, last = self._lines, [], self._closing
            if lines and not self._put(lines):
                with self._changed:
                    self._lines[:0] = lines[-_KEEP:]
            if last:
                return

    def _put(self, lines: list[str]) -> bool:
        # The number moves on only when the object is there: a put whose answer was lost is overwritten by one
        # that holds the same lines and more, so that no event comes twice.
        key = f"{LEDGER}{self.epoch}-r{self.rank:05d}-{self._objects:06d}.jsonl"
        try:
            self._store.put(key, ["".join(line + "\n" for line in lines).encode()])
        except Exception as error:
            if not self._warned:
                _log.warning("the ledger cannot be written; training goes on. %s", error)
            self._warned = True
            return False
        self._objects += 1
        return True
