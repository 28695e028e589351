"""export: what comes out, what is refused, how much memory it takes; values that run code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt
from ckpt import cli
from ckpt.engine import planner, writer
from ckpt.errors import Refused, Unsafe
from ckpt.foreign.export import _publish
from tests.corpus.foreign import CANARY, Runs, frame
from tests.unit.ckpt.moving import Job, same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


# --- out ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    job = Job(1)
    with ckpt.open(tmp_path / "run") as checkpoints:
        checkpoints.resume(job.state(note={"x": [1, torch.ones(2)]}))
        checkpoints.save(3, job.state(note={"x": [1, torch.ones(2)]})).wait()
    return tmp_path / "run"


def test_out_as_torch_save(run: Path, tmp_path: Path) -> None:
    assert cli.run(["export", str(run), str(tmp_path / "x.pt"), "--to", "torch"]) == 0
    job = Job(1)
    for mmap in (False, True):
        got = torch.load(tmp_path / "x.pt", weights_only=True, mmap=mmap)
        assert set(got) == {"model", "optim", "sched", "note", "rng"}
        assert same(got["model"], dict(job.model.state_dict()))
        assert same(got["note"], {"x": [1, torch.ones(2)]})
        assert got["optim"]["param_groups"][0]["lr"] == job.optim.param_groups[0]["lr"]
        assert same(got["optim"]["state"]["0.weight"], job.optim.state[job.model[0].weight])


def test_out_as_plain_dcp_and_in_again(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli.run(["export", str(run), str(out), "--to", "dcp"]) == 0
    assert cli.run(["validate", str(out), "--level", "full"]) == 0
    job = Job(2)
    state = {"model": job.model.state_dict(), "note": None}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    assert same(dict(job.model.state_dict()), dict(Job(1).model.state_dict()))
    assert cli.run(["adopt", str(out), str(tmp_path / "again"), "--step", "3"]) == 0
    job = Job(2)
    with ckpt.open(tmp_path / "again") as checkpoints:
        assert checkpoints.resume(job.state(note=None)).rng == "restored"
    assert same(job.optim.state_dict(), Job(1).optim.state_dict())


def test_out_as_safetensors(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", f"{run}@3", str(tmp_path / "x"), "--to", "safetensors"]
    assert cli.run(words) == 2
    assert "--only 'model.*'" in capsys.readouterr().err
    assert cli.run([*words, "--only", "optim.state.*"]) == 2
    assert "is the state of an optimizer" in capsys.readouterr().err
    for more, names in (
        ([], {"model.safetensors"}),
        (["--max-shard", "100B"], {f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)}),
    ):
        out = tmp_path / f"out{len(more)}"
        assert cli.run([*words[:2], str(out), *words[3:], "--only", "model.*", "--strip", "model.", *more]) == 0
        assert {p.name for p in out.iterdir()} >= names
        assert cli.run(["validate", str(out)]) == 3
        assert cli.run(["adopt", str(out), str(out) + "-run", "--rename", "=model."]) == 0
        job = Job(2)
        with ckpt.open(str(out) + "-run") as checkpoints:
            checkpoints.resume(ckpt.State(model=job.model))
        assert same(dict(job.model.state_dict()), dict(Job(1).model.state_dict()))
    one = tmp_path / "one.safetensors"
    assert cli.run([*words[:2], str(one), *words[3:], "--only", "model.*", "--max-shard", "100B"]) == 2
    assert cli.run([*words[:2], str(one), *words[3:], "--only", "model.*"]) == 0
    assert one.is_file()


def test_what_safetensors_cannot_hold_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp.save(
        {"a": torch.ones(2), "z": torch.ones(3, dtype=torch.complex128)}, checkpoint_id=tmp_path / "d", no_dist=True
    )
    assert cli.run(["export", str(tmp_path / "d"), str(tmp_path / "out"), "--to", "safetensors"]) == 2
    assert "'z': complex128" in capsys.readouterr().err
    assert cli.run(["export", str(tmp_path / "d"), str(tmp_path / "out.pt"), "--to", "torch"]) == 0
    assert torch.load(tmp_path / "out.pt", weights_only=True)["z"].dtype == torch.complex128


def test_tied_tensors_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    w = torch.rand(4, 4)
    dcp.save({"embed": w, "head": w, "x": torch.rand(4, 4)}, checkpoint_id=tmp_path / "d", no_dist=True)
    assert cli.run(["export", str(tmp_path / "d"), str(tmp_path / "out"), "--to", "safetensors", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["alike"] == [["embed", "head"]]


def test_nothing_is_overwritten_and_a_failure_leaves_nothing(run: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    assert cli.run(["export", str(run), str(tmp_path / "there"), "--to", "torch"]) == 2
    assert (tmp_path / "there").read_text() == "mine"
    for kind, is_file in (("aside", True), ("aside2", False)):  # what has come to exist while it was written
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "x").write_text("x")
        with pytest.raises(Refused, match="meanwhile"):
            _publish(tmp_path / kind, tmp_path / "there", is_file)
        shutil.rmtree(tmp_path / kind)
    assert (tmp_path / "there").read_text() == "mine"
    path = next(run.glob("steps/*/*/__0_0.distcp"))
    data = bytearray(path.read_bytes())
    for at in range(600, len(data), 50):
        data[at] ^= 1
    path.write_bytes(data)
    assert cli.run(["export", str(run), str(tmp_path / "out"), "--to", "dcp"]) == 1
    assert {p.name for p in tmp_path.iterdir()} == {"run", "there"}


# --- code in a step of ours -----------------------------------------------------------------------------------


def test_a_value_that_runs_code_is_refused_by_resume_and_by_plain_dcp_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose every digest is right: what an attacker who can write to the store makes."""
    run, job = tmp_path / "run", Job(1)
    state = ckpt.State(model=job.model, note="harmless")
    stage = planner.Snapshot._stage
    with monkeypatch.context() as patch:
        patch.setattr(writer, "_harmless", lambda item, value: value)
        patch.setattr(planner.Snapshot, "_stage",
                      lambda self, item: frame(Runs()) if item.index.fqn == "note" else stage(self, item))  # fmt: skip
        with ckpt.open(run) as checkpoints:
            checkpoints.resume(state)
            checkpoints.save(1, state).wait()
    assert cli.run(["validate", str(run), "--level", "full"]) == 0
    with ckpt.open(run) as checkpoints, pytest.raises(Unsafe, match="system"):
        checkpoints.resume(state)
    folder = str(next(run.glob("steps/*/*")))
    with pytest.raises(BaseException, match="allow-list"):  # DCP's own planner unpickles what it is given
        dcp.load({"note": None}, storage_reader=ckpt.ObjectReader(folder), no_dist=True)
    assert cli.run(["export", str(run), str(tmp_path / "out"), "--to", "torch"]) == 1
    assert not os.path.exists(CANARY)


