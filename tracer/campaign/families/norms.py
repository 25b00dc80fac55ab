"""Normalisations, softmax and cross entropy, forward and backward."""

from __future__ import annotations

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

_MODES = {"op": FamilyChoice(FORWARD_BACKWARD), "dtype": FamilyChoice(DTYPES)}
_FLOPS = {"forward": 8.0, "backward": 12.0}
"""Per element, roughly: mean, variance, scale and shift; memory bounds all of these."""


def _differentiated(lab: Lab, settings: dict[str, Any], forward: Any, inputs: tuple[Any, ...], elements: int,
                    extra_bytes: float = 0.0) -> Bench:
    """Forward reads the input and writes the output; backward reads input and gradient and writes a gradient."""
    element = BYTES[settings["dtype"]]
    flops = _FLOPS[settings["op"]] * elements
    if settings["op"] == "forward":
        return Bench(forward, flops, 2.0 * element * elements + extra_bytes)
    output = forward()
    gradient = lab.random_like(output)
    return Bench(lab.gradients(output, inputs, gradient), flops,
                 3.0 * element * elements + extra_bytes)


def _norm(settings: dict[str, Any], lab: Lab) -> Bench:
    rows, width, dtype, backward = settings["rows"], settings["width"], settings["dtype"], settings["op"] == "backward"
    x = lab.random(rows, width, dtype=dtype, grad=backward)
    weight, bias = (lab.random(width, dtype=dtype, grad=backward) for _ in range(2))
    functional = lab.torch.nn.functional
    if settings["norm"] == "rms":
        return _differentiated(lab, settings, lambda: functional.rms_norm(x, (width,), weight), (x, weight),
                               rows * width)
    return _differentiated(lab, settings, lambda: functional.layer_norm(x, (width,), weight, bias),
                           (x, weight, bias), rows * width)


def _channel_norm(settings: dict[str, Any], lab: Lab) -> Bench:
    torch, dtype, backward = lab.torch, settings["dtype"], settings["op"] == "backward"
    channels, size = settings["channels"], settings["size"]
    form = torch.channels_last if settings["channels_last"] else torch.contiguous_format
    x = lab.random(settings["batch"], channels, size, size, dtype=dtype).contiguous(memory_format=form)
    x.requires_grad_(backward)
    # As autocast has it: the parameters of a batch norm stay in fp32, those of a group norm have the input's type.
    own = "fp32" if settings["norm"] == "batch" else dtype
    weight, bias = (lab.random(channels, dtype=own, grad=backward) for _ in range(2))
    if settings["norm"] == "group":
        groups = min(settings["groups"], channels)
        return _differentiated(lab, settings, lambda: torch.nn.functional.group_norm(x, groups, weight, bias),
                               (x, weight, bias), x.numel(), BYTES[dtype] * x.numel())
    mean, variance = torch.zeros(channels, device=lab.device), torch.ones(channels, device=lab.device)
    return _differentiated(
        lab, settings, lambda: torch.nn.functional.batch_norm(x, mean, variance, weight, bias, training=True),
        (x, weight, bias), x.numel(), BYTES[dtype] * x.numel())


def _groups_fit(settings: dict[str, Any]) -> str:
    if settings["norm"] == "group" and settings["channels"] % settings["groups"]:
        return f"channels={settings['channels']} is no multiple of groups={settings['groups']}."
    return ""


def _softmax(settings: dict[str, Any], lab: Lab) -> Bench:
    functional, backward = lab.torch.nn.functional, settings["op"] == "backward"
    x = lab.random(settings["rows"], settings["width"], dtype=settings["dtype"], grad=backward)
    function = functional.log_softmax if settings["log"] else functional.softmax
    return _differentiated(lab, settings, lambda: function(x, -1), (x,), x.numel())


def _cross_entropy(settings: dict[str, Any], lab: Lab) -> Bench:
    rows, classes, element = settings["rows"], settings["classes"], BYTES[settings["dtype"]]
    logits = lab.random(rows, classes, dtype=settings["dtype"], grad=settings["op"] == "backward")
    targets = lab.indices(rows, high=classes)

    def forward() -> Any:
        return lab.torch.nn.functional.cross_entropy(logits, targets)

    elements = rows * classes
    if settings["op"] == "forward":  # log-softmax writes all its values
        return Bench(forward, 5.0 * elements, 2.0 * element * elements + 8 * rows)
    loss = forward()
    return Bench(lab.gradients(loss, (logits,)), 3.0 * elements,
                 4.0 * element * elements + 8 * rows)


FAMILIES = [
    CampaignFamily(
        "norm",
        "layer and RMS norm over the last dimension",
        {"rows": SizeRange(16), "width": SizeRange(64)},
        {"norm": FamilyChoice(("layer", "rms")), **_MODES},
        _norm,
    ),
    CampaignFamily(
        "channel_norm",
        "batch norm (training) and group norm of images",
        {"batch": SizeRange(2), "channels": SizeRange(32), "size": SizeRange(8), "groups": SizeRange(8, 32)},
        {"norm": FamilyChoice(("batch", "group")), "channels_last": FamilyChoice((False, True)), **_MODES},
        _channel_norm,
        _groups_fit,
    ),
    CampaignFamily(
        "softmax",
        "softmax and log-softmax over the last dimension",
        {"rows": SizeRange(16), "width": SizeRange(64)},
        {"log": FamilyChoice((False, True)), **_MODES},
        _softmax,
    ),
    CampaignFamily(
        "cross_entropy",
        "cross entropy of logits and class numbers, mean",
        {"rows": SizeRange(16), "classes": SizeRange(64, None, 2)},
        dict(_MODES),
        _cross_entropy,
    ),
]
