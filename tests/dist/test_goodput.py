"""The account of real jobs, really killed, against watches of their own and the moments of the kills."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from click.testing import CliRunner

from ckpt.store import open_store
from elastic.cli import cli
from elastic.ledger.events import Steps
from elastic.ledger.goodput import CAUSES, PRODUCTIVE, Account, account
from elastic.ledger.rates import Rates, rates
from elastic.ledger.reader import Ledger, read
from elastic.ledger.recoveries import recoveries
from tests.dist.launch import Job, Line, torchrun

pytestmark = pytest.mark.dist
SCRIPT = Path(__file__).with_name("hours.py")
STEPS, EVERY = 160, 20


@dataclass
class Proof:
    """A job, its log, when who was killed, and what its ledger says."""

    folder: Path
    lines: list[Line]
    kills: list[tuple[float, int]]
    ledger: Ledger
    account: Account
    rates: Rates


def drive(folder: Path, kills: Sequence[tuple[int, int]], *, nproc: int = 2, steps: int = STEPS) -> Proof:
    """Run ``hours.py`` and kill rank r when it has done step s, for each (s, r)."""
    folder.mkdir(exist_ok=True)
    log, struck = folder / "log", []
    args = (str(folder / "run"), str(steps), str(EVERY), str(log))
    with torchrun(SCRIPT, *args, nproc=nproc, log=log, max_restarts=len(kills)) as job:
        dead: set[int] = set()
        for at, victim in kills:
            lines = job.until(lambda ls, at=at, v=victim, d=frozenset(dead): any(  # type: ignore[misc]
                x.get("step") == at and x["rank"] == v and x["pid"] not in d for x in ls))  # fmt: skip
            time.sleep(0.012)
            pid = next(x["pid"] for x in reversed(lines) if x["rank"] == victim and "step" in x)
            os.kill(pid, signal.SIGKILL)
            struck.append((time.time(), victim))
            dead |= {x["pid"] for x in lines}
        assert job.wait(120) == 0, job.tail("the job failed")
    (folder / "kills").write_text(json.dumps(struck))
    ledger = read(open_store(str(folder / "run")))
    found = account(ledger.events)
    return Proof(folder, Job.read(log), struck, ledger, found, rates(found))


def truth(proof: Proof) -> dict[str, float]:
    """Seconds by cause, by the job's own watches and the moments of the kills alone."""
    out = dict.fromkeys(CAUSES, 0.0)
    starts: dict[int, list[Line]] = defaultdict(list)
    for row in proof.lines:
        starts[sum(t < row["t"] - 1e-4 for t, _ in proof.kills) if row.get("event") != "heard" else -1].append(row)
    heard = [x["t"] for x in starts.pop(-1, [])]
    groups = [starts[n] for n in sorted(starts)]
    lives = [[x for x in g if x["rank"] == 0] for g in groups]
    resumed = [min(x["step"] for x in life if "step" in x) - 1 for life in lives]
    usual = median(x["t"] - x["began"] for life in lives for x in life if "step" in x)
    mark = min(x["t"] for x in groups[0])
    for n, life in enumerate(lives):
        event = {x["event"]: x["t"] for x in life if "event" in x}
        out["restart"] += event["enters"] - mark
        out["load"] += event["trains"] - event["enters"]
        kept = resumed[n + 1] if n + 1 < len(lives) else STEPS
        at = event["trains"]
        for x in (x for x in life if "step" in x):
            pause = x["began"] - at - x["waited"]
            first, good = x["step"] == resumed[n] + 1, x["step"] <= kept
            saved = (x["step"] - 1) % EVERY == 0 and not first
            out["restart" if first else "save" if saved else "other" if good else "lost"] += pause
            out["data" if good else "lost"] += x["waited"]
            excess = max(0.0, x["t"] - x["began"] - usual) if first else 0.0
            out["restart"] += excess
            out["training" if good else "lost"] += x["t"] - x["began"] - excess
            at = x["t"]
        if n < len(proof.kills):
            struck = proof.kills[n][0]
            noticed = min((t for t in heard if t > struck - 0.01), default=struck)
            out["lost"] += struck - at
            out["detect"] += noticed - struck
            mark = noticed
        else:
            out["save"] += event["left"] - at
            out["wall"] = event["left"] - min(x["t"] for x in groups[0])
    return out


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Proof:
    return drive(tmp_path_factory.mktemp("hours") / "killed", [(47, 1), (95, 0), (128, 1)])


