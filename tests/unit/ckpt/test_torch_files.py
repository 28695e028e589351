"""What torch.save writes, taken apart without torch; boxes; the safetensors format."""

from __future__ import annotations

import io
import math
import os
import pickle
import random
import struct
import tracemalloc
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from ckpt.errors import Damaged, Unsafe
from ckpt.foreign import safetensors
from ckpt.format import boxes, torchpickle, zipframe
from ckpt.format.fields import DTYPE_BYTES
from ckpt.format.torchpickle import Stored


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def records(data: bytes) -> list[zipframe.Record]:
    return zipframe.records(lambda lo, hi: data[lo:hi], len(data), "x")


def unpickled(data: bytes) -> Any:
    r = zipframe.single(records(data), "data.pkl", "x")
    return torchpickle.load(data[r.start : r.start + r.length], "x")


# --- frames ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.arange(3000.0), "text", {"a": [torch.ones(2), torch.zeros(20_000)]}])
def test_the_records_are_those_that_zipfile_reads(value: Any) -> None:
    data = saved(value)
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        want = {i.filename: (i.CRC, z.read(i)) for i in z.infolist()}
    assert {r.name: (r.crc, data[r.start : r.start + r.length]) for r in records(data)} == want


def test_sizes_of_64_bits_are_read() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z, z.open(zipfile.ZipInfo("a/data.pkl"), "w", force_zip64=True) as f:
        f.write(b"abc")
    data = bytearray(out.getvalue())
    at = data.index(b"PK\x01\x02")
    entry = data[at : data.index(b"PK\x05\x06")]
    extra = struct.pack("<2H2Q", 1, 16, 3, 3)  # as for a record of 4 GiB: the sizes stand in an extra field
    large = entry[:20] + b"\xff" * 8 + entry[28:30] + struct.pack("<H", len(extra)) + entry[32:] + extra
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, len(large), at, 0)
    (record,) = records(bytes(data[:at] + large + end))
    assert (record.name, record.length, data[record.start : record.start + 3]) == ("a/data.pkl", 3, b"abc")


def test_every_changed_byte_of_a_frame_ends_in_a_verdict() -> None:
    data = saved({"a": torch.ones(3), "b": [1, "x"]})
    rng = random.Random(5)
    wrong = 0
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << rng.randrange(8)
        try:
            unpickled(bytes(changed))
        except (Damaged, Unsafe):
            wrong += 1
    assert wrong > 200
    for n in range(0, len(data), 7):
        with pytest.raises(Damaged):
            records(data[:n])


# --- pickles --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_tensors_of_all_dtypes_are_found(dtype: str) -> None:
    tensor = torch.zeros(12, dtype=torch.uint8).repeat(DTYPE_BYTES[dtype]).view(getattr(torch, dtype)).view(3, 4)
    got = unpickled(saved(tensor))
    assert (got.dtype, got.shape, got.contiguous) == (dtype, (3, 4), True)
    assert got.numel == 12


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0)[5:],
        torch.arange(24.0).view(2, 3, 4)[:, 1],
        torch.empty(0, 3),
        torch.tensor(7),
        torch.zeros(1, 5, 1).expand(1, 5, 1),
    ],
)
def test_where_a_view_lies_is_what_torch_says(view: torch.Tensor) -> None:
    data = saved(view)
    got: Stored = unpickled(data)
    record = zipframe.single(records(data), f"data/{got.key}", "x") if got.numel else None
    raw = np.frombuffer(data, np.dtype(got.dtype), got.numel, record.start) if record else np.empty(0, got.dtype)
    array = np.lib.stride_tricks.as_strided(raw[got.offset :], got.shape, [s * raw.itemsize for s in got.stride])
    assert np.array_equal(array, view.numpy())
    assert got.contiguous == view.is_contiguous()


