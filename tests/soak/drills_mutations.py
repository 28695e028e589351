"""Mistakes planted in ckpt and elastic, each of which a drill has to fail: ``python -m tests.soak.drills_mutations``.

One mistake a row, made by replacing text in a private copy of the tree (that it applied is checked), and a drill of
the book held on it. Appends a line a row to out/soak/drills_mutations.jsonl, and goes on where it stopped. Exit status
1 if a mistake was not failed, or failed without the words that point at it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OUT = ROOT / "out/soak/drills_mutations.jsonl"
PLAIN = (str(ROOT / "tests/targets/plain_ckpt_target.py"), "{url}", "--log-file", "{log}")
TWO = ("torchrun", "--nproc-per-node", "2", "--max-restarts", "2", *PLAIN)
GPT = ("torchrun", "--nproc-per-node", "2", "--max-restarts", "2", str(ROOT / "examples/train_gpt.py"), "{url}",
       "--steps", "40", "--every", "7", "--seed", "1", "--log-file", "{log}")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Defect:
    """A mistake: ``edits`` are (file, old text, new text); ``said`` is what the failed checks have to say."""

    name: str
    drill: str
    said: str
    edits: tuple[tuple[str, str, str], ...]
    target: tuple[str, ...] = PLAIN
    options: tuple[str, ...] = field(default=("--resubmit", "1"))


DEFECTS = (
    Defect("random streams are not restored", "kill-any-rank", "rng",
           (("ckpt/state.py", "            self.rng.restore(saved)\n", ""),)),
    Defect("every rank gets the random streams of rank 0", "kill-any-rank", "rng.rank00001",
           (("ckpt/state.py", "rank_key(rank if manifest.world_size > rank else 0)", "rank_key(0)"),), TWO, ()),
    Defect("python's stream is left out", "kill-any-rank", "rng",
           (("ckpt/rng.py", "random.setstate(", "(lambda state: None)("),)),
    Defect("numpy's stream is left out", "kill-any-rank", "rng",
           (("ckpt/rng.py", "        np.random.set_state(", "        (lambda state: None)("),)),
    Defect("optimizer moments are not restored", "kill-any-rank", "optim",
           (("ckpt/parts.py", 'load_state_dict({"state": state, "param_groups"',
             'load_state_dict({"state": {n: {k: v if k == "step" else v * 0 for k, v in s.items()} '
             'for n, s in state.items()}, "param_groups"'),)),
    Defect("parameter groups are not restored", "kill-any-rank", "losses",
           (("ckpt/parts.py", '"param_groups": groups})',
             '"param_groups": [{**g, "lr": 0.02, "params": list(n["params"])} for g, n in zip('
             'self.optimizer.param_groups, groups)]})'),)),
    Defect("scheduler and data position are not restored", "kill-any-rank", "samples",
           (("ckpt/parts.py", '        self.obj.load_state_dict(loaded[""])\n', ""),)),
    Defect("the oldest step is restored", "kill-any-rank", "although step",
           (("ckpt/load.py", "        for attempt in usable:\n            try:",
             "        for attempt in reversed(usable):\n            try:"),),
           PLAIN, ("--resubmit", "1", "--at-step", "22")),
    Defect("the step is counted one too low", "kill-any-rank", "step",
           (("ckpt/load.py", "done = Resumed(attempt.step, str(attempt)",
             "done = Resumed(attempt.step - 1, str(attempt)"),
            ("ckpt/checkpoints.py", "if step <= base or step < self._last_step:", "if False:"))),
    Defect("checksums and fingerprints are not compared", "bit-rot-newest", "differ",
           (("ckpt/engine/reader.py", "if (found := digest(data[lo - begin : hi - begin])) != item.digests[n]:",
             "if (found := digest(data[lo - begin : hi - begin])) is None:"),
            ("ckpt/load.py", "        if self.proof:\n", "        if False:\n"))),
    Defect("checksums are not compared", "bit-rot-newest", "Not",
           (("ckpt/engine/reader.py", "if (found := digest(data[lo - begin : hi - begin])) != item.digests[n]:",
             "if (found := digest(data[lo - begin : hi - begin])) is None:"),)),
    Defect("damage makes it start from zero", "bit-rot-newest", "although step",
           (("ckpt/load.py", "usable = [a for a in self.catalog.choices(listing) if str(a) not in named]",
             "usable = [] if named else self.catalog.choices(listing)"),
            ("ckpt/load.py", "        if not self.catalog.saved_nothing(listing):", "        if False:"))),
    Defect("a missing object is an error, not a reason to go back", "all-steps-but-one-bad", "last words",
           (("ckpt/load.py", "            except (Damaged, ObjectMissing) as e:",
             "            except ZeroDivisionError as e:"),)),
    Defect("the copy of the state is none", "storage-slow", "differ",
           (("ckpt/engine/planner.py", "        return copy.clone() if copy.data_ptr() == data.data_ptr() else copy",
             "        return copy"),)),
    Defect("a writer that was overtaken goes on", "stale-writer", "went on to its end",
           (("ckpt/catalog.py", "    if newest > epoch:\n        raise Superseded(",
             "    if False:\n        raise Superseded("),), TWO, ()),
    Defect("retention takes the newest step", "kill-any-rank", "although step",
           (("ckpt/retention.py", "for a in plan_retention(catalog.usable(catalog.listing()), keep):",
             "for a in catalog.usable(catalog.listing())[:1]:"),), (*PLAIN, "--keep", "3"),
           ("--resubmit", "1", "--at-step", "22")),
    Defect("a stop saves nothing", "sigterm-short-notice", "trained twice",
           (("elastic/run.py", 'else "stop" if self._stopping', 'else None if self._stopping'),), GPT, ()),
    Defect("a generation meets the addresses of the dead one", "kill-any-rank", "fault",
           (("elastic/membership.py", "store=PrefixStore(token, job),", 'store=PrefixStore("all", job),'),),
           GPT, ("--recover-within", "25s")),
    Defect("the loader is one batch ahead after a restore", "kill-any-rank", "samples",
           (("elastic/data.py", 'int(state["position"])', 'int(state["position"]) + self.batch'),), GPT, ()),
)  # fmt: skip


def plant(defect: Defect, folder: Path) -> Path:
    """A copy of the tree with the mistake in it. Raises ``AssertionError`` where the text to replace is not there."""
    for name in ("ckpt", "elastic", "drills"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in defect.edits:
        path = folder / file
        text = path.read_text()
        assert text.count(old) == 1, f"{defect.name}: {file} has {text.count(old)} times {old!r}"
        path.write_text(text.replace(old, new))
    return folder


def hold(defect: Defect, folder: Path) -> dict[str, Any]:
    """Hold the drill on the mistake; what came of it."""
    tree, run = plant(defect, folder / "tree"), folder / "run"
    words = ["run", defect.drill, "--seed", "3", "--budget", "4m", "--out", str(run), "--quiet", *defect.options]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "drills", *words, "--", *defect.target], cwd=tree, capture_output=True, text=True,
        check=False, timeout=400, env={**os.environ, "PYTHONPATH": str(tree)},
    )  # fmt: skip
    report = run / "report.json"
    checks = json.loads(report.read_text())["checks"] if report.exists() else []
    bad = [f"{c['name']}: {c['value']}; {c['detail']}" for c in checks if c["verdict"] == "fail"]
    found = done.returncode == 1 and any(defect.said in text for text in bad)
    return {"defect": defect.name, "drill": defect.drill, "status": done.returncode, "found": found,
            "said": bad[:4] or [done.stdout[-1500:] + done.stderr[-1500:]],
            "seconds": round(time.monotonic() - began, 1)}  # fmt: skip


def main(names: list[str]) -> int:
    """Hold every row that the file does not hold yet; ``names`` picks rows that have one of these words."""
    OUT.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(t) for t in OUT.read_text().splitlines()] if OUT.exists() else []
    done = {r["defect"] for r in rows if r["found"]}
    for defect in DEFECTS:
        if defect.name in done or (names and not any(n in defect.name for n in names)):
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = hold(defect, Path(folder))
        rows.append(row)
        with OUT.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(f"{'found' if row['found'] else 'MISSED'}  {row['defect']} ({row['drill']}, {row['seconds']} s): "
              f"{row['said'][0][:300]}", flush=True)  # fmt: skip
    last = {r["defect"]: r for r in rows}
    missed = [n for n, r in last.items() if not r["found"]]
    print(f"{len(last) - len(missed)} of {len(last)} planted mistakes were failed by a drill")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
