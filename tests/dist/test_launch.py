"""``elastic launch`` with real ranks: starts again, tells how it ended, leaves nobody behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.recovery_time import measure
from tests.dist.kill_campaign import STEPS
from tests.dist.launch import ROOT, Job, torchrun
from tests.dist.launch_elastic import elastic_launch, events, left_behind, shared_memory

pytestmark = pytest.mark.dist
HERE = Path(__file__).parent
ENDS = HERE / "ends.py"


def test_a_killed_rank_is_named_and_all_start_again(tmp_path: Path) -> None:
    before, log = shared_memory(), tmp_path / "log"
    with elastic_launch(ENDS, str(log), "kill-once", nproc=2, log=log) as job:
        assert job.wait() == 0, job.tail("")
        assert left_behind(job) == []
    assert [x["count"] for x in job.lines()] == [0, 0, 1, 1]
    output = job.output.read_text()
    assert re.search(r"elastic launch: rank 1 of 2 was killed by SIGKILL \(pid \d+\); all ranks start again, 2 of 3 re",
                     output)  # fmt: skip
    assert "new interpreters" not in output  # they were forked
    assert [e["event"] for e in events(job) if e["event"] in ("failure", "started", "stopped")] == [
        "started", "failure", "stopped", "started",
    ]  # fmt: skip
    assert shared_memory() <= before


def test_plain_pytorch_restarts_too(tmp_path: Path) -> None:
    """Four ranks of stock code, which under torchrun never come back."""
    log = tmp_path / "log"
    with elastic_launch(HERE / "ring.py", "stock", "60", str(log), nproc=4, log=log) as job:
        lines = job.until(lambda ls: any(x.get("step") == 10 for x in ls))
        os.kill(next(x["pid"] for x in lines if x["rank"] == 2), signal.SIGKILL)
        assert job.wait() == 0, job.tail("")
    assert sorted(x["rank"] for x in job.lines() if x.get("step") == 59) == [0, 1, 2, 3]


def test_the_same_script_under_every_launcher(tmp_path: Path) -> None:
    said, seen = {}, {}
    for name, start in (("torchrun", torchrun), ("elastic", elastic_launch)):
        log = tmp_path / name
        with start(ENDS, str(log), "none", nproc=2, log=log) as job:
            assert job.wait() == 0, job.tail(name)
        said[name] = sorted(re.findall(r"rank \d has summed \d", job.output.read_text()))  # torchrun mixes lines
        seen[name] = sorted((x["rank"], x["count"], x["argv"][1:], x["name"], x["path0"]) for x in job.lines())
    assert said["torchrun"] == said["elastic"] == ["rank 0 has summed 2", "rank 1 has summed 2"]
    assert seen["torchrun"] == seen["elastic"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    alone = subprocess.run([sys.executable, ENDS, tmp_path / "alone", "none"], capture_output=True, text=True, env=env,
                           check=True)  # fmt: skip
    assert alone.stdout == "rank 0 has summed 1\n"


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ("exit-0", 0, ""),
        ("exit-75", 75, "start the same command again"),
        ("exit-6", 6, "another start of the run has taken over"),
        ("late-6", 6, "another start of the run has taken over"),
    ],
)
def test_statuses_after_which_nothing_is_started_again(tmp_path: Path, how: str, status: int, words: str) -> None:
    log = tmp_path / "log"
    with elastic_launch(ENDS, str(log), how, nproc=2, log=log) as job:
        assert job.wait() == status, job.tail("")
    assert len(job.lines()) == 2
    assert words in job.output.read_text()


def test_a_crash_loop_ends_with_the_error_its_place_and_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with elastic_launch(ENDS, str(log), "raise", nproc=2, log=log, max_restarts=9,
                        options=("--log-dir", str(tmp_path / "logs"), "--rdzv-id", "job")) as job:  # fmt: skip
        assert job.wait() == 1, job.tail("")
    assert len(job.lines()) == 2 * 3
    output = job.output.read_text()
    summary = output[output.index("elastic launch: rank 1 of 2 ended with exit status 1 (pid") :].split("\n")
    end = "\n".join(summary[-30:])
    assert "error     ValueError: a poisoned batch" in end
    assert re.search(r"at +\S+ends\.py:\d+", end)
    assert "no start  crash loop: the same error, 3 times in a row" in end
    assert f"log       {tmp_path}/logs/job/generation-3/rank-1/stderr.log" in end
    assert "  | [rank1]: ValueError: a poisoned batch" in end
    kept = (tmp_path / "logs" / "job" / "generation-1" / "rank-0" / "stdout.log").read_text()
    assert kept == "rank 0 has summed 2\n"
    assert "[rank0]: rank 0 has summed 2" in output


def test_a_request_to_stop_saves_and_ends_with_75_and_the_next_start_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    args = (str(tmp_path / "run"), "--steps", str(STEPS), "--every", "10", "--log-file", str(log))
    with elastic_launch(ROOT / "examples" / "train_gpt.py", *args, nproc=2, log=log) as job:
        job.until(lambda ls: any(x.get("step") == 9 for x in ls))
        job.process.terminate()
        assert job.wait() == 75, job.tail("")
        assert left_behind(job) == []
    assert "stopped on request, state saved; start the same command again" in job.output.read_text()
    with elastic_launch(ROOT / "examples" / "train_gpt.py", *args, nproc=2, log=log) as job:
        assert job.wait() == 0, job.tail("")
    steps = sorted(x["step"] for x in job.lines() if x.get("rank") == 0 and "step" in x)
    assert steps == list(range(STEPS))  # none twice, none missing


@pytest.mark.parametrize("whom", ["launcher", "fork server"])
def test_nothing_outlives_a_killed_launcher(tmp_path: Path, whom: str) -> None:
    log = tmp_path / "log"
    with elastic_launch(ENDS, str(log), "sleep", nproc=2, log=log, max_restarts=0) as job:
        pids = [x["pid"] for x in job.until(lambda ls: len(ls) == 2)]
        assert len(job.members()) >= 6  # launcher, fork server, ranks, and what they started
        if whom == "launcher":
            job.process.kill()
            job.process.wait()
        else:
            os.kill(_parent(pids[0]), signal.SIGKILL)
            assert job.wait() == 137, job.tail("")
        assert left_behind(job) == []


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_recovery_takes_less_than_a_second(tmp_path: Path) -> None:
    """A sample of the campaign; four times the figure, for a machine that does other things meanwhile."""
    result = measure("ours", 2, seed=int(time.time()), number=signal.SIGKILL, patience_s=60)
    assert result["recovered"]
    assert result["first_s"] < 2.0, result


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with elastic_launch(tmp_path / "no.py", nproc=1, log=log, max_restarts=0) as job:
        assert job.wait() == 2, job.tail("")
    assert f"can't open file '{tmp_path}/no.py': No such file or directory" in job.output.read_text()


def test_start_method_spawn_and_modules(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with elastic_launch("tests.dist.ends", str(log), "kill-once", nproc=2, log=log,
                        options=("--start-method", "spawn", "--module")) as job:  # fmt: skip
        assert job.wait() == 0, job.tail("")
    assert [x["count"] for x in job.lines()] == [0, 0, 1, 1]
    assert {x["name"] for x in job.lines()} == {"__main__"}
    assert Job.read(log)


def test_data_loaders_with_processes_of_their_own(tmp_path: Path) -> None:
    script = tmp_path / "loads.py"
    script.write_text(
        "import os, sys\n"
        "from torch.utils.data import DataLoader\n"
        "class Squares:\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, n): return n * n\n"
        "def name_of_main(): return sys.modules['__main__'].__file__\n"
        "if __name__ == '__main__':\n"
        "    for context in ('fork', 'spawn'):\n"
        "        loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=context)\n"
        "        print(context, sum(int(b.sum()) for b in loader), name_of_main() == sys.argv[0])\n"
        "    print(open('/proc/self/comm').read().strip())\n"
    )
    log = tmp_path / "log"
    with elastic_launch(script, nproc=1, log=log, max_restarts=0) as job:
        assert job.wait() == 0, job.tail("")
        assert left_behind(job) == []
    lines = [x for x in job.output.read_text().splitlines() if "UserWarning" not in x and "warn" not in x]
    assert [x for x in lines if x.strip()] == ["fork 140 True", "spawn 140 True", "rank0 loads.py"], job.tail("")
