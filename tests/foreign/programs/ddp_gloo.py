"""Train a small encoder under DistributedDataParallel with gloo: torchrun --nproc-per-node 2 ddp_gloo.py."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_step(batch: int, seq: int):
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    model = DistributedDataParallel(nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
                                                  nn.Linear(128, 16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        inputs = torch.randn(batch, seq, 128)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def build(batch: int = 4, seq: int = 32):
    """Make the step of one rank; the process group is up already."""
    return make_step(batch, seq)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    train = make_step(options.batch, options.seq)
    for _ in range(options.steps):
        train()
    dist.destroy_process_group()
