"""Where a run begins: zero, an older step, the weights of another run; and that a restart does none of it again."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt
from ckpt import cli
from ckpt.errors import Damaged, Mismatch, NotFound, Refused
from elastic import Run
from elastic.ledger.events import Resumed
from tests.dist.launch import ROOT
from tests.unit.elastic.test_run import Training, at, committed, crash, events


def saved_up_to(folder: Path, until: int = 9) -> Training:
    training = Training(folder)
    training.train(until)
    return training


def test_rolling_back_trains_again_from_there(tmp_path: Path) -> None:
    first = saved_up_to(tmp_path)
    again = Training(tmp_path)
    run = again.train(9, start=3)
    assert (run.resumed.step, run.resumed.rolled_back, run.resumed.rng) == (3, 9, "restored")
    assert "rolled back as asked: steps after it, up to 9" in str(run.resumed)
    assert ", 1 rank, random streams restored" in str(run.resumed)
    assert str(first.last.resumed) == "fresh run on 1 rank"
    assert again.trained == first.trained[3:]
    told = [e.data for e in events(tmp_path) if isinstance(e.data, Resumed)]
    assert [(r.rolled_back, r.skip) for r in told] == [(None, 0), (9, 0)]


def test_a_start_at_the_newest_step_rolls_nothing_back(tmp_path: Path) -> None:
    saved_up_to(tmp_path)
    resumed = Training(tmp_path).train(10, start=9).resumed
    assert (resumed.step, resumed.rolled_back) == (9, None)


def test_what_was_saved_after_the_step_counts_no_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved_up_to(tmp_path)
    with pytest.raises(ZeroDivisionError):
        Training(tmp_path).train(9, at(4, crash), start=3)
    assert Training(tmp_path).train(9).resumed.step == 3
    assert [int(p.name[7:12]) for p in sorted((tmp_path / "steps").iterdir())] == [3, 6, 9]
    assert cli.run(["ls", str(tmp_path), "--all", "--json"]) == 0
    rows = [(r["step"], r["state"], r["notes"]) for r in json.loads(capsys.readouterr().out)["rows"]]
    back = ("unknown", ["rolled back from: never chosen"])
    assert sorted(r for r in rows if r[1] == "unknown") == [(6, *back), (9, *back)]
    assert sorted(r[0] for r in rows if r[1] == "committed") == [3, 6, 9]


def test_skipping_leaves_out_batches_and_nothing_else(tmp_path: Path) -> None:
    first = saved_up_to(tmp_path)
    again = Training(tmp_path)
    again.train(6, start=3, skip=2)
    assert [n for n, _, _ in again.trained] == [3, 4, 5]
    assert [ids for _, ids, _ in again.trained] == [ids for _, ids, _ in first.trained[5:8]]


def test_a_restart_goes_on_from_what_was_saved_since(tmp_path: Path) -> None:
    saved_up_to(tmp_path)
    whole = Training(tmp_path / "whole")
    whole.train(9)
    undisturbed = Training(tmp_path / "whole")
    undisturbed.train(9, start=3, skip=1)
    crashed = Training(tmp_path)
    with pytest.raises(ZeroDivisionError):
        crashed.train(9, at(4, crash), start=3, skip=1)  # nothing saved yet: the skip has to be done again
    early = Training(tmp_path)
    with pytest.raises(ZeroDivisionError):
        early.train(9, at(7, crash), start=3, skip=1)
    late = Training(tmp_path)
    late.train(9, start=3, skip=1)
    assert [t.last.resumed.step for t in (crashed, early, late)] == [3, 3, 6]
    assert crashed.trained == undisturbed.trained[:2]
    assert early.trained == undisturbed.trained[:5]
    assert late.trained == undisturbed.trained[3:]


def test_another_wish_is_no_restart(tmp_path: Path) -> None:
    saved_up_to(tmp_path)
    assert Training(tmp_path).train(9, start=6).resumed.step == 6
    assert Training(tmp_path).train(9, start=6).resumed.step == 9
    assert Training(tmp_path).train(9, start=6, skip=1).resumed.step == 6
    assert Training(tmp_path).train(9).resumed.step == 9
    assert Training(tmp_path).train(9, start=6, skip=1).resumed.step == 6  # asked for by a new job


def test_a_step_that_is_not_there_is_refused_before_anything_is_claimed(tmp_path: Path) -> None:
    saved_up_to(tmp_path)
    before = sorted((tmp_path / "epochs").iterdir())
    with pytest.raises(NotFound, match="step 4 is not a usable step") as caught:
        Training(tmp_path).train(9, start=4)
    assert ("usable steps", "9, 6, 3") in caught.value.facts
    assert sorted((tmp_path / "epochs").iterdir()) == before


def test_a_damaged_step_that_was_asked_for_is_an_error_and_no_other_is_taken(tmp_path: Path) -> None:
    saved_up_to(tmp_path)
    (data,) = (tmp_path / "steps" / f"{6:012d}").glob("*/__0_0.distcp")
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with pytest.raises(Damaged, match="stored bytes differ"):
        Training(tmp_path).train(9, start=6)
    assert Training(tmp_path).train(9).resumed.step == 9  # the line is what it was
    assert not (tmp_path / "quarantine").exists()


def test_fresh_is_done_once_for_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = saved_up_to(tmp_path, 6)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    with pytest.raises(ZeroDivisionError):
        Training(tmp_path).train(9, at(1, crash), fresh=True)
    early = Training(tmp_path)
    with pytest.raises(ZeroDivisionError):
        early.train(9, at(4, crash), fresh=True)  # its first start saved nothing: from zero again, not from step 6
    assert early.trained == first.trained[:5]
    late = Training(tmp_path)
    assert late.train(6, fresh=True).resumed.step == 3
    assert late.trained == first.trained[3:]
    assert Training(tmp_path).train(6).resumed.step == 6
    monkeypatch.setenv("SLURM_JOB_ID", "43")
    assert Training(tmp_path).train(3, fresh=True).resumed.attempt is None


@pytest.mark.parametrize("job", [{}, {"SLURM_JOB_ID": "42", "SLURM_JOB_NAME": "interactive"}])
def test_without_a_name_of_the_job_each_start_is_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: dict[str, str]
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        assert Training(tmp_path).train(3, fresh=True).resumed.attempt is None


def test_warm_start_takes_weights_and_nothing_else(tmp_path: Path) -> None:
    other = Training(tmp_path / "other", seed=5)
    other.train(6)
    warm, cold = Training(tmp_path / "new"), Training(tmp_path / "cold")
    with warm.run(warm_start=str(tmp_path / "other")) as run:
        assert run.resumed.attempt is None
        assert all(torch.equal(a, b) for a, b in zip(warm.model.parameters(), other.model.parameters(), strict=True))
        assert not warm.optim.state
        assert warm.loader.batch_sampler.position == 0  # type: ignore[union-attr]
        for number, batch in run.steps(until=3):
            warm.step(number, batch)
    cold.train(3)
    assert [ids for _, ids, _ in warm.trained] == [ids for _, ids, _ in cold.trained]
    (told,) = [e.data for e in events(tmp_path / "new") if isinstance(e.data, Resumed)]
    assert told.warm == f"{tmp_path / 'other'}, step 6 (4 tensors proven)"
    again = Training(tmp_path / "new")
    again.train(4, warm_start=str(tmp_path / "other"))  # a restart resumes its own
    assert again.last.resumed.step == 3
    assert sorted(p.name for p in (tmp_path / "other" / "epochs").iterdir()) == ["00000001.base.json", "00000001.json"]


def test_warm_start_does_not_move_the_random_streams(tmp_path: Path) -> None:
    other = Training(tmp_path / "other", seed=5)
    other.train(6)
    warm, plain = Training(tmp_path / "new"), Training(tmp_path / "plain")
    draws = []
    for training, settings in ((warm, {"warm_start": str(tmp_path / "other")}), (plain, {})):
        torch.manual_seed(3)
        with training.run(**settings):
            draws.append(torch.rand(4))
    assert torch.equal(draws[0], draws[1])


def test_warm_start_from_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    Training(tmp_path / "other").train(3)
    url = str(tmp_path / "other")
    with pytest.raises(Mismatch, match="6 of 6 entries do not fit") as caught:
        Run(str(tmp_path / "new"), ckpt.State(model=nn.Linear(4, 2)), warm_start=url).__enter__()
    assert any("model.weight" in text for _, text in caught.value.facts)
    with pytest.raises(Mismatch) as caught:
        Run(str(tmp_path / "new"), ckpt.State(net=nn.Linear(4, 2), m=nn.Linear(1, 1)), warm_start=url).__enter__()
    assert caught.value.message.startswith(f"warm start from {url}, step 3: 4 of 4 entries do not fit")
    assert caught.value.facts[:2] == [("in the step", "model"), ("in the State", "net, m")]
    assert "or start a new run URL" not in str(caught.value)


def test_the_way_to_a_part_of_other_weights_that_a_refusal_names(tmp_path: Path) -> None:
    url, new = str(tmp_path / "other"), str(tmp_path / "backbone")
    model = nn.ModuleDict({"body": nn.Linear(4, 2), "head": nn.Linear(2, 1)})
    with Run(url, ckpt.State(model=model), every=1) as run:
        for _ in run.steps(until=1):
            pass
    tuned = nn.ModuleDict({"body": nn.Linear(4, 2), "head": nn.Linear(2, 5)})
    state = ckpt.State(model=tuned)
    with pytest.raises(Mismatch) as caught:
        Run(str(tmp_path / "new"), state, warm_start=url).__enter__()
    for said in (f"ckpt export {url}@1 OUT --to safetensors --only 'OLD.*'", "ckpt adopt OUT NEW_URL --rename OLD=NEW",
                 "init=lambda: ckpt.open(NEW_URL).load(ckpt.State(backbone=model.backbone), part=True)"):  # fmt: skip
        assert said in (caught.value.hint or "")
    out = str(tmp_path / "out")
    assert (
        cli.run(["export", f"{url}@1", out, "--to", "safetensors", "--only", "model.body.*", "--strip", "model."]) == 0
    )
    assert cli.run(["adopt", out, new, "--rename", "body.=backbone."]) == 0

    def init() -> object:
        return ckpt.open(new).load(ckpt.State(backbone=tuned["body"]), part=True)

    head = tuned["head"].weight.clone()
    with Run(str(tmp_path / "new"), state, init=init):
        assert torch.equal(tuned["body"].weight, model["body"].weight)
        assert torch.equal(tuned["head"].weight, head)


def test_warm_start_from_nothing_is_an_error(tmp_path: Path) -> None:
    url = str(tmp_path / "nothing")
    with pytest.raises(NotFound) as caught:
        Training(tmp_path / "new").train(2, warm_start=url)
    assert caught.value.message == f"warm_start={url}: no run and no committed step there"
    assert caught.value.hint == f"check the URL   |   ckpt ls {url}"


class Rotary(nn.Module):
    """With a buffer that is in no checkpoint."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("angles", torch.arange(2.0), persistent=persistent)
        self.calls = 0

    def fill(self) -> None:
        self.calls += 1
        nn.init.constant_(self.linear.weight, 0.25)
        nn.init.zeros_(self.linear.bias)
        self.get_buffer("angles").copy_(torch.arange(2.0))