VALUES = [
    None, True, 5, -(1 << 70), 0.5, "ü", b"\x00\xff", b"", 1 + 2j, (), (1, 2, 3, 4), [], [1, [2]], {}, {"a": {"b": 1}},
    {1, 2}, set(), Counter("aab"), OrderedDict(a=1), torch.Size([2, 3]), {(1, "a"): 2},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_are_read_as_they_were_saved(value: Any) -> None:
    assert unpickled(saved(value)) == value
    torchpickle.check_value(saved(value), "x")


class Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> Any:
        return self.reduced


ATTACKS = [
    Calls(os.system, "touch /tmp/torchrelay-pickle-was-executed"), Calls(eval, "1"), Calls(getattr, "x", "upper"),
    Calls(torch.load, "/tmp/x"), Calls(torch.hub.load, "x", "y"), Calls(pickle.loads, b"N."), Calls(bytearray, 1 << 60),
    Calls(bytes, 1 << 60), Calls(list, range(10)), [Calls(os.getcwd)], {"a": (Calls(torch.zeros, 1 << 60),)},
    torch.nn.Linear(2, 2), Path("/etc/passwd"), np.float64(1.0), np.ones(3),
]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: repr(getattr(a, "reduced", type(a)))[:40])
def test_nothing_else_is_called(attack: Any) -> None:
    with pytest.raises(Unsafe):
        torchpickle.check_value(saved(attack), "x")
    for protocol in range(6):
        with pytest.raises((Unsafe, Damaged)):
            torchpickle.load(pickle.dumps(attack, protocol), "x")
    assert not os.path.exists("/tmp/torchrelay-pickle-was-executed")


def test_a_name_that_somebody_made_safe_for_torch_is_not_safe_here() -> None:
    data = saved(Calls(PurePosixPath, "a"))
    with torch.serialization.safe_globals([PurePosixPath]):
        assert torch.load(io.BytesIO(data), weights_only=True) == PurePosixPath("a")
        with pytest.raises(Unsafe, match="PurePosixPath"):
            torchpickle.check_value(data, "x")


BYTES = b"\x80\x02c_codecs\nencode\nq\x00X\xe8\x03\x00\x00" + b"a" * 1000 + b"X\x06\x00\x00\x00latin1\x86q\x01"
SET = b"\x80\x02c__builtin__\nset\nq\x00](" + b"K\x01" * 900 + b"e\x85q\x01"
GREEDY = {
    "length of text": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "length of a number": b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
    "copies of bytes": BYTES + b"h\x00h\x01R" * 20_000 + b".",
    "copies of a set": SET + b"h\x00h\x01R" * 20_000 + b".",
    "hash of a deep key": b"\x80\x02})" + b"\x85" * 50_000 + b"Ns.",
    "no stop": b"\x80\x02N",
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("name", GREEDY)
def test_what_would_fill_the_memory_or_the_stack_is_refused(name: str) -> None:
    assert torchpickle.load(b"\x80\x02Nr\xff\xff\xff\x7f.", "x") is None  # a memo number that C's reader allocates for
    tracemalloc.start()
    with pytest.raises((Damaged, Unsafe)):
        torchpickle.load(GREEDY[name], "x")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * len(GREEDY[name]) + (1 << 20)


# --- boxes ----------------------------------------------------------------------------------------------------


def random_partition(shape: tuple[int, ...], rng: random.Random) -> list[boxes.Box]:
    found: list[boxes.Box] = [((0,) * len(shape), shape)]
    for _ in range(rng.randrange(8)):
        offsets, sizes = found.pop(rng.randrange(len(found)))
        d = rng.randrange(len(shape))
        k = rng.randint(0, sizes[d])
        found.append((offsets, (*sizes[:d], k, *sizes[d + 1 :])))
        moved = (*offsets[:d], offsets[d] + k, *offsets[d + 1 :])
        found.append((moved, (*sizes[:d], sizes[d] - k, *sizes[d + 1 :])))
    return found


def counted(shape: tuple[int, ...], parts: list[boxes.Box]) -> bool:
    seen = np.zeros(shape, int)
    for offsets, sizes in parts:
        seen[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    return bool((seen == 1).all())


def test_boxes_that_make_up_a_tensor_are_told_from_others() -> None:
    rng, verdicts = random.Random(3), Counter[bool]()
    for _ in range(2000):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 3)))
        parts = random_partition(shape, rng)
        assert boxes.tiles(shape, parts)
        n = rng.randrange(len(parts))
        offsets, sizes = parts[n]
        d = rng.randrange(len(shape))
        if rng.random() < 0.5 and offsets[d] + sizes[d] < shape[d]:
            parts[n] = ((*offsets[:d], offsets[d] + 1, *offsets[d + 1 :]), sizes)
        else:
            parts.append(parts[rng.randrange(len(parts))])
        verdict = counted(shape, parts)
        assert boxes.tiles(shape, parts) == verdict
        verdicts[verdict] += 1
    assert verdicts[False] > 500
    assert boxes.tiles((), [((), ())])
    assert not boxes.tiles((), [])
    assert boxes.tiles((0, 3), [((0, 0), (0, 3))])
    assert not boxes.tiles((4,), [((0,), (2,)), ((1,), (2,))])
    assert not boxes.tiles((4,), [((-1,), (5,))])


