"""The golden run of each version of the format stays readable, valid, and plain DCP."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt
from ckpt.catalog import Catalog
from ckpt.store import open_store
from ckpt.tools.validate import validate
from tests.corpus.golden import GOLDEN_V1, STEPS, expected

FOLDERS = {1: "steps/000000000001/e00000001-0", 2: "steps/000000000002/e00000002-0"}


def _targets(step: int) -> dict[str, torch.Tensor]:
    return {k: torch.full_like(v, 77) for k, v in expected(step).items()}


def _check(loaded: dict[str, torch.Tensor], step: int) -> None:
    for key, want in expected(step).items():
        assert loaded[key].dtype == want.dtype
        assert torch.equal(loaded[key].flatten().view(torch.uint8), want.flatten().view(torch.uint8)), key


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.filterwarnings("ignore")  # plain DCP warns of what it does without a process group
def test_plain_dcp_reads_it(step: int) -> None:
    loaded = _targets(step)
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(GOLDEN_V1 / FOLDERS[step]), no_dist=True)
    _check(loaded, step)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.filterwarnings("ignore")
def test_object_reader_reads_it(step: int) -> None:
    loaded = _targets(step)
    dcp.load(loaded, storage_reader=ckpt.ObjectReader(str(GOLDEN_V1 / FOLDERS[step])), no_dist=True)
    _check(loaded, step)


def test_the_run_is_valid_block_by_block() -> None:
    store = open_store(str(GOLDEN_V1))
    catalog = Catalog(store)
    usable = catalog.usable(catalog.listing())
    assert [a.step for a in usable] == [2, 1]
    for attempt in usable:
        report = validate(store, attempt.prefix, level="full", attempt=attempt)
        assert (report.verdict, report.findings, report.hints) == ("good", (), ())
        assert report.blocks_hashed == 11


@pytest.mark.filterwarnings("ignore")
def test_a_run_resumes_from_it(tmp_path: Path) -> None:
    run = shutil.copytree(GOLDEN_V1, tmp_path / "run")
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(6, 4))
    for name, value in expected(2).items():
        if name.startswith("model.") and name != "model.weight":
            model.register_buffer(name.removeprefix("model."), torch.zeros_like(value))
    optim = torch.optim.SGD(model.parameters(), lr=9.0, momentum=0.5)
    state = ckpt.State(model=model, optim=optim, note={})
    with ckpt.open(str(run)) as checkpoints:
        resumed = checkpoints.resume(state)
    assert (resumed.step, resumed.world_then, resumed.rng) == (2, 2, "derived")
    assert state["note"] == {"name": "golden", "scale": 0.125}
    assert optim.param_groups[0]["lr"] == 0.5
    _check({f"model.{k}": v for k, v in model.state_dict().items()}
           | {"optim.state.weight.momentum_buffer": optim.state[model.weight]["momentum_buffer"]}, 2)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_what_plain_dcp_saves_with_our_writer_is_valid(tmp_path: Path) -> None:
    state = {**expected(1), "nested": {"list": [1, {"deep": torch.ones(3)}], "text": "x"}, "none": None}
    dcp.save(state, storage_writer=ckpt.ObjectWriter(str(tmp_path)), no_dist=True)
    report = validate(open_store(str(tmp_path)), "", level="full")
    assert (report.verdict, report.findings, report.hints) == ("good", (), ())
    assert report.blocks_hashed >= 9


def test_values_are_plain_torch_files() -> None:
    """Every rank's random streams lie in the step as bytes that ``weights_only`` accepts."""
    from ckpt.format.manifest import load_index, load_manifest

    folder = GOLDEN_V1 / FOLDERS[2]
    manifest = load_manifest((folder / "manifest.json").read_bytes(), "manifest")
    assert {k: v.kind for k, v in manifest.values.items() if k.startswith("rng.")} == {
        "rng.rank00000": "per_rank",
        "rng.rank00001": "per_rank",
    }
    for rank in range(2):
        sizes = {o.name: o.bytes for o in manifest.objects}
        index = load_index((folder / f"index/{rank:05d}.json").read_bytes(), "index", sizes)
        for item in (i for i in index.items if i.dtype is None):
            data = (folder / item.object).read_bytes()[item.start : item.start + item.length]
            assert torch.load(io.BytesIO(data), weights_only=True) is not None
