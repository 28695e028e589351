"""What ``ckpt`` prints, case by case. ``python -m tests.cli.ckpt_cases`` writes the golden files: read the diff."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from ckpt import cli
from ckpt.format.layout import parse_attempt
from ckpt.format.manifest import Mark, dump, load_claim, utc_now
from tests.corpus.golden import GOLDEN_V1
from tests.corpus.recipes import FOLDER, OTHER, Step

GOLDEN = Path(__file__).parent / "golden"


def whole(run: Path) -> None:
    """The golden run."""


def mixed(run: Path) -> None:
    """Attempts in all four states, one that is being retired, a claim without a base."""
    shutil.copytree(run / OTHER, run / "steps/000000000003/e00000002-0")
    (run / "steps/000000000003/e00000002-0/manifest.json").unlink()
    for name, folder in (("000000000005-e00000001-0", "5/e00000001-0"), ("000000000004-e00000002-1", "4/e00000002-1")):
        shutil.copytree(run / OTHER, run / f"steps/00000000000{folder}")
        step = Step(run)
        step.folder, step.commit = run / f"steps/00000000000{folder}", run / f"commits/{name}.json"
        shutil.copy(run / "commits/000000000001-e00000001-0.json", step.commit)
        step.edit_commit(lambda c, name=name: c.update(attempt=name, step=int(name[:12])))
        step.edit("manifest.json", lambda m, name=name: m.update(attempt=name, step=int(name[:12])))
    (run / "steps/000000000004/e00000002-1/__0_0.distcp").unlink()
    for kind, name, reason in (("quarantine", "000000000002-e00000002-0", "stored bytes differ from what was saved"),
                               ("retire", "000000000000-e00000001-0", "retired by the keep policy")):  # fmt: skip
        attempt = parse_attempt(name)
        mark = Mark(attempt=name, reason=reason, epoch="e00000002", created="2026-11-30T21:00:00Z")
        path = run / (attempt.quarantine_key if kind == "quarantine" else attempt.retire_key)
        path.parent.mkdir()
        path.write_bytes(dump("mark", mark))
    starting(run)


def damaged(run: Path) -> None:
    """Three kinds of damage in the newest step."""
    step = Step(run)
    step.flip("__1_0.distcp", 700)
    step.flip(".metadata", 40)
    os.truncate(step.folder / "__0_0.distcp", 100)


def hopeless(run: Path) -> None:
    """No step is good."""
    for folder in (FOLDER, OTHER):
        (run / folder / "manifest.json").unlink()


def claimed(run: Path) -> None:
    """A run that was started and has saved nothing yet."""
    for name in ("commits", "steps", "epochs/00000002.base.json", "epochs/00000002.json"):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def interrupted(run: Path) -> None:
    """A retirement that was interrupted before the grace period ended, and one after it."""
    for name in ("000000000001-e00000001-0", "000000000000-e00000001-0"):
        attempt = parse_attempt(name)
        mark = Mark(attempt=name, reason="retired by the keep policy", epoch="e00000002",
                    created=utc_now() if attempt.step else "2026-11-30T21:00:00Z")  # fmt: skip
        (run / attempt.retire_key).parent.mkdir(exist_ok=True)
        (run / attempt.retire_key).write_bytes(dump("mark", mark))
    shutil.copytree(run / OTHER, run / "steps/000000000000/e00000001-0")
    (run / "commits/000000000001-e00000001-0.json").unlink()


def starting(run: Path) -> None:
    """A start that has claimed an epoch and not chosen a step yet."""
    old = load_claim((run / "epochs/00000002.json").read_bytes(), "")
    (run / "epochs/00000003.json").write_bytes(dump("claim", replace(old, epoch="e00000003")))


def one_step(run: Path) -> None:
    """Only the first step is there."""
    for name in ("commits/000000000002-e00000002-0.json", "epochs/00000002.json", "epochs/00000002.base.json"):
        (run / name).unlink()
    shutil.rmtree(run / FOLDER)


def wrong_value(run: Path) -> None:
    """Bytes that are as the digests say, and a fingerprint that is not that of the tensor."""

    def edit(manifest: dict[str, Any]) -> None:
        manifest["tensors"]["model.fine"]["fingerprint"] = "fp1:" + "0" * 32
        manifest["tensors"].update({"model.count": manifest["tensors"]["model.count"] | {"fingerprint": None}})

    Step(run).edit("manifest.json", edit)


def empty(run: Path) -> None:
    """Nothing."""
    shutil.rmtree(run)


def is_file(run: Path) -> None:
    """A file where a folder should be."""
    shutil.rmtree(run)
    run.write_text("x")


def trained(run: Path) -> None:
    """Two steps between which a tensor changed; beside them another run, most of whose tensors are otherwise."""
    import torch

    import ckpt

    shutil.rmtree(run)
    base, fine = torch.arange(12.0).reshape(4, 3), torch.linspace(0, 1, 8)
    tensors = {"base": base, "fine": fine, "low": fine.clone(), "size": fine.clone(), "gone": fine.clone()}
    for place, changed in ((run, {}), (run / "copy", {
        "low": fine.bfloat16(), "size": fine[:4].clone(), "gone": None, "more": base.to(torch.int32),
    })):  # fmt: skip
        held = {k: v.clone() for k, v in (tensors | changed).items() if v is not None}
        model = torch.nn.ParameterDict({k: torch.nn.Parameter(v, v.is_floating_point()) for k, v in held.items()})
        state = ckpt.State(model=model, epoch=1)
        with ckpt.open(place) as store:
            store.resume(state)
            store.save(1, state).wait()
            with torch.no_grad():
                model["fine"][2] += 0.5
                if place is not run:
                    model["fine"][5:] = torch.tensor([torch.nan, torch.inf, -0.0])
            state["epoch"] = 2
            store.save(2, state).wait()


def plain_beside(run: Path) -> None:
    """A run, and a plain DCP checkpoint of a model like its."""
    import torch
    import torch.distributed.checkpoint as dcp

    trained(run)
    base, fine = torch.arange(12.0).reshape(4, 3), torch.linspace(0, 1, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is one process
        dcp.save({"model": {"base": base, "fine": fine, "low": fine, "size": fine, "gone": fine + 1}, "epoch": 2},
                 checkpoint_id=str(run / "dcp"))  # fmt: skip


def alone(run: Path) -> None:
    """An attempt's folder, copied out of its run."""
    _only(run, FOLDER)


