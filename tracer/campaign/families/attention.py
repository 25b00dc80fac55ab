"""Scaled-dot-product attention, each implementation forced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracer.campaign.families.family import BYTES, FORWARD_BACKWARD, Bench, CampaignFamily, FamilyChoice, SizeRange

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab

_BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION",
             "math": "MATH"}
BACKWARD_PRODUCTS = 2.5
"""Backward does five matrix products (the scores again, and four gradients) where forward does two."""


def _check(settings: dict[str, Any]) -> str:
    if settings["heads"] % settings["kv_heads"]:
        return f"heads={settings['heads']} is no multiple of kv_heads={settings['kv_heads']}."
    return ""


def _prepare(settings: dict[str, Any], lab: Lab) -> Bench:
    """``kv_seq`` 0 is ``seq``. FLOPs of a causal one count the lower triangle only."""
    torch = lab.torch
    batch, heads, seq, head = (settings[name] for name in ("batch", "heads", "seq", "head_dim"))
    kv_heads, kv_seq = settings["kv_heads"], settings["kv_seq"] or seq
    dtype, causal, backward = settings["dtype"], settings["causal"], settings["op"] == "backward"
    backend = torch.nn.attention.SDPBackend.__members__[_BACKENDS[settings["backend"]]]
    lab.enter(torch.nn.attention.sdpa_kernel(backend))
    # As models have it: [batch, seq, heads, head] in memory, seen as [batch, heads, seq, head].
    query = lab.random(batch, seq, heads, head, dtype=dtype).transpose(1, 2).requires_grad_(backward)
    key, value = (lab.random(batch, kv_seq, kv_heads, head, dtype=dtype).transpose(1, 2).requires_grad_(backward)
                  for _ in range(2))
    extra = {"enable_gqa": True} if heads != kv_heads else {}

    def forward() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal, **extra)

    flops = 4.0 * batch * heads * seq * kv_seq * head * (0.5 if causal else 1.0)
    moved = BYTES[dtype] * batch * head * (2.0 * heads * seq + 2.0 * kv_heads * kv_seq)
    if not backward:
        return Bench(forward, flops, moved)
    output = forward()
    gradient = lab.random_like(output)
    return Bench(lab.gradients(output, (query, key, value), gradient),
                 BACKWARD_PRODUCTS * flops, 2 * moved + BYTES[dtype] * batch * head * heads * seq)


FAMILIES = [
    CampaignFamily(
        "attention",
        "scaled-dot-product attention forward and backward: flash, cuDNN, memory-efficient, plain",
        {
            "batch": SizeRange(1),
            "heads": SizeRange(4),
            "kv_heads": SizeRange(2),
            "seq": SizeRange(32),
            "kv_seq": SizeRange(32, 0, 0),
            "head_dim": SizeRange(16),
        },
        {
            "op": FamilyChoice(FORWARD_BACKWARD),
            "backend": FamilyChoice(tuple(_BACKENDS)),
            "causal": FamilyChoice((True, False)),
            "dtype": FamilyChoice(("bf16", "fp16", "fp32")),
        },
        _prepare,
        _check,
    )
]
