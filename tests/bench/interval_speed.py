"""How fast the calculator is: ``python -m tests.bench.interval_speed``. CPU time, best of several, bars beside it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from elastic.economics import Costs, Rates, Tier, recommend

_IMPORT = (
    "import time; t = time.process_time(); from elastic.economics import Costs, Job, Rates, recommend; "
    "print(time.process_time() - t); import sys; assert 'numpy' not in sys.modules"
)


def fastest(what: Callable[[], object], runs: int) -> float:
    """Seconds of CPU of the fastest run."""
    best = float("inf")
    for _ in range(runs):
        start = time.process_time()
        what()
        best = min(best, time.process_time() - start)
    return best


def importing(runs: int = 10) -> float:
    """Seconds of CPU that importing the calculator takes in a fresh interpreter, best of ``runs``."""
    return min(
        float(subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, check=True, text=True).stdout)
        for _ in range(runs)
    )


def one_tier() -> object:
    return recommend(Rates(mtbf_s=11_135.0), Costs(stall_s=5.0, persist_s=120.0, load_s=600.0, detect_s=300.0))


def two_tiers() -> object:
    """With 3,900 fast saves per slow one."""
    memory = Tier(name="memory", stall_s=0.01, survives=0.9999, load_s=60.0)
    plan = recommend(Rates(mtbf_s=11_135.0), Costs(stall_s=15.0, load_s=600.0, tiers=(memory,)))
    assert 3_000 < plan.parts[0] < 5_000
    return plan


def million() -> object:
    from tests.bench.interval_simulation import MODELS, play

    return play(MODELS["blocking"], MODELS["blocking"].best(0.0, 1e9), 1_000_000, 1)


def main() -> int:
    """Print each figure beside its bar; 1 where one is missed."""
    rows = [
        ("recommend, one tier", fastest(one_tier, 200), 1e-3),
        ("recommend, two tiers", fastest(two_tiers, 5), 0.1),
        ("import without numpy", importing(), 0.05),
        ("a million simulated failures", fastest(million, 1), 5.0),
    ]
    for name, seconds, bar in rows:
        print(f"{name:30s} {1e3 * seconds:9.2f} ms   (bar {1e3 * bar:g} ms){'' if seconds < bar else '   MISSED'}")
    return int(any(seconds >= bar for _, seconds, bar in rows))


if __name__ == "__main__":
    raise SystemExit(main())
