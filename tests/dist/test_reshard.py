"""A GPT saved by four FSDP2 ranks on a real S3 server comes back bit for bit on any number of ranks and any mesh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.dist import gpt
from tests.ranks import run_ranks
from tests.s3server import S3, S3Server

pytestmark = [pytest.mark.dist, pytest.mark.s3]


def save_on_four(url: str, options: dict[str, Any], reference: str) -> None:
    model, optim, sched = gpt.build((4,), seed=1)
    state = ckpt.State(model=model, optim=optim, sched=sched, epoch=3)
    with ckpt.open(url, verify_snapshot=True, **options) as store:
        store.resume(state)
        gpt.train(model, optim, sched, 3)
        store.save(3, state).wait()
    full = gpt.full_state(model, optim)
    if torch.distributed.get_rank() == 0:
        torch.save(full, reference)


def load_on(mesh: tuple[int, ...] | None, url: str, options: dict[str, Any], reference: str, kept: bool) -> str:
    model, optim, sched = gpt.build(mesh, seed=99)
    state = ckpt.State(model=model, optim=optim, sched=sched, epoch=0)
    if kept:  # a state that has trained already is replaced whole
        gpt.train(model, optim, sched, 1)
    got = ckpt.open(url, **options).load(state)
    gpt.assert_same_bits(torch.load(reference), gpt.full_state(model, optim))
    assert got.step == 3
    assert got.proof == f"{len(torch.load(reference))} tensors proven"
    assert state["epoch"] == 3
    assert sched.last_epoch == 3
    assert optim.param_groups[0]["lr"] == 1e-2 / 4
    return got.rng


@pytest.fixture(scope="module")
def saved(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, Any], str]]:
    s3 = S3(s3_server)
    url = s3.url(s3.new_bucket(), "gpt")
    reference = str(tmp_path_factory.mktemp("gpt") / "reference.pt")
    run_ranks(4, save_on_four, url, s3.options, reference)
    yield url, s3.options, reference
    s3.drop_buckets()


@pytest.mark.parametrize(
    ("ranks", "mesh", "kept"),
    [(1, None, False), (2, (2,), False), (3, (3,), True), (6, (6,), False), (4, (2, 2), False), (4, (4,), True)],
    ids=["one plain process", "2", "3", "6", "2x2", "4"],
)
def test_bitwise_on(
    saved: tuple[str, dict[str, Any], str], ranks: int, mesh: tuple[int, ...] | None, kept: bool
) -> None:
    streams = run_ranks(ranks, load_on, mesh, *saved, kept)
    assert streams == ["restored" if ranks == 4 else "derived"] * ranks


def read_with_torch_alone(folder: str, reference: str) -> list[str]:
    import sys

    import torch.distributed.checkpoint as dcp

    want = torch.load(reference)
    model, optim, _ = gpt.build(None, seed=5)
    names = {id(p): n for n, p in model.named_parameters()}
    gpt.train(model, optim, torch.optim.lr_scheduler.ConstantLR(optim), 1)
    target = {"model": model.state_dict(), "optim": {"state": {names[id(p)]: dict(s) for p, s in optim.state.items()}}}
    dcp.load(target, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    got = dict(target["model"])
    for name, s in target["optim"]["state"].items():
        got |= {f"{name}.{k}": v for k, v in s.items()}
    gpt.assert_same_bits(want, got)
    return [m for m in sys.modules if m.split(".")[0] in ("ckpt", "elastic", "drills")]


def test_plain_dcp_reads_it(tmp_path: Path) -> None:
    """torch's own reader, in a process that never imported this package."""
    import subprocess
    import sys

    reference = str(tmp_path / "reference.pt")
    run_ranks(4, save_on_four, str(tmp_path / "run"), {}, reference)
    (folder,) = (tmp_path / "run" / "steps").glob("*/*")
    code = (
        "import sys, types\n"
        "sys.modules['ckpt'] = types.ModuleType('ckpt')  # so that importing the helper imports nothing of ours\n"
        "import tests.dist.test_reshard as t\n"
        f"left = t.read_with_torch_alone({str(folder)!r}, {reference!r})\n"
        "assert left == ['ckpt'], left\n"
        "print('same bits')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "same bits\n", done.stderr
