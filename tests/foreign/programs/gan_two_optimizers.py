"""Train a generator against a discriminator: two optimizers, one step each."""

import argparse

import torch
from torch import nn

NOISE = 64


def make_models() -> tuple[nn.Module, nn.Module]:
    generator = nn.Sequential(
        nn.Linear(NOISE, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 64 * 7 * 7), nn.ReLU(),
        nn.Unflatten(1, (64, 7, 7)), nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1), nn.Tanh())
    discriminator = nn.Sequential(
        nn.Conv2d(1, 32, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64 * 7 * 7, 1))
    return generator, discriminator


def build(batch: int = 16):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator, discriminator = (model.to(device).train() for model in make_models())
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    real, fake = torch.ones(batch, 1, device=device), torch.zeros(batch, 1, device=device)

    def step() -> None:
        images = torch.rand(batch, 1, 28, 28).to(device)
        made = generator(torch.randn(batch, NOISE, device=device))
        loss = criterion(discriminator(images), real) + criterion(discriminator(made.detach()), fake)
        of_discriminator.zero_grad()
        loss.backward()
        of_discriminator.step()
        of_generator.zero_grad()
        criterion(discriminator(made), real).backward()
        of_generator.step()

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    train = build(options.batch)
    for _ in range(options.steps):
        train()
