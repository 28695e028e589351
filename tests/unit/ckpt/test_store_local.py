"""What only a disk can do to a store: crashes, full disks, leftovers, places that are no folder."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpt.errors import Incomplete, NoContainer, ObjectMissing, Refused, StorageError
from ckpt.store import Entry, Store, local, open_store
from ckpt.store.keys import TEMP_PREFIX
from ckpt.store.local import LocalStore
from ckpt.testing import StoreTests, parallel

MIB = 1 << 20


class TestWithoutHardLinks(StoreTests):
    """The contract on a file system that cannot link, as FAT and some network file systems."""

    many = 20

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        def link(*_: object) -> None:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        monkeypatch.setattr(os, "link", link)
        return open_store(tmp_path / "run")


def test_every_spelling_of_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for spelling in (tmp_path / "run", f"{tmp_path}/run/", f"file://{tmp_path}/run", "run", "./x/../run"):
        store = open_store(spelling)
        assert store.url == f"file://{tmp_path}/run"
        store.put("key", [b"x"])
        assert store.list() == [Entry("key", 1)]
    assert (tmp_path / "run" / "key").read_bytes() == b"x"


def test_nothing_is_made_before_the_first_write(tmp_path: Path) -> None:
    store = open_store(tmp_path / "deep" / "run")
    assert store.list() == []
    with pytest.raises(ObjectMissing):
        store.get("a")
    store.delete(["a"])
    assert not (tmp_path / "deep").exists()


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("I am a file")
    store = open_store(tmp_path / "run")
    for use in (
        store.list,
        lambda: store.list("a/"),
        lambda: store.get("a"),
        lambda: store.get_ranges("a", [(0, 1)]),
        lambda: store.put("a", [b""]),
        lambda: store.put_if_absent("a/b", b""),
    ):
        with pytest.raises(NoContainer, match=f"{tmp_path}/run is a file; name a folder"):
            use()
    assert (tmp_path / "run").read_text() == "I am a file"


def test_storage_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="key, secret"):
        open_store(tmp_path, key="k", secret="s")


def test_leftovers_are_neither_listed_nor_in_the_way(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put("steps/1/a", [b"x"])
    leftover = tmp_path / "steps" / "1" / f"{TEMP_PREFIX}0123"
    leftover.write_bytes(b"torn")
    assert store.list() == [Entry("steps/1/a", 1)]
    with pytest.raises(Refused):
        store.get(f"steps/1/{TEMP_PREFIX}0123")
    store.delete(["steps/1/a"])
    assert store.list() == []
    store.put("steps/1/a", [b"y"])
    assert store.get("steps/1/a") == b"y"


def test_a_leftover_without_a_writer_is_listed_and_can_be_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    leftover = tmp_path / "steps" / "1" / f"{TEMP_PREFIX}0123"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"torn")
    os.utime(leftover, (time.time() - 3500,) * 2)
    assert store.list() == []
    os.utime(leftover, (time.time() - 3700,) * 2)
    (found,) = store.list()
    assert found == Entry(f"steps/1/{TEMP_PREFIX}0123", 4)
    with pytest.raises(Refused):
        store.put(found.key, [b"x"])
    store.delete([found.key])
    assert not (tmp_path / "steps").exists()


def test_deleting_leaves_no_empty_folders(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run")
    for key in ("steps/1/index/0", "steps/1/data", "steps/2/data"):
        store.put(key, [b"x"])
    store.delete(["steps/1/index/0", "steps/1/data"])
    assert sorted(path.name for path in (tmp_path / "run" / "steps").iterdir()) == ["2"]
    store.delete(["steps/2/data"])
    assert (tmp_path / "run").is_dir()  # the root itself stays


def test_writers_and_deleters_of_one_folder(tmp_path: Path) -> None:
    """A folder that a deletion takes away is made again by the writer that needs it."""
    store = open_store(tmp_path)

    def work(n: object) -> None:
        for _ in range(50):
            store.put(f"a/b/{n}", [b"x"])
            store.delete([f"a/b/{n}"])

    parallel(4, work, range(4))
    assert store.list() == []


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    """Else a run whose ``commits`` were moved to another disk would look new."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "commits").symlink_to(tmp_path / "elsewhere")
    store = open_store(tmp_path / "run")
    store.put("commits/1", [b"x"])
    assert (tmp_path / "elsewhere" / "1").exists()
    assert store.list() == [Entry("commits/1", 1)]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The kernel fails every write past ``size``, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_half_way(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put("object", [b"older"])
    with largest_file(MIB):
        for use in (
            lambda: store.put("object", [bytes(MIB), bytes(MIB)]),
            lambda: store.put("new", [bytes(2 * MIB)]),
            lambda: store.put_if_absent("created", bytes(2 * MIB)),
        ):
            with pytest.raises(StorageError, match="EFBIG"):
                use()
    assert store.list() == [Entry("object", 5)]
    assert store.get("object") == b"older"
    assert os.listdir(tmp_path) == ["object"]  # the torn file was removed


def test_a_killed_writer_leaves_a_whole_object(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    script = textwrap.dedent("""
        import itertools, sys
        from ckpt.store import open_store
        store = open_store(sys.argv[1])
        for n in itertools.count():
            store.put("object", [bytes([n % 251]) * (4 << 20)] * 2)
            print(n, flush=True)
    """)
    for n in range(8):
        with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()  # it writes by now
            time.sleep(0.004 * n)
            writer.send_signal(signal.SIGKILL)
        data = store.get("object")
        assert len(data) == 8 * MIB
        assert data == data[:1] * len(data)
        assert store.list() == [Entry("object", 8 * MIB)]


def test_what_is_flushed_and_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File before the rename, folder after it, new folders in their parents: each is lost otherwise."""
    events: list[str] = []
    fsync, replace, link = os.fsync, os.replace, os.link

    def name(path: object) -> str:
        found = Path(os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path))
        return "temporary" if found.name.startswith(TEMP_PREFIX) else str(found.relative_to(tmp_path))

    def spy(word: str, real: object) -> object:
        def called(*args: object) -> None:
            events.append(" ".join([word, *map(name, args)]))
            real(*args)  # type: ignore[operator]

        return called

    monkeypatch.setattr(os, "fsync", spy("flush", fsync))
    monkeypatch.setattr(os, "replace", spy("rename", replace))
    monkeypatch.setattr(os, "link", spy("link", link))
    store = open_store(tmp_path / "run")
    store.put("a/b", [b"x"])
    assert events == ["flush .", "flush run", "flush temporary", "rename temporary run/a/b", "flush run/a"]
    events.clear()
    store.put_if_absent("a/c", b"x")
    assert events == ["flush temporary", "link temporary run/a/c", "flush run/a"]
    events.clear()
    store.delete(["a/b"])
    assert events == ["flush run/a"]


ON_A_SMALL_DISK = """
    import logging, sys, torch, ckpt
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    state = ckpt.State(model=torch.nn.Linear(500, 600, bias=False))  # 1.2 MB
    store = ckpt.open(sys.argv[1] + "/run")
    store.resume(state)
    for step in (1, 2, 3):
        try:
            print("saved", store.save(step, state).wait().step, flush=True)
        except ckpt.CkptError as e:
            print(e)
    print("newest", store.newest_valid())
    print("left", [e.key for e in store.store.list("steps/000000000003/")])
"""


def test_a_disk_that_gets_full_is_told_of_in_advance(tmp_path: Path) -> None:
    """A real disk of 3 MB, mounted where only this process sees it."""
    script = tmp_path / "fill.py"
    script.write_text(textwrap.dedent(ON_A_SMALL_DISK))
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=3m tmpfs {disk} && exec {sys.executable} {script} {disk}"
    done = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount],
                          capture_output=True, text=True, check=False)  # fmt: skip
    if done.returncode and not done.stdout:
        pytest.skip(f"no mount namespaces here, so a full disk is not verified: {done.stderr.strip()[:200]}")
    lines = done.stdout.splitlines()
    assert lines[0] == "saved 1", done.stdout + done.stderr
    assert "the next save will fail" in done.stdout
    (refused,) = [n for n, line in enumerate(lines) if "no room for" in line]
    assert lines.index("saved 2") < refused
    assert "needs" in lines[refused + 1]
    assert "newest 000000000002-e00000001-0" in lines
    assert "left []" in lines


# --- what asks for more than there is -------------------------------------------------------------------------


def test_ranges_beyond_the_end_take_no_memory(tmp_path: Path) -> None:
    """An index may lie about sizes: nothing is allocated before the file is known to have as much."""
    store = LocalStore(str(tmp_path))
    store.put("object", [bytes(1000)])
    tracemalloc.start()
    try:
        for ranges in ([(0, 1 << 40)], [(0, 10), (500, 1 << 33)], [(1 << 50, (1 << 50) + 9)]):
            with pytest.raises(Incomplete, match="ends at byte 1000"):
                store.get_ranges("object", ranges)
            with pytest.raises(Incomplete, match="ends at byte 1000"):
                list(store.stream("object", *ranges[-1]))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_stream_is_the_bytes_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_STREAM_BYTES", 7)
    store = LocalStore(str(tmp_path))
    data = bytes(range(100))
    store.put("object", [data])
    for start, end in ((0, 100), (3, 97), (5, 6), (4, 4), (100, 100)):
        pieces = [bytes(piece) for piece in store.stream("object", start, end)]
        assert b"".join(pieces) == data[start:end]
        assert all(len(piece) <= 7 for piece in pieces)
    with pytest.raises(ObjectMissing):
        list(store.stream("absent", 0, 1))


def test_a_file_that_shrinks_under_a_stream_is_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_STREAM_BYTES", 10)
    store = LocalStore(str(tmp_path))
    store.put("object", [bytes(100)])
    stream = store.stream("object", 0, 100)
    next(stream)
    os.truncate(tmp_path / "object", 25)
    with pytest.raises(Incomplete, match="ends at byte 25"):
        list(stream)
