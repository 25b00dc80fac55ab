"""A small network of images learns from a large one, which is not trained."""

from collections.abc import Callable

import torch
from torch import nn

CLASSES, TEMPERATURE = 7, 4.0


def network(*widths: int) -> nn.Sequential:
    layers, before = list[nn.Module](), 3
    for width in widths:
        layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
                   nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
                   nn.MaxPool2d(2)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


def build(batch: int = 4, image: int = 44) -> Callable[[], None]:
    teacher, student = network(26, 52, 104).eval(), network(14, 28, 56).train()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def step() -> None:
        images, labels = torch.randn(batch, 3, image, image), torch.randint(CLASSES, (batch,))
        with torch.no_grad():
            taught = (teacher(images) / TEMPERATURE).softmax(1)
        said = student(images)
        distance = nn.functional.kl_div((said / TEMPERATURE).log_softmax(1), taught, reduction="batchmean")
        loss = 0.7 * TEMPERATURE**2 * distance + 0.3 * nn.functional.cross_entropy(said, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
