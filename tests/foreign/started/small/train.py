from pathlib import Path

import torch
import yaml

from .model import Net

CONFIG = yaml.safe_load((Path(__file__).parent / "config.yaml").read_text())


def build(batch=CONFIG["train"]["batch"], width=CONFIG["model"]["width"]):
    net = Net(width)
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.randn(batch, width)

    def step():
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    step = build()
    for _ in range(CONFIG["train"]["steps"]):
        step()
