"""Reading ``.metadata`` without torch says what torch says, and runs nothing that it is not meant to run."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ckpt.engine.reader import _torch_class
from ckpt.errors import Damaged, Unsafe
from ckpt.format import dcpmeta
from ckpt.format.fields import DTYPE_BYTES
from tests.corpus.golden import GOLDEN_V1
from tests.corpus.mutate import mutated_bytes


def _plain_dcp(folder: Path) -> bytes:
    state = {
        "a": torch.arange(12.0).reshape(3, 4),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 2),
        "nested": {"x": [1, {"y": torch.zeros(2)}], "name": "z"},
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return (folder / ".metadata").read_bytes()


def _as_torch_says(metadata: Metadata) -> dcpmeta.Contents:
    tensors, values = {}, []
    for key, md in metadata.state_dict_metadata.items():
        if isinstance(md, TensorStorageMetadata):
            tensors[key] = (str(md.properties.dtype).removeprefix("torch."), tuple(md.size))
        else:
            values.append(key)
    places = {
        (i.fqn, None if i.offset is None else tuple(i.offset)): (s.relative_path, s.offset, s.length)
        for i, s in metadata.storage_data.items()
    }
    return dcpmeta.Contents(tensors, tuple(values), places)


@pytest.mark.filterwarnings("ignore")
def test_torch_free_reading_says_what_torch_says(tmp_path: Path) -> None:
    ours = [p.read_bytes() for p in GOLDEN_V1.rglob(".metadata")]
    assert len(ours) == 2
    for data in [_plain_dcp(tmp_path), *ours]:
        want = _as_torch_says(pickle.loads(data))
        assert dcpmeta.read_contents(data, "x") == want
        assert _as_torch_says(dcpmeta.read(data, "x", _torch_class)) == want
        assert want.places


def test_all_dtypes_of_the_format_are_known(tmp_path: Path) -> None:
    for name in DTYPE_BYTES:
        data = pickle.dumps(getattr(torch, name), 4)
        assert dcpmeta.read(data, "x") == name
        assert dcpmeta.read(data, "x", _torch_class) is getattr(torch, name)


class _Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> Any:
        return self.reduced


ATTACKS = [
    _Calls(os.system, "touch /tmp/torchrelay-dcpmeta-was-executed"),
    _Calls(eval, "1"),
    _Calls(exec, "1"),
    _Calls(open, "/etc/passwd"),
    _Calls(getattr, "x", "upper"),
    _Calls(torch.load, "/tmp/x"),
    _Calls(torch.hub.load, "x", "y"),
    _Calls(__import__, "os"),
    _Calls(pickle.loads, b"N."),
    {"a": [1, (_Calls(os.getcwd),)]},
]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: repr(getattr(a, "reduced", "nested"))[:40])
@pytest.mark.parametrize("classes", [None, _torch_class], ids=["without torch", "with torch"])
def test_nothing_else_is_called(attack: Any, protocol: int, classes: Any) -> None:
    with pytest.raises((Unsafe, Damaged)) as caught:
        dcpmeta.read(pickle.dumps(attack, protocol), "x", classes)
    assert protocol < 2 or isinstance(caught.value, Unsafe)
    assert not os.path.exists("/tmp/torchrelay-dcpmeta-was-executed")


def test_names_of_torch_that_are_no_dtypes_are_refused() -> None:
    for name in ("load", "float128", "Tensor", "manual_seed"):
        with pytest.raises(Unsafe, match=name):
            dcpmeta.read(f"ctorch\n{name}\n.".encode(), "x")


GREEDY = {
    "memo number": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "length of text": b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b"abc.",
    "length of bytes": b"\x80\x04B\xff\xff\xff\x7fabc.",
    "frame": b"\x80\x04\x95" + (1 << 40).to_bytes(8, "little") + b"N.",
    "hash of a deep key": b"\x80\x04})" + b"\x85" * 50_000 + b"Ns.",
    "hash of a wide key": b"\x80\x04})" + b"\x94h\x00h\x00\x86" * 40 + b"Ns.",
    "large sizes": b"\x80\x04](" + b"N" * 4000 + b"e\x940ctorch\nSize\n\x940" + b"h\x01h\x00\x85R" * 50 + b".",
    "attributes of a class": b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n}b.",
    "persistent id": b"\x80\x04N\x51.",
    "extension": b"\x80\x04\x82\x01.",
    "out of band": b"\x80\x05\x97.",
    "nothing": b"",
    "no stop": b"\x80\x04N",
}  # fmt: skip


@pytest.mark.parametrize("name", GREEDY)
def test_what_would_fill_the_memory_or_the_stack_is_refused(name: str) -> None:
    import tracemalloc

    tracemalloc.start()
    with pytest.raises(Damaged):
        dcpmeta.read_contents(GREEDY[name], "x")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * len(GREEDY[name]) + (1 << 20)


def test_random_damage_raises_only_what_is_meant() -> None:
    data = (GOLDEN_V1 / "steps/000000000002/e00000002-0/.metadata").read_bytes()
    refused = 0
    for seed in range(1000):
        changed = mutated_bytes(data, random.Random(seed))
        try:
            dcpmeta.read_contents(changed, "x")
        except (Damaged, Unsafe):
            refused += 1
    assert refused > 500
