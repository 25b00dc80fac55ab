"""Train an MLP-mixer of one's own: four micro-batches to an update, checkpointed blocks."""

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

ACCUMULATION = 4


class Block(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.within = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.across(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.second(x))


class Mixer(nn.Module):
    def __init__(self, tokens: int = 64, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(Block(tokens, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean(1))


def build(batch: int = 4):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Mixer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(ACCUMULATION):
            images = torch.randn(batch, 3, 32, 32).to(device)
            labels = torch.randint(10, (batch,)).to(device)
            (nn.functional.cross_entropy(model(images), labels) / ACCUMULATION).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    train = build(options.batch)
    for _ in range(options.steps):
        train()
