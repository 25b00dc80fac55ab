"""Scaled-dot-product attention: the fused kernel CUDA would choose.

The rule is that of ``select_sdp_backend`` (ATen/native/transformers/cuda/sdp_utils.cpp) with its order flash, memory
efficient, math; cuDNN's kernel is taken where the first two are switched off (``torch.nn.attention.sdpa_kernel``).
Builds with cuDNN 9.15.1 and later put cuDNN first on sm90 and sm100; say so with ``sdpa_kernel`` to trace that.
"""

from __future__ import annotations

from typing import Any

import torch

from tracer.shape_only.substitutions.substitution import Site, Substitution

_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD = 256
"""Flash attention takes heads of up to 256 features."""


def choose(site: Site, query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, gqa: bool) -> str:
    """"flash", "efficient", "cudnn" or "math" for tensors ``[batch, heads, seq, head]``."""
    backends = torch.backends.cuda
    capability, dtype = site.device.capability, query.dtype
    if query.dim() != 4 or query.shape[-2] == 0 or key.shape[-2] == 0 or not query.dtype == key.dtype == value.dtype:
        return "math"
    head, value_head = query.shape[-1], value.shape[-1]
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    half = dtype in _HALF and (dtype is torch.float16 or site.device.has_bf16)
    dense = all(t.stride(-1) == 1 for t in (query, key, value))
    square = not causal or query.shape[-2] == key.shape[-2] or mask is None
    if (backends.flash_sdp_enabled() and half and mask is None and head == value_head and head <= _FLASH_HEAD and dense
            and (site.device.vendor == "amd" or capability >= (8, 0)) and (same_heads or gqa)
            and not (causal and query.shape[-2] > key.shape[-2])
            and not (_needs_grad(query, key, value) and head > 192 and dropout > 0
                     and capability not in ((8, 0), (9, 0), (10, 0), (10, 3)))):
        return "flash"
    alignment = 4 if dtype is torch.float32 and capability >= (8, 0) else 8 if half and capability >= (7, 0) else 1
    if (backends.mem_efficient_sdp_enabled() and (half or dtype is torch.float32) and same_heads and square and dense
            and head % alignment == 0 and value_head % alignment == 0
            and not (mask is not None and mask.requires_grad and mask.dim() < 3)):
        return "efficient"
    if backends.cudnn_sdp_enabled() and half and capability >= (8, 0) and head <= 128 and head % 8 == 0 and (
            same_heads or gqa):
        return "cudnn"
    return "math"


def _needs_grad(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _install(site: Site) -> None:
    aten = torch.ops.aten

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
                  is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False) -> Any:
        kind = choose(site, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        site.used("attention")
        if kind == "flash":
            head = query.shape[-1]
            scale = head**-0.5 if scale is None and head % 8 else scale
            if head % 8:  # CUDA pads heads to a multiple of 8 and cuts the result
                query, key, value = (torch.nn.functional.pad(t, [0, 8 - head % 8]) for t in (query, key, value))
            out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False,
                                                           scale=scale)[0]
            return out[..., :head] if head % 8 else out
        grad = _needs_grad(query, key, value)
        if kind == "math":
            return aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, None,
                                                           scale=scale, enable_gqa=enable_gqa)[0]
        if attn_mask is not None:
            attn_mask = _additive(attn_mask, query, key)
        if kind == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(query, key, value, attn_mask, grad, dropout_p, is_causal,
                                                            False, scale=scale)[0]
        return aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, grad, dropout_p, is_causal,
                                                            scale=scale)[0]

    site.replace("scaled_dot_product_attention", attention)


def _additive(mask: Any, query: Any, key: Any) -> Any:
    """A boolean mask as numbers to add, spread over batch and heads."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


_MATH = frozenset({f"aten::{name}" for name in (
    "mul", "expand", "clone", "_unsafe_view", "view", "transpose", "bmm", "_softmax", "_safe_softmax", "empty_like",
    "bernoulli_", "div_", "add", "_to_copy", "where", "ones", "tril", "scalar_tensor", "_softmax_backward_data", "eq",
    "all", "any", "logical_not", "zeros_like", "full_like", "unsqueeze", "sum", "masked_fill",
    "masked_fill_", "zeros", "full", "select", "squeeze", "native_dropout", "native_dropout_backward")})
"""The operations of attention where no fused kernel takes it: on the CPU with dropout, on CUDA in fp32 with grouped
queries."""

SUBSTITUTION = Substitution(
    "attention", "CUDA runs one fused attention kernel, chosen by dtype, head size, mask and compute capability.",
    cpu=_MATH | {"aten::_scaled_dot_product_flash_attention_for_cpu",
                 "aten::_scaled_dot_product_flash_attention_for_cpu_backward"},
    gpu=_MATH | {f"aten::_scaled_dot_product_{kind}_attention{end}" for kind in ("flash", "efficient", "cudnn")
                 for end in ("", "_backward")} | {"aten::constant_pad_nd", "aten::slice", "aten::slice_backward"},
    install=_install)
