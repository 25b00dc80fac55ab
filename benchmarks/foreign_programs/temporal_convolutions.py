"""Dilated convolutions over series, with weight normalisation left out."""

from collections.abc import Callable

import torch
from torch import nn


class Temporal(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first = nn.Conv1d(8, width, 1)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 3, padding=2**n, dilation=2**n) for n in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(5))
        self.head = nn.Conv1d(width, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.tanh(norm(layer(x)))
        return self.head(x)


def build(batch: int = 8, seq: int = 64) -> Callable[[], None]:
    model = Temporal().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        series = torch.randn(batch, 8, seq)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(series), series[:, :4]).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
