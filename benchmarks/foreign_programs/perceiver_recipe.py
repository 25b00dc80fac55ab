"""Latents that read a long input, trained by a whole recipe: bf16, groups of weights, a schedule, clipped gradients."""

from collections.abc import Callable

import torch
from torch import nn

LATENTS, CLASSES, VALUES = 18, 11, 300


class Layer(nn.Module):
    def __init__(self, width: int, inputs: int) -> None:
        super().__init__()
        self.norm, self.of_inputs, self.last = nn.LayerNorm(width), nn.LayerNorm(inputs), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, kdim=inputs, vdim=inputs, batch_first=True)
        self.dense = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        read = self.of_inputs(inputs)
        x = x + self.attention(self.norm(x), read, read, need_weights=False)[0]
        return x + self.dense(self.last(x))


class Perceiver(nn.Module):
    def __init__(self, width: int = 76, inputs: int = 52) -> None:
        super().__init__()
        self.latents, self.embed = nn.Parameter(0.02 * torch.randn(LATENTS, width)), nn.Embedding(VALUES, inputs)
        self.reads = nn.ModuleList(Layer(width, inputs) for _ in range(2))
        self.thinks = nn.ModuleList(Layer(width, width) for _ in range(2))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        x, inputs = self.latents.expand(values.shape[0], -1, -1), self.embed(values)
        for read, think in zip(self.reads, self.thinks, strict=True):
            x = read(x, inputs)
            x = think(x, x)
        return self.head(x.mean(1))


def build(batch: int = 5, seq: int = 66) -> Callable[[], None]:
    model = Perceiver().train()
    groups = [{"params": [one for one in model.parameters() if one.ndim > 1], "weight_decay": 0.1},
              {"params": [one for one in model.parameters() if one.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=10_000)

    def step() -> None:
        values, labels = torch.randint(VALUES, (batch, seq)), torch.randint(CLASSES, (batch,))
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(values).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
