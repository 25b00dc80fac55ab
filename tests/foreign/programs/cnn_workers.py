"""Train a small convolutional network whose images two worker processes prepare."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    """Images that take some work: noise, a flip, a normalisation."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = np.random.default_rng(index)
        image = generator.standard_normal((3, 32, 32), dtype=np.float32)
        image = image[:, :, ::-1] if index % 2 else image
        image = (image - image.mean()) / image.std()
        return torch.from_numpy(image.copy()), index % 10


def make_model() -> nn.Module:
    def block(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
                             nn.MaxPool2d(2))
    return nn.Sequential(block(3, 32), block(32, 64), block(64, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Dropout(0.1), nn.Linear(128, 10))


def make_step(batch: int):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model().to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def build(batch: int = 16):
    step = make_step(batch)
    return lambda: step(torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    train = make_step(options.batch)
    images = Images(options.batch * options.steps)
    for batch in DataLoader(images, batch_size=options.batch, shuffle=True, num_workers=2):
        train(*batch)