def empty(persistent: bool) -> Rotary:
    with torch.device("meta"):
        model = Rotary(persistent)
    return model.to_empty(device="cpu")


def train_empty(folder: Path, model: Rotary, until: int) -> Run:
    with Run(str(folder), ckpt.State(model=model), every=100, init=model.fill) as run:
        for _ in run.steps(until=until):
            with torch.no_grad():
                model.linear.weight += 1
    return run


@pytest.mark.parametrize("persistent", [True, False])
def test_init_fills_what_no_step_holds(tmp_path: Path, persistent: bool) -> None:
    first = empty(persistent)
    train_empty(tmp_path, first, 2)
    assert first.calls == 1
    again = empty(persistent)
    again.angles.fill_(float("nan"))  # type: ignore[operator]
    run = train_empty(tmp_path, again, 3)
    assert run.resumed.step == 2
    assert again.calls == (0 if persistent else 1)
    assert torch.equal(again.linear.weight, torch.full((2, 2), 3.25))
    assert torch.equal(again.angles, torch.arange(2.0))  # type: ignore[arg-type]


def test_a_model_without_memory_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Rotary(True)
    with pytest.raises(Refused, match="3 of 3 tensors of model have no memory") as caught:
        Run(str(tmp_path), ckpt.State(model=model)).__enter__()
    assert "model.to_empty(device=" in (caught.value.hint or "")
    assert not tmp_path.joinpath("epochs").exists()


