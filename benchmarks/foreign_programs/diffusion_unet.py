"""Denoise images: a U-Net that knows the time, attention at its smallest size, and an average of its weights."""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

TIMES, WIDTH = 1000, 22


class Block(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(2, before), nn.GroupNorm(2, after)])
        self.convolutions = nn.ModuleList([nn.Conv2d(before, after, 3, 1, 1), nn.Conv2d(after, after, 3, 1, 1)])
        self.time = nn.Linear(4 * WIDTH, after)
        self.short = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.convolutions[0](nn.functional.silu(self.norms[0](x))) + self.time(time)[:, :, None, None]
        return self.short(x) + self.convolutions[1](nn.functional.silu(self.norms[1](h)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, 4 * WIDTH), nn.SiLU())
        self.first, self.down = nn.Conv2d(3, WIDTH, 3, padding=1), Block(WIDTH, WIDTH)
        self.smaller, self.middle = nn.Conv2d(WIDTH, 2 * WIDTH, 4, 4), Block(2 * WIDTH, 2 * WIDTH)
        self.attention = nn.MultiheadAttention(2 * WIDTH, 4, batch_first=True)
        self.larger, self.up = nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 4), Block(2 * WIDTH, WIDTH)
        self.last = nn.Sequential(nn.GroupNorm(2, WIDTH), nn.SiLU(), nn.Conv2d(WIDTH, 3, 3, padding=1))

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        waves = times[:, None] * torch.exp(torch.arange(WIDTH // 2) * (-math.log(TIMES) / (WIDTH // 2)))
        time = self.time(torch.cat([waves.sin(), waves.cos()], 1))
        kept = self.down(self.first(x), time)
        x = self.middle(self.smaller(kept), time)
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        x = self.larger(tokens.transpose(1, 2).reshape(x.shape))
        return self.last(self.up(torch.cat([x, kept], 1), time))


def build(batch: int = 2, image: int = 32) -> Callable[[], None]:
    model = UNet().train()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMES), 0)

    def step() -> None:
        images, times = torch.rand(batch, 3, image, image), torch.randint(TIMES, (batch,))
        noise = torch.randn_like(images)
        share = kept[times][:, None, None, None]
        noised = share.sqrt() * images + (1 - share).sqrt() * noise
        optimizer.zero_grad()
        nn.functional.mse_loss(model(noised, times), noise).backward()
        optimizer.step()
        averaged.update_parameters(model)

    return step


if __name__ == "__main__":
    from support import run

    run(build)
