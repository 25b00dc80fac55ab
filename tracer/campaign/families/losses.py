"""Losses and their gradients, each by its own operator, reduced to one number."""

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

_MEAN = 1  # at::Reduction


def _prepare(settings: dict[str, Any], lab: Lab) -> Bench:
    """``nll`` takes class numbers, the others compare value by value."""
    aten, rows, classes, kind = lab.torch.ops.aten, settings["rows"], settings["classes"], settings["loss"]
    element, elements, backward = BYTES[settings["dtype"]], rows * classes, settings["op"] == "backward"
    x = lab.random(rows, classes, dtype=settings["dtype"])
    one = lab.torch.ones((), device=lab.device, dtype=x.dtype)
    if kind == "nll":
        targets = lab.indices(rows, high=classes)
        weight = lab.torch.full((), float(rows), device=lab.device, dtype=x.dtype)
        run: Callable[[], Any] = (
            lambda: aten.nll_loss_backward(one, x, targets, None, _MEAN, -100, weight)) if backward else (
            lambda: aten.nll_loss_forward(x, targets, None, _MEAN, -100))
        return Bench(run, 2.0 * rows, 8.0 * rows + element * (elements if backward else rows))
    other = lab.random(rows, classes, dtype=settings["dtype"])
    forward, gradient = getattr(aten, f"{kind}_loss"), getattr(aten, f"{kind}_loss_backward")
    beta = (1.0,) if kind == "smooth_l1" else ()
    run = (lambda: gradient(one, x, other, _MEAN, *beta)) if backward else (lambda: forward(x, other, _MEAN, *beta))
    return Bench(run, 3.0 * elements, element * elements * (3.0 if backward else 2.0))


FAMILIES = [
    CampaignFamily(
        "loss",
        "negative log-likelihood, squared and smooth absolute error",
        {"rows": SizeRange(16), "classes": SizeRange(64)},
        {
            "loss": FamilyChoice(("nll", "mse", "smooth_l1")),
            "op": FamilyChoice(FORWARD_BACKWARD),
            "dtype": FamilyChoice(DTYPES),
        },
        _prepare,
    )
]
