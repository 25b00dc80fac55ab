"""timm's small image models: the loader of their names, which each program here that begins with timm uses.

timm imports torchvision for its data sets. PyPI's builds of that are for CUDA, and beside a CPU's PyTorch lack their
compiled operators, of which these models use none; importing it needs them to be known by name.
"""

from collections.abc import Callable
from typing import Any

import torch

_OPERATORS = ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
              "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def name_torchvision_operators() -> None:
    """Make torchvision, where it is installed, importable beside a PyTorch that it was not built for."""
    import importlib.metadata
    import importlib.util

    if importlib.util.find_spec("torchvision") is None:
        return
    if "+cpu" in torch.__version__ and "+cpu" not in importlib.metadata.version("torchvision"):
        kept = name_torchvision_operators
        kept.names = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[attr-defined]
        for each in _OPERATORS:
            if not hasattr(torch.ops.torchvision, each.split("(")[0]):
                kept.names.define(each)  # type: ignore[attr-defined]


def build(batch: int = 4, image: int = 64, name: str = "test_resnet", **settings: Any) -> Callable[[], None]:
    name_torchvision_operators()
    import timm

    model = timm.create_model(name, num_classes=10, **settings).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
    loss_of = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

    def step() -> None:
        images, labels = torch.randn(batch, 3, image, image), torch.randint(10, (batch,))
        optimizer.zero_grad()
        loss_of(model(images), labels).backward()
        optimizer.step()

    return step
