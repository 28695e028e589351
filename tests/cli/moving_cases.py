"""What ``adopt`` and ``export`` print, and the other commands on foreign checkpoints.

``python -m tests.cli.moving_cases`` rewrites the golden files.
"""

from __future__ import annotations

from pathlib import Path

from tests.cli.ckpt_cases import GOLDEN, Case, foreign, foreign_hostile, whole
from tests.corpus.foreign import Dcp, entry, file


def _emptied(run: Path) -> Path:
    whole(run)
    for path in sorted(run.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    return run


def plain(run: Path) -> None:
    """A plain DCP folder as dcp.save leaves it, with checksums."""
    _emptied(run).rmdir()
    Dcp(run)


def plain_flipped(run: Path) -> None:
    """One whose tensor has a flipped bit."""
    plain(run)
    data = bytearray((run / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (run / "__0_0.distcp").write_bytes(data)


def shards(run: Path) -> None:
    """Two safetensors files with an index."""
    _emptied(run)
    (run / "model-00001-of-00002.safetensors").write_bytes(file({"a": entry()}))
    (run / "model-00002-of-00002.safetensors").write_bytes(file({"b": entry((8,), dtype="BF16")}))
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (run / "model.safetensors.index.json").write_text(str({"weight_map": weights}).replace("'", '"'))


def shards_wrong(run: Path) -> None:
    """One shard is missing, the other holds what the index does not know."""
    shards(run)
    (run / "model-00001-of-00002.safetensors").unlink()
    (run / "model-00002-of-00002.safetensors").write_bytes(file({"c": entry()}))


def several(run: Path) -> None:
    """Two files without an index."""
    _emptied(run)
    for name in ("a", "b"):
        (run / f"{name}.safetensors").write_bytes(file({name: entry()}))


ONLY = "--only model.*"
CASES = [
    Case("moving-help", whole, ("adopt --help", "export --help")),
    Case(
        "moving-usage",
        whole,
        (
            "adopt",
            "adopt RUN",
            "adopt RUN RUN-run@3",
            "adopt RUN RUN-run --rename model",
            "adopt RUN RUN-run",
            "adopt RUN-nothing RUN-run",
            "export RUN RUN-out",
            "export RUN RUN-out --to parquet",
            "export RUN RUN-out --to torch --max-shard 5",
            "export RUN RUN-no/out --to torch",
            "export RUN RUN-out --to torch --only nothing",
            "export RUN@7 RUN-out --to torch",
        ),
    ),
    Case(
        "adopt",
        foreign,
        (
            "adopt RUN RUN-run",
            "adopt RUN RUN-run",
            "adopt RUN RUN-run --step 3 --only model.* --rename model.=net. --json",
            "adopt RUN RUN-run --step 3",
            "inspect RUN-run --tensors",
            "validate RUN-run --level full",
        ),
    ),
    Case(
        "adopt-plain",
        plain,
        ("validate RUN", "validate RUN --level full", "adopt RUN RUN-run", "inspect RUN-run --tensors"),
    ),
    Case("adopt-flipped", plain_flipped, ("validate RUN --level full", "adopt RUN RUN-run", "ls RUN-run")),
    Case("adopt-hostile", foreign_hostile, ("adopt RUN RUN-run", "export RUN RUN-out --to torch --json")),
    Case(
        "export",
        whole,
        (
            "export RUN RUN-dcp --to dcp",
            "validate RUN-dcp --level full",
            "export RUN RUN-st --to safetensors",
            "export RUN@1 RUN-st --to safetensors --strip model. " + ONLY,
            "inspect RUN-st --tensors",
            "validate RUN-st",
            "export RUN RUN.pt --to torch --json",
            "export RUN RUN.pt --to torch",
        ),
    ),
    Case("safetensors", shards, ("inspect RUN", "validate RUN --json", "ls RUN", "adopt RUN RUN-run --rename =model.")),
    Case("safetensors-wrong", shards_wrong, ("inspect RUN", "validate RUN", "adopt RUN RUN-run")),
    Case("safetensors-several", several, ("inspect RUN", "inspect RUN/a.safetensors --tensors")),
]


if __name__ == "__main__":
    from tests.cli.ckpt_cases import transcript

    for case in CASES:
        (GOLDEN / f"{case.name}.txt").write_text(transcript(case))
