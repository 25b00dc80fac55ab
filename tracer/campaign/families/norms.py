"""Normalisations, softmax and losses, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracer.campaign.families.family import (
    ALL_DTYPES,
    BYTES,
    DTYPES,
    FORWARD_BACKWARD,
    TWO_DTYPES,
    Bench,
    Called,
    CampaignFamily,
    Choice,
    SearchSpace,
    Settings,
    SizeRange,
    Span,
    TensorArgument,
)

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab

_MODES: dict[str, Choice] = {"op": FORWARD_BACKWARD, "dtype": DTYPES}
_FLOPS = {"forward": 8.0, "backward": 12.0}
"""FLOPs of each element, roughly: mean, variance, scale and shift; memory bounds all of these operations."""
_CUDA = {"rows": Span(16, 131072, (1, 16)), "width": Span(16, 16384, (1, 8, 64))}
_CPU = {"rows": Span(8, 4096), "width": Span(32, 4096, (1, 16))}


def _norm(settings: Settings) -> Called:
    rows, width = settings["rows"], settings["width"]
    x, weight = TensorArgument((rows, width)), TensorArgument((width,))
    name, weights = ("rms_norm", (weight,)) if settings["norm"] == "rms" else ("layer_norm", (weight, weight))
    return Called(f"aten::{name}", (x, [width], *weights), _FLOPS[settings["op"]] * rows * width,
                  gradient=settings["op"] == "backward")


def _channel_norm(settings: Settings) -> Called:
    batch, channels, size = settings["batch"], settings["channels"], settings["size"]
    # As under autocast: a batch norm's parameters stay in fp32, a group norm's have the input's type.
    x = TensorArgument((batch, channels, size, size), lies="nhwc" if settings["channels_last"] else "")
    own = TensorArgument((channels,), "fp32" if settings["norm"] == "batch" else "")
    mean, variance = (own._replace(of=of) for of in ("zeros", "ones"))
    arguments: tuple[Any, ...] = (x, own, own, mean, variance, True, 0.1, 1e-5, True)
    if settings["norm"] == "group":
        arguments = x, min(settings["groups"], channels), own, own
    elements, backward = batch * channels * size * size, settings["op"] == "backward"
    return Called(f"aten::{settings['norm']}_norm", arguments, _FLOPS[settings["op"]] * elements,
                  # The image is read once more.
                  (4.0 if backward else 3.0) * BYTES[settings["dtype"]] * elements, gradient=backward)


def _groups_fit(settings: Settings) -> str:
    if settings["norm"] == "group" and settings["channels"] % settings["groups"]:
        return f"channels={settings['channels']} is no multiple of groups={settings['groups']}."
    return ""


def _groups(values: Settings) -> Settings:
    of = {"groups": 32 if values["channels"] % 32 == 0 else 1} if values["norm"] == "group" else {}
    return {**values, **of}


def _softmax(settings: Settings) -> Called:
    rows, width = settings["rows"], settings["width"]
    return Called("aten::log_softmax" if settings["log"] else "aten::softmax", (TensorArgument((rows, width)), -1),
                  _FLOPS[settings["op"]] * rows * width, gradient=settings["op"] == "backward")


def _cross_entropy(settings: Settings, lab: Lab) -> Bench:
    rows, classes, element = settings["rows"], settings["classes"], BYTES[settings["dtype"]]
    logits = lab.random(rows, classes, dtype=settings["dtype"], grad=settings["op"] == "backward")
    targets = lab.indices(rows, high=classes)

    def forward() -> Any:
        return lab.torch.nn.functional.cross_entropy(logits, targets)

    elements = rows * classes
    if settings["op"] == "forward":  # log-softmax writes all its values
        return Bench(forward, 5.0 * elements, 2.0 * element * elements + 8 * rows)
    return Bench(lab.gradients(forward(), (logits,)), 3.0 * elements, 4.0 * element * elements + 8 * rows)


_MEAN = 1  # at::Reduction


def _loss(settings: Settings) -> Called:
    """Return the call of a loss: ``nll`` takes class numbers, all others compare values."""
    rows, classes, kind = settings["rows"], settings["classes"], settings["loss"]
    x, backward = TensorArgument((rows, classes)), settings["op"] == "backward"
    if kind == "nll":
        moved = 8.0 * rows + BYTES[settings["dtype"]] * (rows * classes if backward else rows)
        targets = TensorArgument((rows,), "int64", of="uniform", high=classes)
        return Called("aten::nll_loss_forward", (x, targets, None, _MEAN, -100), 2.0 * rows, moved, gradient=backward)
    beta = (1.0,) if kind == "smooth_l1" else ()
    return Called(f"aten::{kind}_loss", (x, x._replace(differentiated=False), _MEAN, *beta), 3.0 * rows * classes,
                  gradient=backward)


FAMILIES = [
    CampaignFamily(
        "norm", "layer and RMS norm over the last dimension", {"rows": SizeRange(16), "width": SizeRange(64)},
        {"norm": ("layer", "rms"), **_MODES}, _norm, spaces=(
            SearchSpace("cuda", _CUDA, {"norm": ("layer", "rms"), "op": FORWARD_BACKWARD, "dtype": ALL_DTYPES}),
            SearchSpace("cpu", _CPU, {"norm": ("layer",), "op": FORWARD_BACKWARD, "dtype": TWO_DTYPES}))),
    CampaignFamily(
        "channel_norm", "batch norm (training) and group norm of images",
        {"batch": SizeRange(2), "channels": SizeRange(32), "size": SizeRange(8), "groups": SizeRange(8, 32)},
        {"norm": ("batch", "group"), "channels_last": (False, True), **_MODES}, _channel_norm, check=_groups_fit,
        fit=_groups, spaces=(
            SearchSpace("cuda", {"batch": Span(1, 256), "channels": Span(3, 2048, (1, 16, 64)),
                                 "size": Span(4, 256, (1, 2, 4))},
                        {"norm": ("batch", "group"), "channels_last": (True, False), "op": FORWARD_BACKWARD,
                         "dtype": TWO_DTYPES}),
            SearchSpace("cpu", {"batch": Span(1, 16), "channels": Span(8, 256, (8, 16)), "size": Span(7, 112, (1, 7))},
                        {"norm": ("batch",), "channels_last": (False,), "op": FORWARD_BACKWARD,
                         "dtype": ("fp32",)}))),
    CampaignFamily(
        "softmax", "softmax and log-softmax over the last dimension", {"rows": SizeRange(16), "width": SizeRange(64)},
        {"log": (False, True), **_MODES}, _softmax, spaces=(
            SearchSpace("cuda", _CUDA, {"log": (False, True), "op": FORWARD_BACKWARD, "dtype": ALL_DTYPES}),
            SearchSpace("cpu", _CPU, {"log": (False, True), "op": FORWARD_BACKWARD, "dtype": ("fp32",)}))),
    CampaignFamily(
        "cross_entropy", "cross entropy of logits and class numbers, mean",
        {"rows": SizeRange(16), "classes": SizeRange(64, None, 2)}, _MODES, prepare=_cross_entropy),
    CampaignFamily(
        "loss", "negative log-likelihood, squared and smooth absolute error",
        {"rows": SizeRange(16), "classes": SizeRange(64)}, {"loss": ("nll", "mse", "smooth_l1"), **_MODES}, _loss,
        spaces=(
            SearchSpace("cuda", {"rows": Span(16, 65536), "classes": Span(2, 131072)},
                        {"loss": ("nll", "mse", "smooth_l1"), "op": FORWARD_BACKWARD, "dtype": TWO_DTYPES}),
            SearchSpace("cpu", {"rows": Span(8, 2048), "classes": Span(2, 4096)},
                        {"loss": ("nll", "mse"), "op": FORWARD_BACKWARD, "dtype": ("fp32",)}))),
]
