import argparse
import json

import torch

from ..models import Stack
from ..models.blocks import Stack as SameStack


def build(batch=12, width=40, depth=3, lr=0.01):
    assert Stack is SameStack
    net = Stack(width, depth)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    x = torch.randn(batch, width)

    def step():
        optimizer.zero_grad(set_to_none=True)
        net(x).abs().mean().backward()
        optimizer.step()

    return step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    with open(given.config) as file:
        step = build(**json.load(file))
    for _ in range(given.steps):
        step()


if __name__ == "__main__":
    main()
