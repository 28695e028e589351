"""Single-bit flips over every object of a step, and a resume after each: what the suite samples and soak plays.

Half of the flips are spread over all bytes, the other half over all objects, so that the small records are struck too.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

import ckpt
from tests.dist import gpt
from tests.ranks import run_ranks

STEPS = (1, 2)
COMMIT = "commit record"


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file in place; a second time undoes it."""
    with path.open("r+b") as f:
        f.seek(bit // 8)
        byte = f.read(1)[0]
        f.seek(bit // 8)
        f.write(bytes([byte ^ (1 << bit % 8)]))


def save_steps(url: str) -> None:
    """Two trained steps; on every rank."""
    model, optim, sched = gpt.build((2,), seed=1)
    state = ckpt.State(model=model, optim=optim, sched=sched)
    with ckpt.open(url) as store:
        store.resume(state)
        for step in STEPS:
            gpt.train(model, optim, sched, 1)
            store.save(step, state).wait()


@dataclass(frozen=True)
class Outcome:
    """What a resume did after one flip: "named" and fell back, "harmless", or what went wrong."""

    seed: int
    object: str
    bit: int
    verdict: str


class Campaign:
    """A run of two steps whose newer one is flipped again and again; ``folder`` is ours."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        run_ranks(2, save_steps, str(self.run))
        (self.step,) = (self.run / "steps" / f"{STEPS[1]:012d}").iterdir()
        (commit,) = (self.run / "commits").glob(f"{STEPS[1]:012d}-*.json")
        self.objects = {str(p.relative_to(self.step)): p for p in self.step.rglob("*") if p.is_file()}
        self.objects[COMMIT] = commit
        self.records = set((self.run / "epochs").iterdir())
        model, optim, sched = gpt.build(None, seed=7)
        self.state = ckpt.State(model=model, optim=optim, sched=sched)
        self.model, self.optim = model, optim
        self.good = {step: self._loaded(step) for step in STEPS}

    def _loaded(self, step: int) -> list[torch.Tensor]:
        ckpt.open(str(self.run)).load(self.state, step)
        return self._content()

    def _live(self) -> list[torch.Tensor]:
        moments = [t for s in self.optim.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        return [t.detach() for t in [*self.model.state_dict().values(), *moments]]

    def _content(self) -> list[torch.Tensor]:
        return [t.clone() for t in self._live()]

    def play(self, seed: int) -> Outcome:
        """Flip one bit, resume, judge, and put everything back."""
        rng = random.Random(seed)
        names = sorted(self.objects)
        sizes = [self.objects[n].stat().st_size for n in names]
        (name,) = rng.choices(names, sizes) if rng.random() < 0.5 else [rng.choice(names)]
        path = self.objects[name]
        bit = rng.randrange(path.stat().st_size * 8)
        flip(path, bit)
        try:
            return Outcome(seed, name, bit, self._judge(name))
        finally:
            flip(path, bit)
            for extra in set((self.run / "epochs").iterdir()) - self.records:
                extra.unlink()
            shutil.rmtree(self.run / "quarantine", ignore_errors=True)

    def _judge(self, name: str) -> str:
        for t in self._live():
            t.zero_()
        try:
            got = ckpt.open(str(self.run)).resume(self.state)
        except Exception as e:
            return f"stopped: {type(e).__name__}: {e}"
        now = self._content()
        if len(now) != len(self.good[got.step]) or any(
            a.dtype != b.dtype or not torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
            for a, b in zip(now, self.good[got.step], strict=True)
        ):
            return f"wrong: step {got.step} came back with another value"
        if got.step == STEPS[1]:
            return "harmless"
        ((_, why),) = got.skipped
        what = self.objects[COMMIT].name if name == COMMIT else name
        return "named" if what in why else f"not named: {why}"
