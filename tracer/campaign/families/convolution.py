"""Convolutions: forward, gradient of the input (dgrad) and of the weight (wgrad)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracer.campaign.families.family import BYTES, Bench, CampaignFamily, FamilyChoice, SizeRange

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab


def _check(settings: dict[str, Any]) -> str:
    for name in ("channels", "out_channels"):
        if settings[name] % settings["groups"]:
            return f"{name}={settings[name]} is no multiple of groups={settings['groups']}."
    if settings["kernel"] > settings["size"]:
        return f"kernel={settings['kernel']} exceeds the image's size={settings['size']}."
    return ""


def _prepare(settings: dict[str, Any], lab: Lab) -> Bench:
    """Square images and kernels, padded by ``kernel // 2``."""
    torch = lab.torch
    batch, channels, outs, size = (settings[name] for name in ("batch", "channels", "out_channels", "size"))
    kernel, stride, groups, dtype = (settings[name] for name in ("kernel", "stride", "groups", "dtype"))
    padding = kernel // 2
    lab.tf32(dtype == "tf32")
    form = torch.channels_last if settings["channels_last"] else torch.contiguous_format
    image = lab.random(batch, channels, size, size, dtype=dtype).contiguous(memory_format=form)
    weight = lab.random(outs, channels // groups, kernel, kernel, dtype=dtype).contiguous(memory_format=form)

    def forward() -> Any:
        return torch.nn.functional.conv2d(image, weight, None, stride, padding, 1, groups)

    output = forward()
    flops = 2.0 * output.numel() * (channels // groups) * kernel * kernel
    moved = float(BYTES[dtype] * (image.numel() + weight.numel() + output.numel()))
    if settings["op"] == "forward":
        return Bench(forward, flops, moved)
    gradient = lab.random_like(output)
    wanted = [settings["op"] == "dgrad", settings["op"] == "wgrad", False]
    return Bench(lambda: torch.ops.aten.convolution_backward(
        gradient, image, weight, None, [stride, stride], [padding, padding], [1, 1], False, [0, 0], groups, wanted),
        flops, moved)


FAMILIES = [
    CampaignFamily(
        "convolution",
        "2-d convolution: forward, dgrad, wgrad; NCHW and NHWC",
        {
            "batch": SizeRange(2),
            "channels": SizeRange(8),
            "out_channels": SizeRange(8),
            "size": SizeRange(16),
            "kernel": SizeRange(7, 3),
            "stride": SizeRange(2, 1),
            "groups": SizeRange(1, 1),
        },
        {
            "op": FamilyChoice(("forward", "dgrad", "wgrad")),
            "dtype": FamilyChoice(("bf16", "fp32", "tf32", "fp16")),
            "channels_last": FamilyChoice((True, False)),
        },
        _prepare,
        _check,
    )
]
