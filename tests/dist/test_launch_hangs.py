"""A rank that hangs is named, its stack is written, and training goes on; whatever it hangs in."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.dist.launch_elastic import elastic_launch, events, left_behind

pytestmark = pytest.mark.dist
HANGING = Path(__file__).parent / "hanging.py"
CASES = {
    "stop": ("is stopped by a signal", "hang"),
    "gil": ("holds the interpreter lock", "hang"),
    "lock": ("it", "wait_for_ever"),
    "skip": ("it", "body"),
}


@pytest.mark.parametrize("loop", [False, True], ids=["plain", "run"])
@pytest.mark.parametrize("how", CASES)
def test_a_hang_is_named_and_healed(tmp_path: Path, how: str, loop: bool) -> None:
    log = tmp_path / "log"
    victim = 1 if how != "lock" else 0
    args = [how, str(victim), str(log), *([str(tmp_path / "run")] if loop else [])]
    began = time.monotonic()
    with elastic_launch(HANGING, *args, nproc=2, log=log) as job:
        assert job.wait(120) == 0, job.tail("")
        assert left_behind(job) == []
    hangs = [e for e in events(job) if e["event"] == "hang"]
    assert [e["ranks"] for e in hangs] == [[victim]], job.tail(f"after {time.monotonic() - began:.1f} s")
    why, stack = CASES[how]
    assert why in hangs[0]["why"][str(victim)]
    output = job.output.read_text()
    assert f"rank {victim} of 2 hangs" in output
    assert f"in {stack}" in output  # the function of the stack in which it hangs
    struck = next(x["mono"] for x in job.lines() if x.get("event") == "hang")
    found = hangs[0]["mono"] - struck
    first = min(x["mono"] for x in job.lines() if x["mono"] > hangs[0]["mono"] and x["event"] == "step") - struck
    assert found < 3.0 + 5.0  # 3 s on a quiet machine; the suite shares its own
    assert first - found < 8.0
