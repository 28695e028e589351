"""Buffers as flat bytes, and byte ranges as requests: near ones joined, long ones cut, several under way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckpt.errors import Refused

from .contract import Buffer

GAP_BYTES = 64 << 10  # reading so little in vain is cheaper than a request
PIECE_BYTES = 8 << 20  # hides the latency of a request; measured best with a few of them at once
_PARALLEL = 8
_UNPROVEN_BYTES = 64 << 20  # taken on the word of who asks; more only once the object is known to reach so far


def byte_view(data: Buffer) -> memoryview:
    """The buffer as flat bytes, not copied."""
    return memoryview(data).cast("B")


def part_bytes(size: int, least: int) -> int:
    """Bytes of one part of an upload: more than ``least`` only where there would be over 9,000 (10,000 are allowed)."""
    return max(least, -(-size // 9_000))


def cut(views: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """The bytes of all views in parts of ``size``, the last one smaller; not copied."""
    part: list[memoryview] = []
    room = size
    for view in views:
        start = 0
        while start < view.nbytes:
            piece = view[start : start + room]
            part.append(piece)
            start += piece.nbytes
            room -= piece.nbytes
            if not room:
                yield part
                part, room = [], size
    if part:
        yield part


def checked_ranges(ranges: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """The ranges; ``Refused`` if one is not ``0 <= start <= end``."""
    for start, end in ranges:
        if not 0 <= start <= end:
            raise Refused(f"not a byte range: {start} to {end}")
    return ranges


@dataclass(frozen=True, slots=True)
class Fetch:
    """One request for bytes ``start`` to ``end``; ``serves`` are the numbers of the ranges it has bytes of."""

    start: int
    end: int
    serves: tuple[int, ...]


def plan_fetches(ranges: Sequence[tuple[int, int]]) -> list[Fetch]:
    """Requests that cover all non-empty ranges, none longer than ``PIECE_BYTES``."""
    fetches: list[Fetch] = []
    growing: int | None = None  # the newest request that may still grow: never a piece of a long range
    for n in sorted(range(len(ranges)), key=lambda n: ranges[n]):
        start, end = ranges[n]
        if end - start > PIECE_BYTES:
            cuts = range(start, end, PIECE_BYTES)
            fetches += [Fetch(cut, min(cut + PIECE_BYTES, end), (n,)) for cut in cuts]
        elif end > start:
            last = fetches[growing] if growing is not None else Fetch(start, start, ())
            joined = Fetch(last.start, max(end, last.end), (*last.serves, n))
            near = start - last.end <= GAP_BYTES and joined.end - joined.start <= PIECE_BYTES
            if growing is not None and near:
                fetches[growing] = joined
            else:
                growing = len(fetches)
                fetches.append(Fetch(start, end, (n,)))
    return fetches


def read_ranges(fetch: Callable[[int, int], Buffer], ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
    """The bytes of every range in the given order; ``fetch(start, end)`` runs in several threads."""
    if sum(end - start for start, end in checked_ranges(ranges)) > _UNPROVEN_BYTES:
        last = max(end for start, end in ranges if end > start)
        fetch(last - 1, last)
    results: list[Buffer] = [bytearray(end - start) if end - start > PIECE_BYTES else b"" for start, end in ranges]

    def run(request: Fetch) -> None:
        data = memoryview(fetch(request.start, request.end))
        for n in request.serves:
            start, end = ranges[n]
            if end - start > PIECE_BYTES:
                memoryview(results[n])[request.start - start : request.end - start] = data
            else:
                results[n] = data[start - request.start : end - request.start]

    fetches = plan_fetches(ranges)
    if len(fetches) <= 1:
        for request in fetches:
            run(request)
        return results
    with ThreadPoolExecutor(min(_PARALLEL, len(fetches)), "ckpt-read") as pool:
        for _ in pool.map(run, fetches):
            pass
    return results
