"""Tests that anybody's storage backend must pass, to be subclassed in a pytest suite::

    class TestMyStore(ckpt.testing.StoreTests):
        @pytest.fixture
        def store(self):
            return MyStore(...)            # empty, one for each test

Needs no pytest to be imported, only to be run.
"""

# ruff: noqa: D102 - the names of tests are their documentation

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ClassVar, TypeVar

from ckpt.errors import Incomplete, ObjectMissing, Refused, StorageError
from ckpt.store import Buffer, Entry, Store, conditional_put_works

T = TypeVar("T")

__all__ = ["StoreTests"]


class StoreTests:
    """The storage contract (:class:`ckpt.store.Store`) as tests; each needs an empty ``store`` fixture."""

    many: ClassVar[int] = 1_003  #: objects in the largest listing; over 1,000 meets the paging of S3
    large_bytes: ClassVar[int] = 33 << 20  #: an object that remote stores write in several parts
    races: ClassVar[int] = 3  #: how often sixteen rivals create the same key
    conditional: ClassVar[bool] = True  #: whether ``put_if_absent`` must be atomic

    def test_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert "://" in store.url

    def test_empty_store_lists_nothing(self, store: Store) -> None:
        assert store.list() == []
        assert store.list("steps/") == []

    def test_round_trip(self, store: Store) -> None:
        for key, data in {"a": b"x", "b/c/d.json": b"{}" * 500, ".metadata": b"\0", "empty": b""}.items():
            store.put(key, [data])
            assert store.get(key) == data
        store.put("nothing", [])
        assert store.get("nothing") == b""

    def test_many_buffers_become_one_object(self, store: Store) -> None:
        source = _bytes(100_000, seed=1)
        view = memoryview(source)
        parts: list[Buffer] = [b"head", view[:10], bytearray(b""), view[10:70_000], bytearray(view[70_000:])]
        store.put("object", parts)
        assert store.get("object") == b"head" + source
        store.put("shaped", [memoryview(bytearray(range(24))).cast("B", (4, 6)), memoryview(b"\1\0").cast("H")])
        assert store.get("shaped") == bytes(range(24)) + b"\1\0"

    def test_large_object(self, store: Store) -> None:
        source = _bytes(self.large_bytes, seed=2)
        third = len(source) // 3 + 7
        view = memoryview(source)
        store.put("large", [view[:third], view[third : 2 * third], view[2 * third :]])
        assert store.list("large") == [Entry("large", len(source))]
        whole, tail = store.get_ranges("large", [(0, len(source)), (len(source) - 9, len(source))])
        assert bytes(whole) == source
        assert bytes(tail) == source[-9:]

    def test_overwrite(self, store: Store) -> None:
        store.put("key", [b"a longer first version"])
        store.put("key", [b"second"])
        assert store.get("key") == b"second"
        assert store.list() == [Entry("key", 6)]

    def test_ranges_keep_their_order(self, store: Store) -> None:
        source = _bytes(300_000, seed=3)
        store.put("object", [source])
        wanted = [(250_000, 300_000), (0, 1), (7, 7), (100, 90_000), (0, 300_000), (300_000, 300_000), (99, 101)]
        got = store.get_ranges("object", wanted)
        assert [bytes(data) for data in got] == [source[start:end] for start, end in wanted]
        assert store.get_ranges("object", []) == []

    def test_range_past_the_end(self, store: Store) -> None:
        store.put("object", [b"0123456789"])
        for ranges in ([(5, 11)], [(10, 11)], [(2000, 2001)], [(0, 4), (8, 12)]):
            with raises(Incomplete) as caught:
                store.get_ranges("object", ranges)
            assert "object" in str(caught[0])

    def test_missing_object(self, store: Store) -> None:
        store.put("there", [b"x"])
        for read in (lambda: store.get("absent"), lambda: store.get_ranges("there/not", [(0, 1)])):
            with raises(ObjectMissing):
                read()

    def test_max_bytes(self, store: Store) -> None:
        store.put("object", [bytes(1000)])
        assert len(store.get("object", max_bytes=1000)) == 1000
        with raises(StorageError) as caught:
            store.get("object", max_bytes=999)
        assert not isinstance(caught[0], ObjectMissing)
        assert "1000" in str(caught[0])

    def test_list_by_prefix(self, store: Store) -> None:
        keys = ["a/x.json", "a/x1", "a/xy/z", "a/y", "ab", "b/a/x", ".hidden/.file"]
        for n, key in enumerate(keys):
            store.put(key, [bytes(n)])
        everything = {key: n for n, key in enumerate(keys)}
        for prefix in ["", "a", "a/", "a/x", "a/xy", "a/xy/", "a/xy/z", "b/", ".hidden/.", "c", "a/x/", "ab/"]:
            expected = {key: size for key, size in everything.items() if key.startswith(prefix)}
            entries = store.list(prefix)
            assert len(entries) == len(expected), prefix
            assert {entry.key: entry.size for entry in entries} == expected, prefix

    def test_list_many(self, store: Store) -> None:
        keys = [f"commits/{n:012d}-e00000001-0.json" for n in range(self.many)]
        parallel(8, lambda key: store.put(key, [b"{}"]), keys)
        assert sorted(entry.key for entry in store.list("commits/")) == keys
        store.delete(keys)
        assert store.list() == []

    def test_list_sees_every_change(self, store: Store) -> None:
        for n in range(3):
            store.put(f"folder/{n}", [b"x"])
            assert len(store.list("folder/")) == n + 1
        store.delete(["folder/1"])
        assert sorted(entry.key for entry in store.list()) == ["folder/0", "folder/2"]

    def test_delete(self, store: Store) -> None:
        store.put("a/b", [b"x"])
        store.put("a/c", [b"y"])
        store.delete(["a/b", "absent", "a/b/deeper", "no/such/folder"])
        store.delete([])
        with raises(ObjectMissing):
            store.get("a/b")
        assert [entry.key for entry in store.list()] == ["a/c"]
        store.put("a/b", [b"again"])
        assert store.get("a/b") == b"again"

    def test_odd_keys(self, store: Store) -> None:
        keys = [
            "schl\u00fcssel/\u65e5\u672c.json",
            "with space",
            "per%20cent",
            "a+b",
            "a=b&c",
            "#",
            "[x]*?",
            "~",
            "e\u0301",
        ]
        for key in keys:
            store.put(key, [key.encode()])
        assert {entry.key for entry in store.list()} == set(keys)
        for key in keys:
            assert store.get(key) == key.encode()
        store.delete(keys)
        assert store.list() == []

    def test_keys_that_are_none(self, store: Store) -> None:
        for key in ("", "/a", "a/", "a//b", "../a", "a/../../b", "./a", "a\\b", "a\nb", "a\0"):
            for use in (
                lambda key: store.put(key, [b""]),
                lambda key: store.put_if_absent(key, b""),
                lambda key: store.get(key),
                lambda key: store.get_ranges(key, [(0, 1)]),
                lambda key: store.delete([key]),
            ):
                with raises(Refused):
                    use(key)
        with raises(Refused):
            store.list("../")

    def test_put_if_absent(self, store: Store) -> None:
        assert store.put_if_absent("epochs/1.json", b"mine") is True
        assert store.put_if_absent("epochs/1.json", b"theirs") is False
        assert store.get("epochs/1.json") == b"mine"
        # The same bytes again are a retry of the same writer, as after a lost answer.
        assert store.put_if_absent("epochs/1.json", b"mine") is True
        assert store.list() == [Entry("epochs/1.json", 4)]

    def test_rivals_have_one_winner(self, store: Store) -> None:
        assert conditional_put_works(store) is self.conditional
        assert store.list() == []
        if not self.conditional:
            return
        for n in range(self.races):
            rivals = [f"writer {rival}".encode() for rival in range(16)]
            won = parallel(16, lambda data, n=n: store.put_if_absent(f"epochs/{n}", data), rivals)
            assert sum(won) == 1
            assert store.get(f"epochs/{n}") == rivals[won.index(True)]

    def test_a_failed_put_leaves_what_was_there(self, store: Store) -> None:
        store.put("old", [b"whole"])
        for key in ("old", "new"):
            with raises(_Breaks):
                store.put(key, _Breaking(1 << 20))
        assert store.get("old") == b"whole"
        assert store.list() == [Entry("old", 5)]

    def test_threads(self, store: Store) -> None:
        def work(n: int) -> bool:
            data = _bytes(20_000 + n, seed=n)
            store.put(f"t/{n}", [data[:500], data[500:]])
            middle = store.get_ranges(f"t/{n}", [(100, 15_000)])[0]
            return store.get(f"t/{n}") == data and bytes(middle) == data[100:15_000]

        assert all(parallel(8, work, range(40)))
        assert len(store.list("t/")) == 40


class _Breaks(Exception):
    pass


class _Breaking(Sequence[Buffer]):
    """Buffers of which the second cannot be had."""

    def __init__(self, size: int) -> None:
        self._first = bytes(size)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, n: object) -> bytes:  # type: ignore[override]
        if n == 0:
            return self._first
        raise _Breaks


def _bytes(size: int, *, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def parallel(threads: int, work: Callable[..., T], items: Sequence[object] | range) -> list[T]:
    """The results of ``work`` on each item, by several threads."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


@contextmanager
def raises(kind: type[Exception]) -> Iterator[list[Exception]]:
    """As ``pytest.raises``; yields a list that holds the exception afterwards."""
    caught: list[Exception] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    if not caught:
        raise AssertionError(f"{kind.__name__} was not raised")
