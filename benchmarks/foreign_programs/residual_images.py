"""A small residual network with bottlenecks."""

from collections.abc import Callable

import torch
from torch import nn


class Bottleneck(nn.Module):
    def __init__(self, before: int, middle: int, stride: int) -> None:
        super().__init__()
        after = 4 * middle
        self.body = nn.Sequential(
            nn.Conv2d(before, middle, 1, bias=False), nn.BatchNorm2d(middle), nn.ReLU(inplace=True),
            nn.Conv2d(middle, middle, 3, stride, 1, bias=False), nn.BatchNorm2d(middle), nn.ReLU(inplace=True),
            nn.Conv2d(middle, after, 1, bias=False), nn.BatchNorm2d(after))
        self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.short(x))


def build(batch: int = 4, image: int = 48) -> Callable[[], None]:
    model = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), Bottleneck(32, 24, 1), Bottleneck(96, 48, 2),
                          Bottleneck(192, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 20)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def step() -> None:
        pixels, labels = torch.randn(batch, 3, image, image), torch.randint(20, (batch,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pixels), labels).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
