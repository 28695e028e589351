"""The long agreement between formulas and simulation: ``python -m tests.bench.interval_simulation [failures]``."""

import math
import sys
import time

from elastic.economics.models import Setting, SingleTier
from elastic.economics.renewal import Renewal
from elastic.economics.silent import Verified
from elastic.economics.simulate import play
from elastic.economics.tiers import Level, Tiered

_JOB = {"mtbf_s": 54 * 86_400 / 419, "recovery_s": 600.0}  # Llama 3's rate
_STOPS = {"mtbf_s": 7200.0, "detect_s": 100.0, "reschedule_s": 200.0, "recovery_s": 300.0, "notice_save_s": 50.0}

MODELS = {
    "blocking": SingleTier(stall_s=60, reschedule_s=300, **_JOB),
    "save of twice the MTBF": SingleTier(mtbf_s=600, stall_s=1200, recovery_s=60),
    "recovery of twice the MTBF": SingleTier(mtbf_s=600, stall_s=10, recovery_s=1200, detect_s=50),
    "save cannot be struck": SingleTier(
        mtbf_s=3600, stall_s=300, recovery_s=3600, strike_save=False, strike_recovery=False
    ),
    "asynchronous": SingleTier(stall_s=5, persist_s=120, **_JOB),
    "slowdown": SingleTier(stall_s=0.5, persist_s=300, slowdown=0.05, **_JOB),
    "persist-bound": SingleTier(stall_s=0.2, persist_s=900, **_JOB),
    "overlapping uploads": SingleTier(stall_s=0.2, persist_s=900, overlapping=True, **_JOB),
    "lazy commit": SingleTier(stall_s=60, persist_s=120, lazy=True, **_JOB),
    "lazy commit, slowdown": SingleTier(
        mtbf_s=900, stall_s=3, persist_s=60, slowdown=0.1, lazy=True, recovery_s=300, reschedule_s=60
    ),
    "notice": SingleTier(
        mtbf_s=7200, stall_s=30, warned=0.9, notice_save_s=30, reschedule_s=300, recovery_s=300, strike_recovery=False
    ),
    "notice, asynchronous": SingleTier(stall_s=5, persist_s=100, slowdown=0.1, warned=0.6, **_STOPS),
    "notice, lazy commit": SingleTier(stall_s=5, persist_s=100, slowdown=0.1, warned=0.4, lazy=True, **_STOPS),
    "two tiers": Tiered(
        mtbf_s=_JOB["mtbf_s"],
        levels=(Level(stall_s=2, share=0.8, recovery_s=60), Level(stall_s=60, share=0.2, recovery_s=600)),
        reschedule_s=120,
    ),
    "two tiers, slow recovery": Tiered(
        mtbf_s=3600,
        levels=(Level(stall_s=5, share=0.5, recovery_s=900), Level(stall_s=60, share=0.5, recovery_s=1800)),
        reschedule_s=120,
    ),
    "three tiers": Tiered(
        mtbf_s=_JOB["mtbf_s"],
        levels=(
            Level(stall_s=1, share=0.7, recovery_s=60),
            Level(stall_s=8, share=0.2, recovery_s=200),
            Level(stall_s=90, share=0.1, recovery_s=900),
        ),
        reschedule_s=120,
    ),
    "silent errors": Verified(
        mtbf_s=21_600, silent_mtbf_s=10_800, verify_s=10, stall_s=120, reschedule_s=60, recovery_s=300
    ),
    "silent errors alone": Verified(mtbf_s=math.inf, silent_mtbf_s=86_400, verify_s=5, stall_s=300, recovery_s=300),
    "weibull 0.7": Renewal(shape=0.7, stall_s=60, **_JOB),
    "weibull 0.5, asynchronous": Renewal(shape=0.5, stall_s=5, persist_s=100, **_JOB),
    "weibull 1.5": Renewal(shape=1.5, stall_s=60, **_JOB),
    "lognormal 1.5": Renewal(sigma=1.5, stall_s=60, **_JOB),
}


def agreement(name: str, failures: int, seed: int) -> list[tuple[float, float]]:
    """(factor, z) at half, once and twice the best interval."""
    model = MODELS[name]
    best = model.best(0.0, math.inf)
    out = []
    for k, factor in enumerate((0.5, 1.0, 2.0)):
        setting = Setting(best.work_s * factor, best.parts)
        run = seed * 1000 + list(MODELS).index(name) * 3 + k
        out.append((factor, play(model, setting, failures, run).z(model.goodput(setting))))
    return out


def argmax_over_optimum(name: str, failures: int, seed: int) -> float:
    """The simulated best interval, from a fit over a grid with common random numbers, over the computed one."""
    import numpy as np

    model = MODELS[name]
    best = model.best(0.0, math.inf)
    factors = [0.55, 0.7, 0.85, 1.0, 1.18, 1.43, 1.8]
    # below the floor saves wait for each other: another curve, which a fit through both would bend
    logs = np.log([f for f in factors if best.work_s * f >= model.floor_s])
    gains = [play(model, Setting(best.work_s * math.exp(u), best.parts), failures, seed).goodput for u in logs]
    table = np.stack([np.ones_like(logs), logs, -(np.cosh(logs) - 1)], axis=1)
    _, slope, curve = np.linalg.lstsq(table, np.array(gains), rcond=None)[0]
    return math.exp(math.asinh(slope / curve))


def main() -> int:
    failures = int(float(sys.argv[1])) if len(sys.argv) > 1 else 300_000
    zs = []
    for name in MODELS:
        start = time.perf_counter()
        rows = agreement(name, failures, seed=11)
        zs += [z for _, z in rows]
        print(
            f"{name:28s} "
            + "  ".join(f"{factor:g}x z {z:+.2f}" for factor, z in rows)
            + f"   {time.perf_counter() - start:.1f} s"
        )
    rms = math.sqrt(sum(z * z for z in zs) / len(zs))
    print(f"{len(zs)} comparisons, rms z {rms:.2f}, largest {max(map(abs, zs)):.2f}")
    ratios = {
        name: argmax_over_optimum(name, 4_000_000, 1)
        for name in MODELS
        if isinstance(MODELS[name], (SingleTier, Renewal)) and name != "persist-bound"
    }
    print("simulated over computed optimum: " + ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()))
    start = time.perf_counter()
    play(MODELS["blocking"], MODELS["blocking"].best(0.0, math.inf), 1_000_000, 1)
    print(f"1e6 failures in {time.perf_counter() - start:.2f} s")
    close = sum(abs(ratio - 1) < 0.03 for ratio in ratios.values())
    print(f"{close} of {len(ratios)} optima within 3 %")
    return 0 if max(map(abs, zs)) < 4 and 0.8 < rms < 1.2 and close >= 5 else 1


if __name__ == "__main__":
    raise SystemExit(main())
