"""Classify clouds of points by convolutions over each point's nearest ones."""

from collections.abc import Callable

import torch
from torch import nn

NEAREST, CLASSES = 10, 7


class Edges(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2 * before, after, 1, bias=False), nn.BatchNorm2d(after),
                                    nn.LeakyReLU(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = torch.cdist(x, x).topk(NEAREST, largest=False).indices
        rows = near.flatten(1)[:, :, None].expand(-1, -1, x.shape[2])
        others = x.gather(1, rows).unflatten(1, near.shape[1:])
        own = x[:, :, None].expand_as(others)
        return self.layers(torch.cat([others - own, own], 3).permute(0, 3, 1, 2)).amax(3).transpose(1, 2)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.edges = nn.ModuleList([Edges(3, 26), Edges(26, 26), Edges(26, 52)])
        self.mix = nn.Linear(104, 192)
        self.head = nn.Sequential(nn.Linear(192, 84), nn.ReLU(), nn.Dropout(0.3), nn.Linear(84, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for layer in self.edges:
            x = layer(x)
            found.append(x)
        return self.head(self.mix(torch.cat(found, 2)).amax(1))


def build(batch: int = 4, points: int = 60) -> Callable[[], None]:
    model = Network().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.2)

    def step() -> None:
        clouds, labels = torch.randn(batch, points, 3), torch.randint(CLASSES, (batch,))
        optimizer.zero_grad()
        loss_of(model(clouds), labels).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
