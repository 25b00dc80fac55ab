"""Single operations over lists of tensors, of which optimizers are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tracer.campaign.families.family import BYTES, Bench, CampaignFamily, FamilyChoice, SizeRange

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab

_LISTS = {"add_": (2, 1), "mul_": (1, 1), "addcmul_": (3, 1), "addcdiv_": (3, 1), "lerp_": (2, 1), "sqrt": (1, 1),
          "norm": (1, 0), "fused_adamw_": (4, 3), "fused_sgd_": (3, 2)}
"""Lists each operation reads, and writes."""
_FLOPS = {"addcmul_": 3.0, "addcdiv_": 3.0, "lerp_": 3.0, "norm": 2.0, "fused_adamw_": 13.0, "fused_sgd_": 4.0}


def _prepare(settings: dict[str, Any], lab: Lab) -> Bench:
    """``tensors`` tensors of ``elements`` numbers in each list."""
    torch, op, count, dtype = lab.torch, settings["op"], settings["tensors"], settings["dtype"]
    read, written = _LISTS[op]
    lists = [[lab.random(settings["elements"], dtype=dtype).abs_().add_(1.0) for _ in range(count)]
             for _ in range(read)]
    steps = [torch.ones((), device=lab.device) for _ in range(count)]
    rates: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.01, "maximize": False, "grad_scale": None,
                             "found_inf": None}
    first = lists[0]
    rest = lists[1:]
    functions: dict[str, Callable[[], Any]] = {
        "add_": lambda: torch._foreach_add_(first, rest[0], alpha=1e-6),
        "mul_": lambda: torch._foreach_mul_(first, 1.000001),
        "addcmul_": lambda: torch._foreach_addcmul_(first, *rest, value=1e-6),
        "addcdiv_": lambda: torch._foreach_addcdiv_(first, *rest, value=1e-6),
        "lerp_": lambda: torch._foreach_lerp_(first, rest[0], 1e-6),
        "sqrt": lambda: torch._foreach_sqrt(first),
        "norm": lambda: torch._foreach_norm(first),
        "fused_adamw_": lambda: torch._fused_adamw_(*lists, [], steps, beta1=0.9, beta2=0.999, eps=1e-8,
                                                    amsgrad=False, **rates),
        "fused_sgd_": lambda: torch._fused_sgd_(*lists, momentum=0.9, dampening=0.0, nesterov=False,
                                                is_first_step=False, **rates)}
    elements = float(count * settings["elements"])
    return Bench(functions[op], _FLOPS.get(op, 1.0) * elements, BYTES[dtype] * elements * (read + written))


FAMILIES = [CampaignFamily(
    "foreach", "single operations over lists of tensors: arithmetic, norms, fused updates",
    {"tensors": SizeRange(4), "elements": SizeRange(256)},
    {"op": FamilyChoice(tuple(_LISTS)), "dtype": FamilyChoice(("fp32", "bf16"))}, _prepare)]
