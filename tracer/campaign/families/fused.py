"""Chains of operations that ``torch.compile`` fuses into one kernel or two."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tracer.campaign.families.family import BYTES, DTYPES, Bench, CampaignFamily, FamilyChoice, SizeRange

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab

_INPUTS = {"pointwise": 3.0, "norm": 2.0, "softmax": 2.0}
"""Whole tensors read by each chain."""


def _prepare(settings: dict[str, Any], lab: Lab) -> Bench:
    """Pointwise: GELU of a product, plus a residual; norm: residual and RMS norm; softmax: scaled and masked."""
    torch, dtype = lab.torch, settings["dtype"]
    rows, width = settings["rows"], settings["width"]
    x, y, z = (lab.random(rows, width, dtype=dtype) for _ in range(3))
    weight = lab.random(width, dtype=dtype)
    functional = torch.nn.functional

    def pointwise() -> Any:
        return functional.gelu(x * y + weight) + z

    def norm() -> Any:
        return functional.rms_norm(x + y, (width,), weight)

    def softmax() -> Any:
        return functional.softmax(x * 0.125 + y, -1)

    chains: dict[str, Callable[[], Any]] = {"pointwise": pointwise, "norm": norm, "softmax": softmax}
    compiled = torch.compile(chains[settings["chain"]], dynamic=False)
    elements = rows * width
    return Bench(compiled, 12.0 * elements, (_INPUTS[settings["chain"]] + 1) * BYTES[dtype] * elements)


FAMILIES = [CampaignFamily(
    "fused", "chains fused by torch.compile", {"rows": SizeRange(16), "width": SizeRange(64)},
    {"chain": FamilyChoice(tuple(_INPUTS)), "dtype": FamilyChoice(DTYPES)}, _prepare)]