def written(run: Path) -> None:
    """A folder as ``ckpt.ObjectWriter`` leaves it."""
    _only(run, FOLDER)
    step = Step(run.parent)
    step.folder, step.commit = run, GOLDEN_V1 / "commits/000000000002-e00000002-0.json"
    manifest = run / "manifest.json"
    text = manifest.read_text().replace('"step": 2', '"step": null')
    manifest.write_text(text.replace('"000000000002-e00000002-0"', "null"))


def foreign(run: Path) -> None:
    """A plain DCP folder."""
    _only(run, FOLDER)
    (run / "manifest.json").unlink()
    shutil.rmtree(run / "index")


def foreign_short(run: Path) -> None:
    """A plain DCP folder that lacks a file."""
    foreign(run)
    (run / "__1_0.distcp").unlink()


def foreign_hostile(run: Path) -> None:
    """A plain DCP folder whose metadata would run a program."""
    foreign(run)
    (run / ".metadata").write_bytes(pickle.dumps(os.system))


def escape(run: Path) -> None:
    """A tensor whose name would clear the screen."""
    Step(run).edit("manifest.json", lambda m: m["tensors"].update({"x\x1b[2J\u202e": m["tensors"].pop("model.fine")}))


def newer(run: Path) -> None:
    """A step that needs what this version does not have."""
    Step(run).edit("manifest.json", lambda m: m.update(requires=["planes"]))


def _only(run: Path, folder: str) -> None:
    kept = Path(shutil.move(run / folder, run.parent / "kept"))
    shutil.rmtree(run)
    kept.rename(run)


@dataclass(frozen=True)
class Case:
    """One or more calls on one run; RUN stands for its place."""

    name: str
    prepare: Callable[[Path], None]
    calls: tuple[str, ...]


