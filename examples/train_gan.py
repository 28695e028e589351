"""A GAN: two models, two optimizers, a running average of the generator; one step of the loop is one unit of them all.

    [torchrun --nproc-per-node N --max-restarts R] examples/train_gan.py URL --steps 60

The critic is trained twice a step, on a batch of its own each time. Start the same command again after a kill, on any
number of ranks that divides the batch, and it goes on from the newest valid step.
"""

from __future__ import annotations

import argparse
import json
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import ckpt
import elastic

LATENT, BATCH, POINTS = 8, 48, 1200


def ring() -> TensorDataset:
    """Points near eight places on a circle, each with its number."""
    angle = torch.randint(0, 8, (POINTS,)) * (math.pi / 4)
    return TensorDataset(
        torch.arange(POINTS), torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(POINTS, 2)
    )


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def parallel(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model) if dist.is_initialized() and dist.get_world_size() > 1 else model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where checkpoints live")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", default="10 steps", help="when to save: '10 steps', '10m' or 'auto'")
    parser.add_argument("--log-file", help="file to append a JSON line a step to")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    elastic.init()
    rank = dist.get_rank() if dist.is_initialized() else 0
    data = ring()
    generator, critic = mlp(LATENT, 2), mlp(2, 1)
    ema = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    G, D = parallel(generator), parallel(critic)  # noqa: N806 (as the field writes them)
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.99))
    loader = DataLoader(data, batch_sampler=elastic.ElasticSampler(data, BATCH, seed=1))
    torch.manual_seed(1 + rank)  # latent vectors differ between ranks

    def train_critic(real: Tensor) -> Tensor:
        with torch.no_grad():
            fake = generator(torch.randn(len(real), LATENT))
        on_real, on_fake = D(torch.cat([real, fake])).chunk(2)
        loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        opt_d.zero_grad()
        loss.backward()
        opt_d.step()
        return loss.detach()

    def train_generator(n: int) -> Tensor:
        loss = F.softplus(-critic(G(torch.randn(n, LATENT)))).mean()
        opt_g.zero_grad()
        loss.backward()
        opt_g.step()
        ema.update_parameters(generator)
        return loss.detach()

    state = ckpt.State(G=G, D=D, opt_g=opt_g, opt_d=opt_d, ema=ema, data=loader)
    with elastic.Run(args.url, state, every=args.every) as run:
        for step in run.steps(until=args.steps):
            samples = []
            for ids, real in (step.batch, step.next_batch()):
                loss_d = train_critic(real)
                samples += ids.tolist()
            loss_g = train_generator(len(real))
            run.log(loss_d=loss_d, loss_g=loss_g)
            if args.log_file:
                row = {"step": step.number, "rank": rank, "loss": loss_g.item(), "loss_d": loss_d.item(),
                       "samples": samples, "pid": os.getpid()}  # fmt: skip
                with open(args.log_file, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