def test_pieces_are_consecutive_and_small() -> None:
    for shape, limit in (
        ((7, 5), 40),
        ((3, 40), 64),
        ((2, 3, 50), 48),
        ((), 1),
        ((0, 4), 8),
        ((1000,), 64),
        ((1, 1, 9), 8),
    ):
        array = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
        flat: list[int] = []
        for offsets, sizes in boxes.pieces(shape, 8, limit):
            part = array[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
            assert part.nbytes <= max(limit, 8)
            flat += part.reshape(-1).tolist()
        assert flat == list(range(array.size)), shape


# --- safetensors ----------------------------------------------------------------------------------------------


def test_a_header_is_read_back_as_it_was_written() -> None:
    tensors = [("ä.b", "bfloat16", (3, 4)), ("empty", "float32", (0, 2)), ("scalar", "int64", ()), ("c", "bool", (5,))]
    data = safetensors.header(tensors)
    assert len(data) % 8 == 0
    size = len(data) + sum(DTYPE_BYTES[d] * math.prod(s) for _, d, s in tensors)
    length = safetensors.header_length(data, size, "x")
    got = safetensors.parse_header(data[8 : 8 + length], size, "x")
    assert [(k, p.dtype, p.shape) for k, p in got.items()] == tensors


def test_random_damage_of_a_header_raises_only_what_is_meant() -> None:
    data = safetensors.header([("a", "float32", (3, 4)), ("b", "int8", (7,))])
    rng = random.Random(1)
    for _ in range(2000):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] = rng.randrange(256)
        try:
            length = safetensors.header_length(bytes(changed), len(data) + 55, "x")
            safetensors.parse_header(bytes(changed[8 : 8 + length]), len(data) + 55, "x")
        except Damaged:
            pass


def test_the_library_reads_what_is_written_and_writes_what_is_read(tmp_path: Path) -> None:
    library = pytest.importorskip(
        "safetensors.torch", reason="NOT CHECKED against the safetensors library: not installed"
    )
    tensors = {
        "a": torch.rand(3, 4),
        "b": torch.ones(2, dtype=torch.bfloat16),
        "c": torch.tensor(3),
        "d": torch.empty(0, 2),
    }
    library.save_file(tensors, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    length = safetensors.header_length(data, len(data), "x")
    got = safetensors.parse_header(data[8 : 8 + length], len(data), "x")
    assert {k: (p.dtype, p.shape) for k, p in got.items()} == {
        k: (str(t.dtype)[6:], tuple(t.shape)) for k, t in tensors.items()
    }
    named = [(k, str(t.dtype)[6:], tuple(t.shape)) for k, t in tensors.items()]
    body = b"".join(t.view(torch.uint8).numpy().tobytes() if t.dim() else t.numpy().tobytes() for t in tensors.values())
    (tmp_path / "y.safetensors").write_bytes(safetensors.header(named) + body)
    back = library.load_file(tmp_path / "y.safetensors")
    assert all(torch.equal(back[k], t) for k, t in tensors.items())
