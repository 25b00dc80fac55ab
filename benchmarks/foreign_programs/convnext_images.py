"""Hugging Face's ConvNeXt: depthwise convolutions of seven, layer norms, GELU."""

from collections.abc import Callable

import torch
from transformers import ConvNextConfig, ConvNextForImageClassification


def build(batch: int = 3, image: int = 56) -> Callable[[], None]:
    model = ConvNextForImageClassification(ConvNextConfig(
        hidden_sizes=[40, 80, 160], depths=[1, 1, 2], num_stages=3, num_labels=10, drop_path_rate=0.0)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        images, labels = torch.randn(batch, 3, image, image), torch.randint(10, (batch,))
        optimizer.zero_grad()
        model(pixel_values=images, labels=labels).loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