CASES = [
    Case("help", whole, ("--help", "ls --help", "inspect --help", "validate --help")),
    Case("help-marks", whole, ("newest-valid -h", "quarantine -h", "prune -h", "doctor -h")),
    Case(
        "newest-valid",
        whole,
        ("newest-valid RUN", "newest-valid RUN --level full", "newest-valid RUN --json", "newest-valid RUN@2"),
    ),
    Case("newest-valid-mixed", mixed, ("newest-valid RUN", "newest-valid RUN --json")),
    Case("newest-valid-damaged", damaged, ("newest-valid RUN --level full",)),
    Case("newest-valid-none", hopeless, ("newest-valid RUN", "newest-valid RUN --json")),
    Case("newest-valid-other", alone, ("newest-valid RUN", "quarantine RUN --reason x", "prune RUN --keep latest:1")),
    Case("newest-valid-newer", newer, ("newest-valid RUN",)),
    Case(
        "quarantine",
        whole,
        (
            "quarantine RUN@2 --reason spike",
            "newest-valid RUN",
            "quarantine RUN@2 --reason spike",
            "quarantine RUN@1 --reason spike",
            "validate RUN@2 --level full",
            "quarantine RUN@2 --lift",
            "quarantine RUN@2 --lift",
            "quarantine RUN@1 --reason spike --json",
            "quarantine RUN@1 --lift --json",
            "quarantine RUN --reason spike",
            "quarantine RUN@2",
            "quarantine RUN@7 --reason spike",
        ),
    ),
    Case(
        "quarantine-damaged",
        damaged,
        ("quarantine RUN@2 --reason bad", "quarantine RUN@2 --lift", "quarantine RUN@2 --lift --force"),
    ),
    Case("quarantine-only", one_step, ("quarantine RUN@1 --reason x", "quarantine RUN@1 --reason x --force")),
    Case(
        "prune",
        whole,
        (
            "prune RUN --keep latest:1",
            "prune RUN --keep latest:1,every:1,tail:2 --json",
            "prune RUN --keep latest:1 --apply --grace 1h",
            "ls RUN --all",
            "prune RUN --keep latest:1 --apply --grace 0s --json",
            "prune RUN --keep latest:1 --apply",
            "prune RUN --keep best:1",
            "prune RUN --keep latest:1 --grace 10",
            "prune RUN",
        ),
    ),
    Case("prune-mixed", mixed, ("prune RUN --keep latest:1",)),
    Case("prune-damaged", damaged, ("prune RUN --keep latest:1 --apply",)),
    Case("prune-starting", starting, ("prune RUN --keep latest:1", "prune RUN --keep latest:1 --apply")),
    Case(
        "prune-interrupted",
        interrupted,
        (
            "ls RUN --all",
            "prune RUN --keep latest:1 --apply",
            "prune RUN --keep latest:1 --apply --grace 0s",
            "ls RUN --all",
        ),
    ),
    Case("prune-nothing", claimed, ("prune RUN --keep latest:1",)),
    Case(
        "validate-load",
        whole,
        ("validate RUN --level load", "validate RUN@1 --level load --json"),
    ),
    Case("validate-load-damaged", damaged, ("validate RUN@2 --level load",)),
    Case("validate-load-wrong", wrong_value, ("validate RUN@2 --level load", "validate RUN@2 --level full")),
    Case(
        "validate-scrub",
        whole,
        (
            "validate RUN --level full --subset 1/2",
            "validate RUN --level full --max-duration 0s --all",
            "validate RUN --level full --max-duration 10m --all",
            "validate RUN --level full --max-age 7d --json",
            "validate RUN --subset 1/2",
            "validate RUN --level full --subset 3/2",
        ),
    ),
    Case(
        "diff",
        trained,
        (
            "diff -h",
            "diff RUN@1 RUN@2",
            "diff RUN@2 RUN@2",
            "diff RUN@2 RUN/copy --json --glob model.[fl]*",
            "diff RUN@2 RUN/copy --stats",
            "diff RUN@2 RUN/copy --glob model.*",
            "diff RUN@2 RUN/copy --glob nothing",
            "diff RUN@2 RUN@7",
            "diff RUN@2",
        ),
    ),
    Case("diff-plain", plain_beside, ("diff RUN@2 RUN/dcp", "diff RUN@2 RUN/dcp --stats --glob model.*")),
    Case("doctor", whole, ("doctor RUN", "doctor RUN --json")),
    Case(
        "usage",
        whole,
        (
            "",
            "nonsense",
            "ls",
            "validate RUN --level deep",
            "validate RUN@2 --all",
            "ls RUN -o x",
            "ls RUN --client obstore",
            "ls RUN -o colour=blue",
            "inspect RUN/" + FOLDER + "@2",
        ),
    ),
    Case("ls", whole, ("ls RUN", "ls RUN --limit 1", "ls RUN --json")),
    Case("ls-mixed", mixed, ("ls RUN", "ls RUN --all", "ls RUN --all --json")),
    Case("ls-one", whole, ("ls RUN/" + FOLDER, "ls RUN@1", "ls RUN@1 --json", "ls RUN@7", "ls RUN@7 --json")),
    Case("ls-damaged", damaged, ("ls RUN",)),
    Case("ls-nothing", empty, ("ls RUN", "inspect RUN", "validate RUN", "ls RUN --json")),
    Case("ls-claimed", claimed, ("ls RUN", "inspect RUN", "validate RUN")),
    Case("ls-file", is_file, ("ls RUN", "validate RUN --json")),
    Case("ls-newer", newer, ("ls RUN", "inspect RUN", "validate RUN")),
    Case("inspect", whole, ("inspect RUN", "inspect RUN@1 --tree", "inspect RUN --tensors", "inspect RUN --objects")),
    Case(
        "inspect-part",
        whole,
        (
            "inspect RUN --glob model.*",
            "inspect RUN --glob nothing",
            "inspect RUN --tensors --limit 2",
            "inspect RUN --tree --limit 3",
        ),
    ),
    Case(
        "inspect-json",
        whole,
        ("inspect RUN --json", "inspect RUN --glob *weight --json", "inspect RUN --objects --json"),
    ),
    Case(
        "inspect-mixed",
        mixed,
        ("inspect RUN/steps/000000000003/e00000002-0", "inspect RUN@5", "inspect RUN@2", "inspect RUN@4"),
    ),
    Case("inspect-escape", escape, ("inspect RUN --tensors",)),
    Case("folders", alone, ("ls RUN", "inspect RUN", "validate RUN --level full", "validate RUN@2")),
    Case("object-writer", written, ("ls RUN", "inspect RUN", "validate RUN --level full")),
    Case("foreign", foreign, ("ls RUN", "inspect RUN --tensors", "validate RUN", "validate RUN --level full --json")),
    Case("foreign-short", foreign_short, ("inspect RUN", "validate RUN")),
    Case("foreign-hostile", foreign_hostile, ("ls RUN", "inspect RUN", "validate RUN")),
    Case(
        "validate",
        whole,
        ("validate RUN", "validate RUN --level full", "validate RUN --level full --all", "validate RUN@1 --json"),
    ),
    Case(
        "validate-damaged",
        damaged,
        (
            "validate RUN",
            "validate RUN --level full",
            "validate RUN@1",
            "validate RUN@2",
            "validate RUN@2 --level full --json",
        ),
    ),
    Case(
        "validate-mixed", mixed, ("validate RUN", "validate RUN --all", "validate RUN/steps/000000000003/e00000002-0")
    ),
    Case("validate-hopeless", hopeless, ("validate RUN", "validate RUN --level full", "inspect RUN", "ls RUN")),
]


