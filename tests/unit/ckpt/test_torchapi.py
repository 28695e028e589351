"""The private torch names that the format depends on: a new torch that changes them turns these red."""

from __future__ import annotations

import dataclasses
import io
import re
import zipfile
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckpt.engine import torchapi
from ckpt.engine.frame import frame, owned

ROOT = Path(__file__).parents[3]


def test_storage_info_has_the_fields_that_readers_use() -> None:
    assert [f.name for f in dataclasses.fields(torchapi.StorageInfo)][:3] == ["relative_path", "offset", "length"]
    assert torchapi.StorageInfo.__module__ == "torch.distributed.checkpoint.filesystem"
    assert callable(FileSystemReader)


def test_the_index_compares_without_its_hint() -> None:
    """Staged data are found by an index to which the global plan has added a chunk number."""
    plain, hinted = MetadataIndex("a", torch.Size([1])), MetadataIndex("a", torch.Size([1]), 7)
    assert plain == hinted
    assert hash(plain) == hash(hinted)


def test_a_frame_is_what_torch_save_writes_and_the_payload_is_not_copied() -> None:
    t = owned(torch.arange(1000, dtype=torch.float32))
    f = frame(t)
    whole = f.head + bytes(f.payload) + f.tail
    plain = io.BytesIO()
    torch.save(t, plain)
    assert len(whole) == len(plain.getvalue())
    assert whole[len(f.head) :][:4000] == plain.getvalue()[len(f.head) :][:4000]
    assert torch.equal(torch.load(io.BytesIO(whole)), t)
    with zipfile.ZipFile(io.BytesIO(whole)) as z:
        assert any(n.endswith("data/0") for n in z.namelist())
    t[0] = 42  # a view: the frame sees it
    assert torch.frombuffer(f.payload, dtype=torch.float32)[0] == 42


def test_a_file_of_torch_save_names_the_functions_that_an_export_names() -> None:
    for dtype, name in ((torch.float32, "_rebuild_tensor_v2"), (torch.uint16, "_rebuild_tensor_v3")):
        file = io.BytesIO()
        torch.save(torch.zeros(2).to(dtype), file)
        with zipfile.ZipFile(file) as z:
            assert f"torch._utils\n{name}".encode() in z.read(next(n for n in z.namelist() if n.endswith("data.pkl")))
        assert getattr(torchapi, name[1:]).__module__ == "torch._utils"


def test_the_crc_switch_is_put_back() -> None:
    for before in (True, False):
        torch.serialization.set_crc32_options(before)
        with torchapi.without_crc():
            assert torch.serialization.get_crc32_options() is False
        assert torch.serialization.get_crc32_options() is before
    torch.serialization.set_crc32_options(True)


def test_private_names_are_used_in_one_file_only() -> None:
    private = re.compile(r"torch(?:\.\w+)*\._(?!_)\w+|from torch[\w.]* import .*\b_(?!_)\w+")
    # two name them as text, to refuse others; the drills' reader is an independent plain-DCP reader by design
    texts = {"ckpt/format/dcpmeta.py", "ckpt/format/torchpickle.py"}
    texts |= {"elastic/launch/forkserver.py"}  # the name of a module to import ahead of time, where it is there
    allowed = {"ckpt/engine/torchapi.py", "drills/reader.py", *texts}
    found = {
        f"{p.relative_to(ROOT)}: {m.group()}"
        for package in ("ckpt", "elastic", "drills")
        for p in (ROOT / package).rglob("*.py")
        if str(p.relative_to(ROOT)) not in allowed
        for m in private.finditer(p.read_text())
    }
    assert not found
