"""A little U-Net: strided convolutions down, transposed ones up, skips between."""

from collections.abc import Callable

import torch
from torch import nn


def _block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU(),
                         nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU())


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.bottom = _block(3, 16), _block(16, 32), _block(32, 64)
        self.up_second, self.up_first = nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)
        self.back_second, self.back_first = _block(64, 32), _block(32, 16)
        self.head = nn.Conv2d(16, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        second = self.second(nn.functional.max_pool2d(first, 2))
        bottom = self.bottom(nn.functional.max_pool2d(second, 2))
        x = self.back_second(torch.cat([self.up_second(bottom), second], 1))
        return self.head(self.back_first(torch.cat([self.up_first(x), first], 1)))


def build(batch: int = 2, image: int = 48) -> Callable[[], None]:
    model = Segmenter().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        pixels, labels = torch.randn(batch, 3, image, image), torch.randint(5, (batch, image, image))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pixels), labels).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
