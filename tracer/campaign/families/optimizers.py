"""Optimizer steps: SGD and AdamW as a loop, ``foreach`` and fused, and the norm clipping before them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracer.campaign.families.family import BYTES, Bench, CampaignFamily, FamilyChoice, SizeRange

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab

_TRAFFIC = {"sgd": 5.0, "adamw": 7.0, "clip": 3.0}
"""Reads and writes of each number: parameter, gradient and momenta (clipping reads the gradients twice)."""


def _prepare(settings: dict[str, Any], lab: Lab) -> Bench:
    """``tensors`` parameters of ``elements`` numbers each."""
    torch, kind = lab.torch, settings["optimizer"]
    parameters = [lab.random(settings["elements"], dtype=settings["dtype"], grad=True)
                  for _ in range(settings["tensors"])]
    for parameter in parameters:
        parameter.grad = lab.random_like(parameter.detach())
    total = settings["elements"] * settings["tensors"]
    moved = _TRAFFIC[kind] * BYTES[settings["dtype"]] * total
    how = {"foreach": settings["implementation"] == "foreach", "fused": settings["implementation"] == "fused"}
    if kind == "clip":
        return Bench(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e6, foreach=how["foreach"]), 3.0 * total,
                     moved)
    if kind == "sgd":
        optimizer: Any = torch.optim.SGD(parameters, lr=1e-6, momentum=0.9, **how)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-6, **how)
    optimizer.step()  # makes the state
    return Bench(optimizer.step, (4.0 if kind == "sgd" else 15.0) * total, moved)


def _fits(settings: dict[str, Any]) -> str:
    if settings["optimizer"] == "clip" and settings["implementation"] == "fused":
        return "optimizer=clip has no fused implementation."
    return ""


FAMILIES = [CampaignFamily(
    "optimizer", "optimizer steps and gradient clipping over many tensors",
    {"tensors": SizeRange(4), "elements": SizeRange(256)},
    {"optimizer": FamilyChoice(("adamw", "sgd", "clip")), "implementation": FamilyChoice(("foreach", "fused", "loop")),
     "dtype": FamilyChoice(("fp32", "bf16"))}, _prepare, _fits)]
