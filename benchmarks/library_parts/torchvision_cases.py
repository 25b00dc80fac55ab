"""Every architecture of torchvision: classification, segmentation, detection, video and optical flow."""

from __future__ import annotations

from functools import partial
from typing import Any

from library_parts.cases import LibraryCase, Step, seeded, summed, trained

BATCH = 2


def torchvision_cases() -> list[LibraryCase]:
    """Each architecture in training and inference; the quantized ones, which have no gradients, in inference only."""
    from torchvision.models import list_models

    return [LibraryCase("torchvision", name, kind, partial(_step, name, kind)) for name in list_models()
            for kind in ("train", "infer") if not (kind == "train" and name.startswith("quantized_"))]


def _step(name: str, kind: str, device: str) -> Step:
    import torch
    from torchvision.models import get_model

    seeded()
    weights: dict[str, Any] = {"weights": None}
    if _module(name).startswith(("detection", "segmentation")):
        weights["weights_backbone"] = None
    model = get_model(name, **weights).to(device)
    inputs = _inputs(name, kind, device)
    if kind == "train":
        return trained(model, lambda: summed(model(*inputs)))
    model.eval()

    def infer() -> None:
        with torch.no_grad():
            model(*inputs)

    return infer


def _module(name: str) -> str:
    from torchvision.models import get_model_builder

    return str(get_model_builder(name).__module__.removeprefix("torchvision.models."))


def _inputs(name: str, kind: str, device: str) -> list[Any]:
    import torch

    def images(*size: int) -> Any:
        return torch.rand(BATCH, *size, device=device)

    module = _module(name)
    if module.startswith("detection"):
        return _detection(name, kind, device)
    if module.startswith("video"):
        frames = 16 if "mvit" in name else 14 if "s3d" in name else 8
        return [images(3, frames, 224, 224)]
    if module.startswith("optical_flow"):
        return [images(3, 368, 496), images(3, 368, 496)]
    if module.startswith("segmentation"):
        return [images(3, 520, 520)]
    return [images(3, 299, 299) if "inception" in name else images(3, 224, 224)]


def _detection(name: str, kind: str, device: str) -> list[Any]:
    """Images of a size as they come, with two boxes in each where they are to be learned."""
    import torch

    image = [torch.rand(3, 480, 640, device=device) for _ in range(BATCH)]
    if kind == "infer":
        return [image]
    boxes = torch.tensor([[10.0, 20.0, 200.0, 220.0], [150.0, 100.0, 500.0, 400.0]])
    target = {"boxes": boxes, "labels": torch.tensor([1, 2 if "keypoint" not in name else 1]),
              "masks": torch.zeros(2, 480, 640, dtype=torch.uint8), "keypoints": torch.ones(2, 17, 3)}
    return [image, [{key: value.to(device) for key, value in target.items()} for _ in range(BATCH)]]