def test_what_is_skipped_needs_a_step_to_go_back_to(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="skip=5 needs start=STEP: it leaves out the 5 batches after that step"):
        Training(tmp_path).train(2, skip=5)


@pytest.mark.parametrize(
    "wish", [{"skip": 2}, {"start": 3, "skip": -1}, {"start": 3, "fresh": True}, {"start": 3, "warm_start": "x"}]
)
def test_wishes_that_contradict_each_other_are_refused(tmp_path: Path, wish: dict[str, object]) -> None:
    with pytest.raises(Refused):
        Training(tmp_path).train(2, **wish)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.dist.launch import ROOT
from tests.unit.elastic.test_run import Training
folder = Path(sys.argv[1])
with Training(folder).run() as run:
    for number, _ in run.steps(until=9):
        if number == 4:
            while not list((folder / "commits").glob("*.json")):
                pass
            os.kill(os.getpid(), signal.SIGTERM)
            while not any("stop_requested" in p.read_text() for p in (folder / "ledger").glob("*.jsonl")):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_missed_notices_are_told_at_the_next_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    with caplog.at_level(logging.WARNING, "elastic"):
        Training(tmp_path).train(9)
    assert "stop notices missed after step 3: 1" in caplog.text
    assert committed(tmp_path) == [3, 6, 9]


STOPPED = """
import sys
import elastic
from tests.unit.elastic.test_run import Training
Training(sys.argv[1]).train(9, stop_on=[elastic.StopFile(sys.argv[2])])
"""


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_stop_that_still_holds_ends_an_agents_restart_in_one_line(tmp_path: Path, restarts: int) -> None:
    (tmp_path / "stop").touch()
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, str(tmp_path / "run"), str(tmp_path / "stop")], cwd=ROOT, timeout=120,
        env={**os.environ, "TORCHELASTIC_RESTART_COUNT": str(restarts)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == (75 if restarts else 1), done.stderr
    assert ("Traceback" in done.stderr) == (restarts == 0)
    assert f"the stop file {tmp_path / 'stop'} is there already" in done.stderr
    assert not (tmp_path / "run" / "epochs").exists()  # nothing was loaded for it
