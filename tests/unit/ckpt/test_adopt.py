"""adopt: what goes where, what is refused, what is left behind; the CRC-32 of plain DCP."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader

import ckpt
import elastic
from ckpt import catalog, cli
from ckpt.errors import Damaged, Mismatch, Refused, Superseded
from ckpt.foreign.adopt import adopt
from ckpt.foreign.plain import PlainDcp, check_item
from ckpt.foreign.source import Names, Tensor
from ckpt.format.manifest import dump, load_claim
from ckpt.store import open_store
from tests.corpus.foreign import frame
from tests.unit.ckpt.moving import Job, same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return Job(1).save_plain(tmp_path / "plain")


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- in -------------------------------------------------------------------------------------------------------


def test_a_plain_dcp_job_goes_on_under_a_run_as_if_nothing_had_happened(plain: Path, tmp_path: Path) -> None:
    before = files_of(plain)
    assert cli.run(["adopt", str(plain), str(tmp_path / "run"), "--step", "7", "--only", "[mos][opc]*"]) == 0
    assert files_of(plain) == before
    old, new = Job(1), Job(2)
    with ckpt.open(tmp_path / "run") as run:
        resumed = run.resume(new.state())
        assert (resumed.step, resumed.rng, resumed.absent) == (7, "not in the step", ())
        assert "tensors proven" in resumed.proof
        for job in (old, new):
            job.step()
        assert same(old.model.state_dict(), new.model.state_dict())
        assert same(old.optim.state_dict(), new.optim.state_dict())
        assert same(old.sched.state_dict(), new.sched.state_dict())
        run.save(8, new.state()).wait()
    assert cli.run(["validate", str(tmp_path / "run"), "--all", "--level", "full"]) == 0


def test_what_an_adopted_step_lacks_is_left_as_it_was_built_and_named(plain: Path, tmp_path: Path) -> None:
    run, job = tmp_path / "run", Job(2)
    assert cli.run(["adopt", str(plain), str(run), "--only", "model.*"]) == 0
    optim = [v.clone() for s in job.optim.state.values() for v in s.values()]
    with ckpt.open(run) as checkpoints:
        resumed = checkpoints.resume(job.state(note={"x": 1}))
        assert resumed.absent == ("optim", "sched", "note")
        assert "not in the step, left as they were built: optim, sched, note" in str(resumed)
        assert same(job.model.state_dict(), Job(1).model.state_dict())
        assert same(optim, [v for s in job.optim.state.values() for v in s.values()])
        checkpoints.save(1, job.state(note={"x": 1})).wait()
    with ckpt.open(run) as checkpoints, pytest.raises(Mismatch, match="missing"):  # of a step of ours all is asked for
        checkpoints.resume(job.state(other=1))


def test_a_module_is_never_left_out_and_unknown_names_are_named(plain: Path, tmp_path: Path) -> None:
    run, job = tmp_path / "run", Job(2)
    assert cli.run(["adopt", str(plain), str(run), "--only", "model.*", "--rename", "model.=net."]) == 0
    with ckpt.open(run) as checkpoints, pytest.raises(Mismatch) as caught:
        checkpoints.resume(job.state())
    said = str(caught.value)
    assert "missing     model.0.weight" in said
    assert "unexpected  net.0.weight" in said
    with ckpt.open(run) as checkpoints:
        assert checkpoints.resume(ckpt.State(net=job.model)).step == 0


def test_newer_steps_are_not_buried(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    assert cli.run(["adopt", str(plain), run, "--step", "5"]) == 0
    before = files_of(Path(run))
    for words, text in (([], "--step 6"), (["--step", "5"], "step 5 already"), (["--step", "4"], "step 5 already")):
        capsys.readouterr()
        assert cli.run(["adopt", str(plain), run, *words]) == 2
        assert text in capsys.readouterr().err
    assert files_of(Path(run)) == before
    assert cli.run(["adopt", str(plain), run, "--step", "6"]) == 0
    os.truncate(next(Path(run).glob("steps/000000000006/*/__0_0.distcp")), 5)
    assert cli.run(["adopt", str(plain), run, "--step", "7"]) == 2
    assert "step 6" in capsys.readouterr().err


def claim_by(run: Path, host: str, pid: int) -> None:
    epoch = catalog.claim(open_store(str(run)), world_size=1)
    path = run / epoch.claim_key
    path.write_bytes(dump("claim", replace(load_claim(path.read_bytes(), ""), host=host, pid=pid)))


def test_a_run_that_may_be_alive_is_taken_over_only_when_asked(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for host, pid, alive in (
            ("another", 1, True), (socket.gethostname(), other.pid, True), (socket.gethostname(), 1 << 22, False)
        ):  # fmt: skip
            claim_by(run, host, pid)
            assert cli.run(["adopt", str(plain), str(run)]) == (2 if alive else 0)
            assert ("--takeover supersedes it" in capsys.readouterr().err) == alive
        claim_by(run, "another", 1)
        with pytest.raises(Refused, match="may still be writing"):
            adopt(PlainDcp(open_store(str(plain))), open_store(str(run)), step=1, names=Names(), takeover=False,
                  advance=lambda n: None)  # fmt: skip
        assert cli.run(["adopt", str(plain), str(run), "--step", "1", "--takeover"]) == 0
    finally:
        other.communicate(b"\n")


def test_a_job_that_was_taken_over_cannot_commit_and_a_start_in_between_wins(plain: Path, tmp_path: Path) -> None:
    run, job = tmp_path / "run", Job(2)
    checkpoints = ckpt.open(run)
    checkpoints.resume(job.state())
    assert cli.run(["adopt", str(plain), str(run)]) == 0
    with pytest.raises(Superseded):
        checkpoints.save(1, job.state()).wait()
    store = open_store(str(run))

    def overtaken(n: int) -> None:
        if len(catalog.Catalog(store).listing().epochs) == 3:
            catalog.claim(store, world_size=1)

    with pytest.raises(Superseded):
        adopt(PlainDcp(open_store(str(plain))), store, step=9, names=Names(), takeover=True, advance=overtaken)
    assert catalog.Catalog(store).newest_valid().step == 0  # type: ignore[union-attr]


def spoil(plain: Path) -> None:
    """Flip one bit of a weight."""
    data = bytearray((plain / "__0_0.distcp").read_bytes())
    data[data.index(Job(1).model[2].bias.detach().numpy().tobytes())] ^= 1
    (plain / "__0_0.distcp").write_bytes(data)


def test_a_damaged_source_is_refused_before_anything_is_claimed(plain: Path, tmp_path: Path) -> None:
    spoil(plain)
    assert cli.run(["adopt", str(plain), str(tmp_path / "run")]) == 1
    assert cli.run(["export", str(plain), str(tmp_path / "out"), "--to", "torch"]) == 1
    assert {p.name for p in tmp_path.iterdir()} == {"plain"}


def test_a_source_that_changes_while_it_is_read_is_not_committed(plain: Path, tmp_path: Path) -> None:
    source, store = PlainDcp(open_store(str(plain))), open_store(str(tmp_path / "run"))
    reads = 0

    def change(n: int) -> None:
        nonlocal reads
        reads += 1
        if reads == len(source.tensors) + 1:  # all is written, and is being compared
            spoil(plain)

    with pytest.raises(Damaged, match="not what was read before"):
        adopt(source, store, step=1, names=Names(), takeover=False, advance=change)
    assert catalog.Catalog(store).newest_valid() is None
    assert not catalog.Catalog(store).listing().with_base  # so that readers do not follow it


def test_a_run_loop_goes_on_from_an_adopted_step(tmp_path: Path) -> None:
    job = Job(1)
    dcp.save({"model": job.model.state_dict()}, checkpoint_id=tmp_path / "plain", no_dist=True)
    assert cli.run(["adopt", str(tmp_path / "plain"), str(tmp_path / "run"), "--step", "5"]) == 0
    data = [torch.ones(4)] * 20
    loader = DataLoader(data, batch_sampler=elastic.ElasticSampler(data, 2, seed=1))  # type: ignore[arg-type]
    with elastic.Run(tmp_path / "run", Job(2).state(data=loader), every=2) as run:
        assert run.resumed.absent == ("optim", "sched", "data")
        assert [step.number for step in run.steps(until=8)] == [5, 6, 7]
    assert cli.run(["validate", f"{tmp_path}/run@8", "--level", "full"]) == 0


def test_renaming_and_choosing() -> None:
    class Source:
        where, kind, proof, paths = "x", "", "", {"a.b.c": ("a", "b.c"), "v": ("v",)}
        tensors, values = {"a.b.c": None, "d": None}, ("v",)

    source: Any = Source()
    assert Names(("a.*",), (("a.", "model."),)).choose(source) == {"a.b.c": "model.b.c"}
    assert Names((), (("", "model."),)).choose(source) == {k: f"model.{k}" for k in ("a.b.c", "d", "v")}
    assert Names().path(source, "a.b.c", "model.b.c") == ("model", "b.c")
    assert Names().path(source, "a.b.c", "b.c") == ("b.c",)
    assert Names().path(source, "a.b.c", "other") == ("other",)
    for names, text in (
        (Names(("q*",)), "no entry"), (Names((), (("d", ""),)), "no name left"),
        (Names((), (("d", "v"),)), "both be called 'v'"), (Names((), (("q.", ""),)), "no name begins"),
    ):  # fmt: skip
        with pytest.raises(Refused, match=text):
            names.choose(source)


# --- CRC ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "every"), [({"a": "text"}, 1), (torch.arange(6.0).view(2, 3), 5)], ids=["value", "tensor"]
)
def test_every_flipped_bit_of_an_item_is_found_or_changes_nothing(value: Any, every: int) -> None:
    """Also what lies outside the checksums: headers, directory, padding. torch is the judge of what changed."""
    clean, judged = frame(value), {True: 0, False: 0}
    want = Tensor("float32", (2, 3)) if isinstance(value, torch.Tensor) else None
    for n in range(0, 8 * len(clean), every):
        data = bytearray(clean)
        data[n // 8] ^= 1 << n % 8
        faults, has_crc = check_item(lambda lo, hi, d=data: bytes(d[lo:hi]), ("x", 0, len(data)), "x", want)
        judged[bool(faults)] += 1
        assert has_crc
        assert faults or same(torch.load(io.BytesIO(data), weights_only=True), value), n
    assert min(judged.values()) > 800
