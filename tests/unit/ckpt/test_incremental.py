"""Incremental saves: what is referred to and what is written, what retention leaves, what damage does."""

from __future__ import annotations

import json
import shutil
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt
from ckpt import cli
from ckpt.catalog import Catalog
from ckpt.errors import Damaged, Refused, Unsupported
from ckpt.format import layout
from ckpt.format.manifest import load_manifest
from ckpt.store import open_store
from ckpt.tools.validate import validate


class Lora(nn.Module):
    """A frozen base with a small part that trains: 95 % of all bytes are frozen, the optimizer's state included."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(12)).requires_grad_(False)
        self.a, self.b = nn.Linear(256, 25, bias=False), nn.Linear(25, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.base:
            x = layer(x)
        return x + self.b(self.a(x))


def build(seed: int = 0) -> tuple[Lora, torch.optim.Optimizer, ckpt.State]:
    torch.manual_seed(seed)
    model = Lora()
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return model, optim, ckpt.State(model=model, optim=optim)


def train(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 256)).square().mean().backward()
    optim.step()
    optim.zero_grad()


def bits(model: nn.Module, optim: torch.optim.Optimizer) -> list[torch.Tensor]:
    held = [v for p in model.parameters() for v in optim.state.get(p, {}).values()]
    return [t.clone() for t in [*model.parameters(), *held]]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def folder_bytes(run: Path, step: int) -> int:
    return sum(p.stat().st_size for p in (run / f"steps/{step:012d}").rglob("*") if p.is_file())


def load(run: Path, step: int | None = None) -> list[torch.Tensor]:
    model, optim, state = build(9)
    train(model, optim)
    got = ckpt.open(run).load(state, step)
    assert "proven" in got.proof
    assert "not verified" not in got.proof
    return bits(model, optim)


def test_a_frozen_base_is_written_once_and_survives_the_deletion_of_its_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model, optim, state = build()
    with ckpt.open(run, incremental=True, keep=ckpt.Latest(1), grace_s=0.0) as store:
        store.resume(state)
        train(model, optim)
        first = store.save(1, state).wait()
        all_bytes = folder_bytes(run, 1)
        train(model, optim)
        second = store.save(2, state).wait()
        share = folder_bytes(run, 2) / all_bytes
        print(f"the second save: {share:.2%} of the first's {all_bytes} bytes; items {second.bytes} of {first.bytes}")
        frozen = sum(p.nbytes for p in model.base.parameters()) / sum(t.nbytes for t in bits(model, optim))
        assert 0.95 < frozen < 0.96
        assert share <= 0.06
        assert not list((run / "commits").glob("000000000001-*")), "the policy has retired the first step"
        want = bits(model, optim)
        assert same(load(run), want)
        train(model, optim)
        store.save(3, state).wait()
    manifest = load_manifest(next((run / "steps/000000000003").glob("*/manifest.json")).read_bytes(), "x")
    assert manifest.references == (first.attempt,), "no chain: it refers to where the bytes are"
    assert manifest.requires == ("references",)
    assert not (run / "steps/000000000002").exists(), "nobody refers to the second step"
    assert same(load(run), bits(model, optim))
    # a start that is not incremental writes all again, and then nobody needs the first step any more
    with ckpt.open(run, keep=ckpt.Latest(1), grace_s=0.0) as store:
        store.resume(state)
        assert store.save(4, state).wait().bytes > 0.9 * first.bytes
    assert [p.name for p in (run / "steps").iterdir()] == ["000000000004"]
    assert not list(run.glob("retire/*"))


def test_a_start_refers_to_the_step_that_it_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model, optim, state = build()
    with ckpt.open(run) as store:
        store.resume(state)
        train(model, optim)
        whole = store.save(1, state).wait()
    model, optim, state = build(5)
    with ckpt.open(run, incremental=True) as store:
        store.resume(state)
        train(model, optim)
        assert store.save(2, state).wait().bytes < 0.25 * whole.bytes
    assert same(load(run, 2), bits(model, optim))


def test_a_frozen_tensor_that_changes_is_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model, optim, state = build()
    with ckpt.open(run, incremental=True) as store:
        store.resume(state)
        store.save(1, state).wait()
        with torch.no_grad():
            model.base[3].weight.view(torch.int32)[7, 7] ^= 1
        store.save(2, state).wait()
    manifest = load_manifest(next((run / "steps/000000000002").glob("*/manifest.json")).read_bytes(), "x")
    (own,) = [o for o in manifest.objects if o.name == "__0_0.distcp"]
    assert own.bytes > 256 * 256 * 4, "the tensor, and what is small"
    assert same(load(run, 2), bits(model, optim))
    assert not same(load(run, 1), bits(model, optim))


def test_little_that_is_unchanged_does_not_keep_a_large_object(tmp_path: Path) -> None:
    run = tmp_path / "run"
    state = ckpt.State(model=nn.ParameterDict({"large": torch.zeros(10_000), "small": torch.zeros(10)}))
    with ckpt.open(run, incremental=True) as store:
        store.resume(state)
        store.save(1, state).wait()
        state["model"]["large"].data += 1
        store.save(2, state).wait()
    assert load_manifest(next((run / "steps/000000000002").glob("*/manifest.json")).read_bytes(), "x").references == ()


def two_steps(run: Path) -> tuple[Path, Path]:
    model, optim, state = build()
    with ckpt.open(run, incremental=True) as store:
        store.resume(state)
        for step in (1, 2):
            train(model, optim)
            store.save(step, state).wait()
    first, second = sorted((run / "steps").glob("*/*"))
    return first, second


@pytest.mark.parametrize("how", ["flipped", "gone", "short"])
def test_damage_to_what_is_referred_to_is_found_in_every_step_that_refers(tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"
    first, second = two_steps(run)
    data = bytearray((first / "__0_0.distcp").read_bytes())
    if how == "gone":
        (first / "__0_0.distcp").unlink()
    else:
        data[100_000] ^= 4
        (first / "__0_0.distcp").write_bytes(data if how == "flipped" else data[:-1])
    _, _, state = build(3)
    with pytest.raises(Damaged, match="stored bytes differ" if how == "flipped" else "objects differ"):
        ckpt.open(run).load(state, 2)
    expected = None if how != "flipped" else "000000000002-e00000001-0"  # sizes say nothing of a flipped bit
    assert ckpt.open(run).newest_valid() == expected
    catalog = Catalog(open_store(run))
    attempt = max(catalog.listing().commits)
    report = validate(catalog.store, attempt.prefix, level="full", attempt=attempt)
    assert report.verdict == "bad"
    assert all(f.object.startswith("../../000000000001/e00000001-0/") for f in report.findings)
    assert second.exists()


def test_bytes_of_the_other_step_that_are_not_referred_to_do_no_harm(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, _ = two_steps(run)
    index = json.loads((first / "index/00000.json").read_bytes())
    row = next(dict(zip(index["fields"], i, strict=True)) for i in index["items"] if i[0] == "model.a.weight")
    data = bytearray((first / "__0_0.distcp").read_bytes())
    data[row["start"] + row["payload_start"]] ^= 1
    (first / "__0_0.distcp").write_bytes(data)
    load(run, 2)
    catalog = Catalog(open_store(run))
    attempt = max(catalog.listing().commits)
    for level in ("quick", "full", "load"):
        assert validate(catalog.store, attempt.prefix, level=level, attempt=attempt).verdict == "good"  # type: ignore[arg-type]


def test_the_tools_tell_of_references(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    _, _, state = build()
    with ckpt.open(run, incremental=True, keep=ckpt.Latest(2), grace_s=0.0) as store:
        store.resume(state)
        for step in (1, 2, 3):
            store.save(step, state).wait()

    def said(call: str) -> str:
        assert cli.run([w.replace("RUN", str(run)) for w in call.split()]) == 0
        return capsys.readouterr().out

    ls = said("ls RUN --all").splitlines()
    assert sum("refers to 1 older" in line for line in ls) == 2
    assert "retired: step 3 refers to its data" in "\n".join(ls)
    assert "refers to:   000000000001-e00000001-0" in said("inspect RUN@3")
    assert "../../000000000001/e00000001-0/__0_0.distcp" in said("inspect RUN@3 --objects")
    assert said("diff RUN@2 RUN@3").count("unchanged") == 1
    for level in ("quick", "full", "load"):
        assert said(f"validate RUN@3 --level {level}").startswith("good: step 3")
    assert "step 3 refers to its data" in said("prune RUN --keep latest:1 --grace 0s --apply")
    assert load(run)


def test_a_holder_in_quarantine_and_one_that_is_lost_are_not_referred_to(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model, optim, state = build()
    store = ckpt.open(run, incremental=True)
    store.resume(state)
    whole = store.save(1, state).wait().bytes
    assert store.save(2, state).wait().bytes < 0.1 * whole
    (run / "quarantine").mkdir(exist_ok=True)
    from ckpt import catalog

    (first,) = [a for a in Catalog(open_store(run)).listing().commits if a.step == 1]
    catalog.quarantine(open_store(run), first, "by hand", (), None)
    assert store.save(3, state).wait().bytes == whole
    next((run / "steps/000000000003").glob("*/__0_0.distcp")).unlink()
    with pytest.raises(Damaged, match="is missing"):
        store.save(4, state).wait()
    assert store.save(4, state).wait().bytes == whole, "the next one writes all"
    assert same(load(run, 4), bits(model, optim))


def test_what_a_retired_step_refers_to_stays_as_long_as_its_readers_may(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _, _, state = build()
    with ckpt.open(run, incremental=True, keep=ckpt.Latest(1), grace_s=0.0) as store:
        store.resume(state)
        for step in (1, 2):
            store.save(step, state).wait()
    time.sleep(0.6)
    with ckpt.open(run, keep=ckpt.Latest(1), grace_s=0.5) as store:
        store.resume(state)
        store.save(3, state).wait()
        assert [p.name[-1] for p in sorted((run / "steps").iterdir())] == ["1", "2", "3"]
        time.sleep(0.6)
        store.save(4, state).wait()
    assert [p.name[-1] for p in sorted((run / "steps").iterdir())] == ["3", "4"], "the third is in its time of grace"


def test_a_wrong_reference_would_show_in_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.engine.writer._Piece.is_same", lambda *_: True)
    model, optim, state = build()
    store = ckpt.open(tmp_path / "run", incremental=True)
    store.resume(state)
    store.save(1, state).wait()
    train(model, optim)
    with pytest.raises(Damaged, match="and yet differs"):
        store.save(2, state).wait()
    assert store.newest_valid() == "000000000001-e00000001-0"


def test_a_reader_without_references_refuses_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    _, second = two_steps(run)
    monkeypatch.setattr("ckpt.format.manifest.KNOWN_FEATURES", frozenset())
    _, _, state = build(3)
    with pytest.raises(Unsupported, match="references"):
        ckpt.open(run).load(state, 2)
    monkeypatch.undo()
    with pytest.raises(Refused, match="refers to objects of 1 other steps"):
        _ = ckpt.ObjectReader(str(second)).manifest


def test_plain_dcp_reads_it_in_place(tmp_path: Path) -> None:
    """On a file system the paths in ``.metadata`` lead to the other step; in a copy of the folder nothing is there."""
    import torch.distributed.checkpoint as dcp

    run = tmp_path / "run"
    _, second = two_steps(run)
    model, _, _ = build(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is one process
        dcp.load({"model": model.state_dict()}, storage_reader=dcp.FileSystemReader(second))
    want = load(run, 2)
    assert same([p.clone() for p in model.parameters()], want[: len(list(model.parameters()))])


def test_an_export_stands_alone(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    run = tmp_path / "run"
    two_steps(run)
    want = load(run, 2)
    assert cli.run(["export", f"{run}@2", str(tmp_path / "alone"), "--to", "dcp"]) == 0
    shutil.rmtree(run)
    model, _, _ = build(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is one process
        dcp.load({"model": model.state_dict()}, checkpoint_id=str(tmp_path / "alone"))
    assert same([p.clone() for p in model.parameters()], want[: len(list(model.parameters()))])


def test_names_of_references_are_paths_and_keys() -> None:
    attempt = layout.parse_attempt("000000000001-e00000003.0a0b0c0d-2")
    name = layout.reference_name(attempt, "__3_0.distcp")
    assert name == "../../000000000001/e00000003.0a0b0c0d-2/__3_0.distcp"
    assert layout.split_name(name) == (attempt, "__3_0.distcp")
    assert layout.object_key("steps/x/", name) == "steps/000000000001/e00000003.0a0b0c0d-2/__3_0.distcp"
    assert (layout.data_rank(name), layout.object_key("p/", "a")) == (3, "p/a")
    assert layout.index_rank(layout.reference_name(attempt, layout.index_name(7))) == 7
