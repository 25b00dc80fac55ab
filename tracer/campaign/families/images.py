"""Pooling and interpolation of images, forward and backward, each gradient by its own operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tracer.campaign.families.family import (
    BYTES,
    DTYPES,
    FORWARD_BACKWARD,
    Bench,
    CampaignFamily,
    FamilyChoice,
    SizeRange,
)

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab

_MIXED = {"nearest": 1, "bilinear": 4, "bicubic": 16}
"""Values of the input that one of the output is mixed from."""


def _window_fits(settings: dict[str, Any]) -> str:
    if settings["kernel"] > settings["size"]:
        return f"kernel={settings['kernel']} exceeds the image's size={settings['size']}."
    return ""


def _image(settings: dict[str, Any], lab: Lab) -> Any:
    size = settings["size"]
    x = lab.random(settings["batch"], settings["channels"], size, size, dtype=settings["dtype"])
    return x.contiguous(memory_format=lab.torch.channels_last) if settings["channels_last"] else x


def _pooling(settings: dict[str, Any], lab: Lab) -> Bench:
    """Square windows; ``adaptive`` means over as many windows as ``size / stride``, at least one."""
    aten, x, element = lab.torch.ops.aten, _image(settings, lab), BYTES[settings["dtype"]]
    kernel, stride, kind = [settings["kernel"]] * 2, [settings["stride"]] * 2, settings["pool"]
    wanted = [max(settings["size"] // settings["stride"], 1)] * 2
    forwards: dict[str, Callable[[], Any]] = {
        "max": lambda: aten.max_pool2d_with_indices(x, kernel, stride),
        "avg": lambda: aten.avg_pool2d(x, kernel, stride),
        "adaptive_avg": lambda: aten._adaptive_avg_pool2d(x, wanted)}
    forward = forwards[kind]
    out = forward()
    out, indices = out if kind == "max" else (out, None)
    gradient = lab.random_like(out)
    backwards: dict[str, Callable[[], Any]] = {
        "max": lambda: aten.max_pool2d_with_indices_backward(gradient, x, kernel, stride, [0, 0], [1, 1], False,
                                                             indices),
        "avg": lambda: aten.avg_pool2d_backward(gradient, x, kernel, stride, [0, 0], False, True, None),
        "adaptive_avg": lambda: aten._adaptive_avg_pool2d_backward(gradient, x)}
    moved = float(element * (x.numel() + out.numel()) + (8 * out.numel() if indices is not None else 0))
    flops = float(out.numel() * settings["kernel"] ** 2)
    return Bench(forward if settings["op"] == "forward" else backwards[kind], flops, moved)


def _interpolate(settings: dict[str, Any], lab: Lab) -> Bench:
    """Resize images to ``factor`` times the size in each direction."""
    aten, x, mode = lab.torch.ops.aten, _image(settings, lab), settings["mode"]
    size = settings["size"]
    out, source = [size * settings["factor"]] * 2, [settings["batch"], settings["channels"], size, size]
    operator, gradients = getattr(aten, f"upsample_{mode}2d"), getattr(aten, f"upsample_{mode}2d_backward")
    corners = () if mode == "nearest" else (False,)
    gradient = lab.random_like(operator(x, out, *corners))
    elements = gradient.numel()
    moved = float(BYTES[settings["dtype"]] * (x.numel() + elements))
    run = (lambda: operator(x, out, *corners)) if settings["op"] == "forward" else (
        lambda: gradients(gradient, out, source, *corners))
    return Bench(run, 2.0 * _MIXED[mode] * elements, moved)


_SHAPE = {"batch": SizeRange(2), "channels": SizeRange(8), "size": SizeRange(16)}
_MODES = {
    "op": FamilyChoice(FORWARD_BACKWARD),
    "channels_last": FamilyChoice((False, True)),
    "dtype": FamilyChoice(DTYPES),
}

FAMILIES = [
    CampaignFamily("pooling", "pooling by maximum and by mean, and to a given size",
                   {**_SHAPE, "kernel": SizeRange(3), "stride": SizeRange(2)},
                   {"pool": FamilyChoice(("max", "avg", "adaptive_avg")), **_MODES}, _pooling, _window_fits),
    CampaignFamily("interpolate", "enlarged images: nearest, bilinear, bicubic", {**_SHAPE, "factor": SizeRange(2, 2)},
                   {"mode": FamilyChoice(tuple(_MIXED)), **_MODES}, _interpolate),
]
