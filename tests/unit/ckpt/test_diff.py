"""``ckpt diff``: kinds of change from records alone, and numbers that are read in pieces."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt import cli
from ckpt.errors import Damaged
from ckpt.tools import diff, diffstats
from ckpt.tools.commands.moving import open_source
from ckpt.tools.describe import Entry
from ckpt.tools.target import Address, locate


def entry(fingerprint: str | None = "fp1:a", dtype: str = "float32", shape: tuple[int, ...] = (2,)) -> Entry:
    return Entry(name="t", kind="tensor", dtype=dtype, shape=shape, fingerprint=fingerprint)


def value(digest: str | None, kind: str = "replicated") -> Entry:
    return Entry(name="t", kind=kind, digest=digest)


@pytest.mark.parametrize(
    ("a", "b", "change"),
    [
        (entry(), entry(), "unchanged"),
        (entry(), entry("fp1:b"), "changed"),
        (entry(), entry("fp2:a"), "not verified"),
        (entry(), entry(None), "not verified"),
        (entry(), entry(dtype="bfloat16"), "re-typed"),
        (entry(), entry(shape=(3,)), "re-shaped"),
        (entry(), value("x"), "re-typed"),
        (value("x"), value("x"), "unchanged"),
        (value("x"), value("y"), "changed"),
        (value("x"), value("x", "per_rank"), "re-typed"),
        (value("x"), value(None, "value"), "not verified"),
        (None, entry(), "added"),
        (entry(), None, "removed"),
    ],
)
def test_kinds_of_change(a: Entry | None, b: Entry | None, change: str) -> None:
    (found,) = diff.compare([e for e in [a] if e], [e for e in [b] if e])
    assert found.change == change
    assert diff.counts([found])[found.change] == 1


def run_of(path: Path, *contents: torch.Tensor) -> None:
    model = torch.nn.Module()
    model.register_buffer("t", contents[0])
    state = ckpt.State(model=model)
    with ckpt.open(path) as store:
        store.resume(state)
        for step, t in enumerate(contents):
            model.t = t
            store.save(step, state).wait()


def stats_of(run: Path) -> diff.Stats:
    place = locate(Address.parse(str(run)))
    return diffstats.stats(open_source(place, 0), open_source(place, 1), "model.t", lambda _: None)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int32", "bool", "complex64", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (40, 9), (3, 4, 50)])
def test_numbers_are_those_of_the_whole_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(diffstats, "PIECE_ELEMENTS", 32)
    kind = getattr(torch, dtype)
    torch.manual_seed(1)
    a = (torch.randn(shape, dtype=torch.complex64) if kind.is_complex else 4 * torch.randn(shape)).to(kind)
    b = torch.where(torch.rand(shape) < 0.3, a.to(torch.complex64) + 1, a.to(torch.complex64))
    b = b.to(kind) if kind.is_complex else b.real.to(kind)
    run_of(tmp_path / "run", a, b)
    got = stats_of(tmp_path / "run")
    x, y = (t.to(torch.complex128).flatten() for t in (a, b))
    assert (got.elements, got.differing) == (a.numel(), int((x != y).sum()))
    assert got.max_abs == pytest.approx(float((y - x).abs().max()) if a.numel() else 0.0)
    norm = float(torch.linalg.vector_norm(x))
    if norm:
        assert got.relative == pytest.approx(float(torch.linalg.vector_norm(y - x)) / norm)
    else:
        assert got.relative is None
    assert (got.nan, got.inf) == ((0, 0), (0, 0))


def test_what_is_not_finite_is_counted_and_left_out(tmp_path: Path) -> None:
    a = torch.tensor([math.nan, 1.0, 2.0, -math.inf, 0.0])
    b = torch.tensor([math.nan, math.nan, 2.5, -math.inf, -0.0])
    run_of(tmp_path / "run", a, b)
    got = stats_of(tmp_path / "run")
    assert (got.nan, got.inf, got.max_abs, got.relative) == ((1, 2), (1, 1), 0.5, 0.25)
    assert got.differing == 3, "a NaN and an Inf that stay do not differ, a zero that changes its sign does"


def test_damage_is_named_when_the_data_are_read(tmp_path: Path) -> None:
    run_of(tmp_path / "run", torch.zeros(1000), torch.ones(1000))
    (data,) = (tmp_path / "run/steps/000000000001").glob("*/__0_0.distcp")
    raw = bytearray(data.read_bytes())
    raw[1500] ^= 1
    data.write_bytes(raw)
    assert cli.run(["diff", f"{tmp_path}/run@0", f"{tmp_path}/run@1"]) == 1, "the records alone do not tell"
    with pytest.raises(Damaged):
        stats_of(tmp_path / "run")


def test_without_stats_no_torch_is_imported(tmp_path: Path) -> None:
    run_of(tmp_path / "run", torch.zeros(4), torch.zeros(4))
    code = f"""
import sys
from ckpt import cli
assert cli.run(["diff", "{tmp_path}/run@0", "{tmp_path}/run@1", "--glob", "model.*"]) == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
