"""A Wasserstein GAN on small images: three steps of the critic to one of the generator."""

from collections.abc import Callable

import torch
from torch import nn

CRITIC_STEPS = 3
NOISE = 48


def generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NOISE, 64 * 4 * 4), nn.ReLU(), nn.Unflatten(1, (64, 4, 4)),
        nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 3, 4, stride=2, padding=1), nn.Tanh())


def critic() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Flatten(),
        nn.Linear(64 * 4 * 4, 1))


def build(batch: int = 12) -> Callable[[], None]:
    maker, judge = generator(), critic()
    of_judge = torch.optim.RMSprop(judge.parameters(), lr=5e-5)
    of_maker = torch.optim.RMSprop(maker.parameters(), lr=5e-5)
    state = {"steps": 0}

    def step() -> None:
        state["steps"] += 1
        images = torch.rand(batch, 3, 32, 32)
        with torch.no_grad():
            made = maker(torch.randn(batch, NOISE))
        of_judge.zero_grad()
        (judge(made).mean() - judge(images).mean()).backward()
        if state["steps"] % CRITIC_STEPS == 0:
            of_maker.zero_grad()
            (-judge(maker(torch.randn(batch, NOISE))).mean()).backward()
            of_maker.step()
        of_judge.step()
        with torch.no_grad():
            for weight in judge.parameters():
                weight.clamp_(-0.01, 0.01)

    return step


if __name__ == "__main__":
    from support import run

    run(build)