def transcript(case: Case) -> str:
    """What the calls of a case print, with places, ages and durations taken out."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(shutil.copytree(GOLDEN_V1, Path(folder) / "run"))
        case.prepare(run)
        return "\n".join(line for call in case.calls for line in _lines(call, run))


def _lines(call: str, run: Path) -> Iterator[str]:
    out, err = io.StringIO(), io.StringIO()
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}
    with (
        mock.patch.dict(os.environ, {**environment, "NO_COLOR": "1"}, clear=True),
        mock.patch("ckpt.tools.render.age_s", lambda created: created and 90.0),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = cli.run([word.replace("RUN", str(run)) for word in call.split()])
    yield f"$ ckpt {call}"
    yield from _plain(out.getvalue(), run)
    yield from (f"! {line}" for line in _plain(err.getvalue(), run))
    yield f"[{status}]"
    yield ""


def _plain(text: str, run: Path) -> list[str]:
    text = text.replace(f"file://{run}", "URL").replace(str(run), "RUN")
    text = re.sub(r"cannot list URL/\w+/", "cannot list URL/", text)
    text = re.sub(r" in [\d,]+ ms", " in 0 ms", text)
    text = re.sub(r"[\d,.]+ GiB of [\d,.]+ GiB free, [\d,]+ files", "FREE", text)
    text = re.sub(r"[\d,]+ a second", "N a second", text)
    text = re.sub(r"(file system +)\w+,", r"\1KIND,", text)
    text = re.sub(r'("what": ")\w+(, on this host)', r"\1KIND\2", text)
    text = re.sub(r"(retired|claimed) +\d+ (s|min) ago", r"\1  0 s ago", text)
    text = re.sub(r'"oldest": "[^"]+"', '"oldest": "TIME"', text)
    text = re.sub(r"readers have \d+ (s|min) more", "readers have 0 s more", text)
    text = re.sub(r"by hand, [\dTZ:.-]+", "by hand, TIME", text)
    text = re.sub(r'"seconds": [\d.]+', '"seconds": 0', text)
    return re.sub(r"(hashed|decoded) in [\d.]+ s", r"\1 in 0.0 s", text).rstrip("\n").splitlines()


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for case in CASES:
        (GOLDEN / f"{case.name}.txt").write_text(transcript(case))
