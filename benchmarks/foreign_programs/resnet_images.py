"""Hugging Face's ResNet with bottlenecks, SGD with momentum."""

from collections.abc import Callable

import torch
from transformers import ResNetConfig, ResNetForImageClassification


def build(batch: int = 4, image: int = 56) -> Callable[[], None]:
    model = ResNetForImageClassification(ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128, 192], depths=[2, 2, 1], num_labels=10)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step() -> None:
        images, labels = torch.randn(batch, 3, image, image), torch.randint(10, (batch,))
        optimizer.zero_grad()
        model(pixel_values=images, labels=labels).loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
