"""300 random single-bit flips over the data objects of a step: every one refused and named; plain DCP beside it."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt
from ckpt.errors import Damaged
from tests.damage.flips import Campaign, flip, save_steps
from tests.dist import gpt
from tests.ranks import run_ranks

FLIPS = 300


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flips") / "run"
    run_ranks(2, save_steps, str(folder))
    return folder


@pytest.fixture
def run(run_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_folder, tmp_path / "run"))


def fresh_state() -> tuple[gpt.Gpt, torch.optim.Optimizer, ckpt.State]:
    model, optim, sched = gpt.build(None, seed=7)
    return model, optim, ckpt.State(model=model, optim=optim, sched=sched)


def random_flips(folder: Path, n: int, seed: int) -> list[tuple[Path, int]]:
    objects = sorted(folder.glob("*.distcp"))
    sizes = [p.stat().st_size for p in objects]
    rng = random.Random(seed)
    return [(p, rng.randrange(p.stat().st_size * 8)) for p in rng.choices(objects, sizes, k=n)]


def test_every_flip_is_refused_and_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder,) = (run / "steps" / f"{2:012d}").iterdir()
    _, _, state = fresh_state()
    refused = 0
    for path, bit in random_flips(folder, FLIPS, seed=1):
        flip(path, bit)
        with pytest.raises(Damaged) as caught:
            ckpt.open(str(run)).load(state, step=2)
        flip(path, bit)
        facts = dict(caught.value.facts)
        assert facts["object"].endswith(path.name)
        assert facts["written by"] == f"rank {path.name.split('_')[2]}"
        assert facts["item"].split(",")[0].startswith(("model.", "optim.", "sched", "rng."))
        refused += 1
    ckpt.open(str(run)).load(state, step=2)  # undone flips leave a good step
    silent = plain_dcp_silent_loads(run.parent / "plain", FLIPS)
    with capsys.disabled():
        print(f"\n{FLIPS} single-bit flips: torchrelay refused {refused}; plain DCP loaded {silent} silently")
    assert refused == FLIPS
    assert silent > FLIPS // 2, "plain DCP notices flips now: say so in the README"


def plain_dcp_silent_loads(folder: Path, n: int) -> int:
    """The same campaign on a checkpoint that plain DCP wrote: how many flipped steps load with changed values."""
    model, optim, sched = gpt.build(None, seed=1)
    gpt.train(model, optim, sched, 1)
    saved = model.state_dict()
    silent = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns about a missing process group
        dcp.save({"model": saved}, checkpoint_id=folder)
        for path, bit in random_flips(folder, n, seed=2):
            flip(path, bit)
            target = {"model": {k: torch.zeros_like(v) for k, v in saved.items()}}
            try:
                dcp.load(target, checkpoint_id=folder)
                silent += 1
            except BaseException as e:  # CheckpointException is no Exception
                if isinstance(e, (KeyboardInterrupt, SystemExit)):
                    raise
            flip(path, bit)
    return silent


def test_a_flip_in_any_object_is_named_and_the_older_step_resumed(tmp_path: Path) -> None:
    """A sample of ``python -m tests.soak.flips``, which plays 10,000."""
    campaign = Campaign(tmp_path)
    played = [campaign.play(seed) for seed in range(100)]
    assert not [o for o in played if o.verdict != "named"]
    assert {o.object.partition("/")[0] for o in played} > {"commit record", "manifest.json", ".metadata", "index"}


def test_resume_falls_back_on_proven_damage_and_says_so(run: Path) -> None:
    (folder,) = (run / "steps" / f"{2:012d}").iterdir()
    flip(folder / "__1_0.distcp", 8 * 2000)
    _, _, state = fresh_state()
    store = ckpt.open(str(run))
    got = store.resume(state)
    assert got.step == 1
    ((attempt, why),) = got.skipped
    assert attempt.startswith(f"{2:012d}-")
    assert "__1_0.distcp" in why
    assert list((run / "quarantine").glob("*.json"))
    assert ckpt.open(str(run)).newest_valid() == got.attempt


def test_no_step_left_is_an_error_not_a_fresh_start(run: Path) -> None:
    for folder in (run / "steps").glob("*/*"):
        (folder / "__0_0.distcp").unlink()
    _, _, state = fresh_state()
    with pytest.raises(ckpt.CkptError, match="not starting from zero") as caught:
        ckpt.open(str(run)).resume(state)
    assert caught.value.exit_status == 4


def test_transient_fault_on_the_way_is_no_damage(run: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Wrong bytes once and right bytes when read again: a warning, and the step is used."""
    store = ckpt.open(str(run))
    real, seen = type(store.store).get_ranges, []

    def once_wrong(self: Any, key: str, ranges: Any) -> Any:
        out = real(self, key, ranges)
        if not seen and len(out[0]):
            seen.append(key)
            out = [bytes([out[0][0] ^ 1]) + bytes(out[0][1:]), *out[1:]]
        return out

    monkeypatch.setattr(type(store.store), "get_ranges", once_wrong)
    _, _, state = fresh_state()
    assert store.load(state).step == 2
    assert seen
    assert "right when read again" in caplog.text


@pytest.mark.parametrize("name", ["manifest.json", "commits/"])
def test_a_record_that_was_wrong_once_is_no_damage(run: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    store = ckpt.open(str(run))
    real, seen = type(store.store).get, []

    def once_wrong(self: Any, key: str, **options: Any) -> bytes:
        data = real(self, key, **options)
        if name in key and not seen:
            seen.append(key)
            return data.replace(b'"', b"'", 1)
        return data

    monkeypatch.setattr(type(store.store), "get", once_wrong)
    _, _, state = fresh_state()
    assert store.resume(state).step == 2
    assert seen
    assert not list(run.glob("quarantine/*"))
