"""Forecast a series with a two-layer GRU."""

import argparse

import torch
from torch import nn


class Forecaster(nn.Module):
    def __init__(self, features: int = 16, hidden: int = 96) -> None:
        super().__init__()
        self.gru = nn.GRU(features, hidden, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(hidden, features)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(series)[0])


def build(batch: int = 8, seq: int = 32):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Forecaster().to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)

    def step() -> None:
        series = torch.randn(batch, seq + 1, 16).to(device)
        optimizer.zero_grad()
        nn.functional.smooth_l1_loss(model(series[:, :-1]), series[:, 1:]).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    train = build(options.batch, options.seq)
    for _ in range(options.steps):
        train()
