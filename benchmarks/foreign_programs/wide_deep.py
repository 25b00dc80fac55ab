"""Predict clicks from one category of each of several tables, and a deep tower of them all."""

from collections.abc import Callable

import torch
from torch import nn

ROWS = (8000, 3000, 700, 150, 40)


class WideDeep(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for rows in ROWS)
        self.deep = nn.Sequential(nn.Linear(width * len(ROWS) + 10, 256), nn.ReLU(), nn.Dropout(0.2),
                                  nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1))
        self.wide = nn.Linear(10, 1)

    def forward(self, dense: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        looked_up = [table(categories[:, number]) for number, table in enumerate(self.tables)]
        return (self.deep(torch.cat([dense, *looked_up], 1)) + self.wide(dense)).squeeze(1)


def build(batch: int = 192) -> Callable[[], None]:
    model = WideDeep().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        categories = torch.stack([torch.randint(rows, (batch,)) for rows in ROWS], 1)
        dense, clicks = torch.rand(batch, 10), torch.rand(batch).round()
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(dense, categories), clicks).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
