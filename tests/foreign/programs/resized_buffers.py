"""Train on sequences copied into one buffer that is resized in place to each batch, and written with ``out=``."""

import argparse

import torch
from torch import nn

WIDTH = 64


class Pooler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 256), nn.SiLU(), nn.Linear(256, WIDTH))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        weights = torch.where(mask, self.inner(x).mean(-1), -1e9).softmax(-1)
        return self.head((weights.unsqueeze(-1) * x).sum(1))


def build(batch: int = 16, seq: int = 64):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Pooler().to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    buffer, mask = torch.empty(0, device=device), torch.empty(0, dtype=torch.bool, device=device)
    scratch = torch.empty(0, device=device)

    def step() -> None:
        # Shorter first, so that the buffer grows in place within every step.
        for length in (seq // 2, seq):
            buffer.resize_(batch, length, WIDTH)
            torch.randn(batch, length, WIDTH, out=buffer)
            mask.resize_(batch, length).fill_(True)
            scratch.resize_(0)
            torch.mul(buffer, 0.5, out=scratch)
            labels = torch.randint(5, (batch,)).to(device)
            loss = nn.functional.cross_entropy(model(scratch.clone(), mask), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    train = build(options.batch, options.seq)
    for _ in range(options.steps):
        train()
