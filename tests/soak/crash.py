"""The whole crash enumeration: ``python -m tests.soak.crash [single overlapping double]``; goes on where it stopped.

Appends one line a scenario and number of ranks to out/soak/crash.jsonl. Exit status 1 if any history violates anything.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.crash.histories import SCENARIOS, Bench, History, Scenario, double, laboratory, overlapping, single

OUT = Path("out/soak/crash.jsonl")
WAYS: dict[str, tuple[Callable[[Bench, Scenario, int], Iterable[History]], tuple[int, ...]]] = {
    "single": (lambda bench, scenario, ranks: single(bench, scenario, ranks, land=3), (1, 2, 4)),
    "overlapping": (overlapping, (1,)),
    "double": (double, (1,)),
}


def main(ways: list[str]) -> int:
    """Play what the file does not hold yet."""
    OUT.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in OUT.read_text().splitlines()] if OUT.exists() else []
    done = {(r["way"], r["scenario"], r["ranks"]) for r in lines}
    for way in ways:
        histories, sizes = WAYS[way]
        for ranks in sizes:
            for scenario in SCENARIOS:
                if (way, scenario.name, ranks) not in done:
                    lines += [unit(way, scenario, ranks, histories)]
    bad = sum(r["violations"] for r in lines)
    print(f"{sum(r['histories'] for r in lines)} histories, {bad} violations")
    return 1 if bad else 0


def unit(
    way: str, scenario: Scenario, ranks: int, histories: Callable[[Bench, Scenario, int], Iterable[History]]
) -> dict[str, object]:
    """All histories of one way, scenario and number of ranks."""
    began, points, kinds, failed, n = time.process_time(), set(), set(), [], 0
    with laboratory():
        bench = Bench()
        for n, h in enumerate(histories(bench, scenario, ranks), start=1):  # noqa: B007 (counts)
            points.add(h.fault.point)
            kinds.add(h.fault.kind)
            if violations := bench.play(h):
                failed.append(f"{h}: {violations[0]}")
    row = {"way": way, "scenario": scenario.name, "ranks": ranks, "points": len(points), "kinds": sorted(kinds),
           "histories": n, "violations": len(failed), "shortest": failed[:5],
           "cpu_s": round(time.process_time() - began, 1)}  # fmt: skip
    with OUT.open("a") as out:
        out.write(json.dumps(row) + "\n")
    print(f"{way}, {scenario.name}, {ranks} ranks: {len(points)} points, {len(kinds)} kinds, {n} histories, "
          f"{len(failed)} violations, {row['cpu_s']} s of CPU", flush=True)  # fmt: skip
    return row


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:] or list(WAYS)))
