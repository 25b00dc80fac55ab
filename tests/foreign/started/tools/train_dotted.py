"""A script beside its helpers; it goes to a new folder, as Hydra does, and then reads by its own path."""

import json
import os
import sys
import tempfile

import torch
from helpers import make

os.chdir(tempfile.mkdtemp())
with open(os.path.join(os.path.dirname(__file__), "base.json")) as file:
    CONFIG = json.load(file)


def build(batch=8, width=20):
    net = make(width)
    optimizer = torch.optim.Adagrad(net.parameters())
    x = torch.randn(batch, width)

    def step():
        optimizer.zero_grad()
        net(x).mean().backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    for word in sys.argv[1:]:
        name, _, value = word.partition("=")
        group, _, key = name.partition(".")
        CONFIG[group][key] = int(value)
    step = build(CONFIG["train"]["batch"], CONFIG["model"]["width"])
    for _ in range(CONFIG["train"]["steps"]):
        step()