def wrong_share(proof: Proof) -> tuple[float, float]:
    """(share of the loss that is put elsewhere, relative error of the wall time)."""
    meant = truth(proof)
    wall = meant.pop("wall")
    loss = sum(s for c, s in meant.items() if c not in PRODUCTIVE)
    wrong = sum(abs(proof.account.seconds[c] - s) for c, s in meant.items()) / 2
    return wrong / loss, proof.account.wall_s / wall - 1


def test_the_causes_add_up_to_the_wall_time_and_the_loss_is_put_where_it_belongs(killed: Proof) -> None:
    share, off = wrong_share(killed)
    assert sum(killed.account.seconds.values()) == pytest.approx(killed.account.wall_s, rel=1e-9)
    assert abs(off) < 0.01
    assert share < 0.05, {c: (killed.account.seconds[c], s) for c, s in truth(killed).items() if c in CAUSES}
    assert killed.account.notes == ()


def test_every_kill_is_told_with_its_rank_and_its_steps(killed: Proof) -> None:
    back = recoveries(killed.account)
    assert [r.end.rank for r in back] == [1, 0, 1]
    assert [r.end.how for r in back] == ["failure"] * 3
    for r, (struck, _) in zip(back, killed.kills, strict=True):
        assert r.end.died == pytest.approx(struck, abs=0.1)
        assert r.phases["detect"] is not None
        assert r.phases["import"] is not None
        assert r.phases["import"] > 0.5
        assert r.unsplit == {}
        assert r.total_s == pytest.approx(sum(s or 0 for s in r.phases.values()), abs=0.3)
        assert not r.waited
    done = [x["step"] for x in killed.lines if x["rank"] == 0 and "step" in x]
    assert sum(r.before.steps_lost for r in back) == pytest.approx(
        len(done) - STEPS, abs=3
    )  # told, but perhaps not ended


def test_step_times_tokens_and_waits_are_those_of_another_watch(killed: Proof) -> None:
    ends: dict[int, list[Line]] = defaultdict(list)
    for x in killed.lines:
        if x["rank"] == 0 and "step" in x:
            ends[x["pid"]].append(x)
    pairs = [(a, b) for life in ends.values() for a, b in pairwise(life)]
    apart = [b["t"] - a["t"] for a, b in pairs if a["step"] % EVERY]
    lead = killed.rates.ranks[0]
    assert lead.times.at(0.5) == pytest.approx(median(apart), rel=0.02)
    waits = [x["waited"] for life in ends.values() for x in life]
    assert lead.data_s / lead.n == pytest.approx(fmean(waits), rel=0.05)
    tokens = killed.rates.counted["tokens"]
    assert (tokens.per_step, tokens.useful) == (pytest.approx(201), pytest.approx(201 * STEPS))
    assert tokens.per_s == pytest.approx(201 * STEPS / truth(killed)["wall"], rel=0.01)


def test_the_rank_that_computes_longer_is_named(killed: Proof) -> None:
    slow = killed.rates.slowest
    assert slow is not None
    assert (slow.rank, slow.cause) == (1, "compute")


def test_the_ledger_stays_small_and_asks_for_no_request_a_step(killed: Proof) -> None:
    steps = sum(e.data.n for e in killed.ledger.events if isinstance(e.data, Steps))
    assert killed.ledger.bytes / steps < 1000
    assert killed.ledger.objects < steps / 4


def test_the_commands_tell_the_same(killed: Proof) -> None:
    url = str(killed.folder / "run")
    answer: dict[str, Any] = json.loads(CliRunner().invoke(cli, ["goodput", url, "--json"]).stdout)
    assert answer["seconds"] == pytest.approx(killed.account.seconds)
    assert CliRunner().invoke(cli, ["status", url]).exit_code == 0
    assert "3 failures in" in CliRunner().invoke(cli, ["failures", url]).stdout
