"""A folder without __init__.py, run as a module all the same; its settings are an INI file."""

import configparser
import os

import torch

from .nets import net_of

SETTINGS = configparser.ConfigParser()
SETTINGS.read(os.path.join(os.path.dirname(__file__), "settings.ini"))


def build(batch=SETTINGS.getint("train", "batch"), width=SETTINGS.getint("train", "width")):
    net = net_of(width)
    optimizer = torch.optim.Adam(net.parameters())
    x = torch.randn(batch, width)

    def step():
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()

    return step


def main():
    step = build()
    for _ in range(30):
        step()


if __name__ == "__main__":
    main()