def test_a_value_that_no_load_would_take_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(BaseException, match=r"'x' asks for 'pathlib.PosixPath'"):
        dcp.save({"x": Path("a")}, storage_writer=ckpt.ObjectWriter(str(tmp_path / "out")), no_dist=True)


# --- memory ---------------------------------------------------------------------------------------------------


def test_memory_is_bounded_by_pieces_not_by_tensors(tmp_path: Path) -> None:
    """With pieces of 2 MiB, a tensor of 40 MiB takes little more than one of 1 MiB (tests/bench/moving_memory.py)."""
    code = (
        "import resource, sys\n"
        "from ckpt import cli\n"
        "from ckpt.foreign import adopt, pieces\n"
        "adopt.PIECE_BYTES = pieces.PIECE_BYTES = 2 << 20\n"
        "adopt.GROUP_BYTES = 4 << 20\n"
        "for folder in sys.argv[1:]:\n"
        "    assert cli.run(['adopt', folder, folder + '-run']) == 0\n"
        "    assert cli.run(['export', folder + '-run', folder + '.pt', '--to', 'torch']) == 0\n"
        "    assert cli.run(['export', folder + '-run', folder + '-st', '--to', 'safetensors']) == 0\n"
        "    sys.stderr.write(f'{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}\\n')\n"
    )
    sizes = {"small": 1, "large": 40}
    for name, mib in sizes.items():
        dcp.save({"w": torch.zeros(mib, 1 << 18)}, checkpoint_id=tmp_path / name, no_dist=True)
    folders = [str(tmp_path / name) for name in sizes]
    done = subprocess.run(
        [sys.executable, "-c", code, *folders], check=True, capture_output=True, text=True, timeout=120
    )
    small, large = map(int, done.stderr.split())
    assert (large - small) / 1024 < 30, done.stderr
