"""A stream that keeps its own place: files, a shuffle buffer and a rest that is carried over, all in its state.

    [torchrun --nproc-per-node N --max-restarts R] examples/train_stream.py URL --steps 60 --workers 2

With torchdata, worker processes read ahead, and what is saved is what was trained on; without it the stream is read in
the main process. Every rank has its own part of the files, so another number of ranks is refused, unless
``--approximate`` says that samples may be missed or repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, get_worker_info

import ckpt
import elastic

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:
    StatefulDataLoader = None

CONTEXT, BATCH, BUFFER = 32, 8, 64  # characters of a sample, samples of a rank's batch, samples that are shuffled


class Stream(IterableDataset[Tensor]):
    """Batches of strings out of the standard library, endlessly: file after file, shuffled in a buffer."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.file = self.offset = 0
        self.rest, self.buffer, self.rng = "", list[str](), random.Random(rank)

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        mine = self.files[self.rank * workers + worker :: self.world * workers]
        while True:
            batch = [self.sample(mine) for _ in range(BATCH)]
            yield torch.frombuffer(bytearray("".join(batch), "latin-1"), dtype=torch.uint8).view(BATCH, CONTEXT).long()

    def sample(self, files: list[Path]) -> str:
        while len(self.buffer) < BUFFER:
            text = files[self.file % len(files)].read_text("latin-1")[self.offset : self.offset + 4096]
            self.offset += len(text)
            if not text:
                self.file, self.offset = self.file + 1, 0
            self.rest += text
            while len(self.rest) >= CONTEXT:
                self.buffer.append(self.rest[:CONTEXT])
                self.rest = self.rest[CONTEXT:]
        return self.buffer.pop(self.rng.randrange(len(self.buffer)))

    def state_dict(self) -> dict[str, Any]:
        return {"file": self.file, "offset": self.offset, "rest": self.rest, "buffer": list(self.buffer),
                "rng": self.rng.getstate()}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.file, self.offset, self.rest = state["file"], state["offset"], state["rest"]
        self.buffer = list(state["buffer"])
        self.rng.setstate(state["rng"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where checkpoints live")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", default="10 steps", help="when to save: '10 steps', '10m' or 'auto'")
    parser.add_argument("--workers", type=int, default=0, help="processes that read ahead (needs torchdata)")
    parser.add_argument("--approximate", action="store_true", help="go on with other ranks or workers than before")
    parser.add_argument("--log-file", help="file to append a JSON line a step to")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    elastic.init()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model: nn.Module = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 256))
    if world > 1:
        model = DistributedDataParallel(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stream: Any = Stream(rank, world)
    if StatefulDataLoader is not None:
        stream = StatefulDataLoader(stream, batch_size=None, num_workers=args.workers)

    state = ckpt.State(model=model, optim=optim, data=ckpt.PerRank(stream, approximate=args.approximate))
    with elastic.Run(args.url, state, every=args.every) as run:
        for step, text in run.steps(until=args.steps):
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            loss.backward()
            optim.step()
            optim.zero_grad()
            run.log(loss=loss)
            if args.log_file:
                row = {"step": step, "rank": rank, "loss": loss.item(), "samples": text[:, :8].flatten().tolist(),
                       "pid": os.getpid()}  # fmt: skip
                with open(args.log_file, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
