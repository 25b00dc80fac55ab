"""Train a multilayer perceptron through torch.compile."""

import argparse

import torch
from torch import nn


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 512), nn.GELU(), nn.Linear(512, 10))


def make_step(model: nn.Module, parameters: list[nn.Parameter], batch: int, device: str):
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def step() -> None:
        inputs = torch.randn(batch, 256).to(device)
        labels = torch.randint(10, (batch,)).to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def build(batch: int = 64):
    """The same step without the compiler."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model().to(device)
    return make_step(model, list(model.parameters()), batch, device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    plain = make_model().to(place)
    train = make_step(torch.compile(plain), list(plain.parameters()), options.batch, place)
    for _ in range(options.steps):
        train()
