"""A variational autoencoder of dense layers."""

from collections.abc import Callable

import torch
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(784, 400), nn.ELU(), nn.Linear(400, 128), nn.ELU())
        self.mean, self.spread = nn.Linear(128, 20), nn.Linear(128, 20)
        self.decode = nn.Sequential(nn.Linear(20, 128), nn.ELU(), nn.Linear(128, 400), nn.ELU(), nn.Linear(400, 784))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        code = self.encode(x)
        mean, spread = self.mean(code), self.spread(code)
        return self.decode(mean + torch.randn_like(mean) * torch.exp(0.5 * spread)), mean, spread


def build(batch: int = 64) -> Callable[[], None]:
    model = Autoencoder().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)

    def step() -> None:
        x = torch.rand(batch, 784)
        again, mean, spread = model(x)
        loss = nn.functional.binary_cross_entropy_with_logits(again, x, reduction="sum")
        loss = loss - 0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
