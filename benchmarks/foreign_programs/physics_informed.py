"""A network that solves Burgers' equation: derivatives of its output are part of the loss."""

from collections.abc import Callable

import torch
from torch import nn

VISCOSITY = 0.01 / 3.14159


def network(width: int = 84, depth: int = 5) -> nn.Sequential:
    layers = list[nn.Module]([nn.Linear(2, width), nn.Tanh()])
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def build(batch: int = 130, boundary: int = 50) -> Callable[[], None]:
    model = network().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def residual(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        u = model(torch.cat([x, t], 1))
        of_x, of_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
        of_xx, = torch.autograd.grad(of_x.sum(), x, create_graph=True)
        return of_t + u * of_x - VISCOSITY * of_xx

    def step() -> None:
        x, t = (2 * torch.rand(batch, 1) - 1).requires_grad_(), torch.rand(batch, 1).requires_grad_()
        start = 2 * torch.rand(boundary, 1) - 1
        sides, times = torch.randint(2, (boundary, 1)) * 2.0 - 1, torch.rand(boundary, 1)
        at_start = model(torch.cat([start, torch.zeros_like(start)], 1)) + torch.sin(3.14159 * start)
        at_sides = model(torch.cat([sides, times], 1))
        optimizer.zero_grad()
        (residual(x, t).square().mean() + at_start.square().mean() + at_sides.square().mean()).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
