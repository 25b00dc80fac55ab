"""Inverted residuals: expansion, depth-wise convolutions, squeeze and excitation, hard activations."""

from collections.abc import Callable

import torch
from torch import nn


class Inverted(nn.Module):
    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        inner = 3 * width
        self.expand = nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.Hardswish())
        self.depth = nn.Sequential(nn.Conv2d(inner, inner, kernel, padding=kernel // 2, groups=inner, bias=False),
                                   nn.BatchNorm2d(inner), nn.Hardswish())
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(inner, inner // 4, 1), nn.ReLU(),
                                     nn.Conv2d(inner // 4, inner, 1), nn.Hardsigmoid())
        self.project = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.depth(self.expand(x))
        return x + self.project(inner * self.squeeze(inner))


def build(batch: int = 4, image: int = 32) -> Callable[[], None]:
    model = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), Inverted(24, 3), Inverted(24, 5), nn.Conv2d(24, 48, 3, 2, 1),
                          Inverted(48, 3), Inverted(48, 5), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(48, 10)).train()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        pixels, labels = torch.randn(batch, 3, image, image), torch.randint(10, (batch,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pixels), labels).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
