"""Rank items by bags of categories: EmbeddingBags of several sizes, a dense tower, Adagrad."""

import argparse

import torch
from torch import nn

ROWS = (20_000, 5_000, 1_000, 200)
PER_BAG = 8


class Ranker(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for rows in ROWS)
        self.dense = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(width * (len(ROWS) + 1), 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: torch.Tensor, bags: list[torch.Tensor], offsets: torch.Tensor) -> torch.Tensor:
        looked_up = [table(bag, offsets) for table, bag in zip(self.tables, bags, strict=True)]
        return self.top(torch.cat([self.dense(dense), *looked_up], 1)).squeeze(1)


def build(batch: int = 128):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Ranker().to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    offsets = torch.arange(0, batch * PER_BAG, PER_BAG, device=device)

    def step() -> None:
        bags = [torch.randint(rows, (batch * PER_BAG,)).to(device) for rows in ROWS]
        dense, clicks = torch.rand(batch, 13).to(device), torch.rand(batch).round().to(device)
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, bags, offsets), clicks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    train = build(options.batch)
    for _ in range(options.steps):
        train()
