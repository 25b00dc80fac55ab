"""Layers that a GPU runs as one kernel: attention, norms and recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tracer.shape_only.substitutions.operators import Site, below_autograd, operator_of

_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD = 256
"""Most features of a head in flash attention."""
_MOST_BATCH = {True: 880801, False: 65535}
"""Most samples of a batch norm in cuDNN, in training (true) and in evaluation."""
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}  # by definition
_KEPT = 1
"""Values for each unit and step that cuDNN keeps for backward, in addition to its gates. An estimate: cuDNN chooses the
size of the reserve, and reports it only with a GPU."""


def choose(site: Site, query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, gqa: bool) -> str:
    """Return the kernel for tensors ``[batch, heads, seq, head]``: "flash", "efficient", "cudnn" or "math"."""
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


def attention(site: Site) -> None:
    """Run attention as one fused kernel, chosen by dtype, head size, mask and compute capability.

    The rule is that of ``select_sdp_backend`` (ATen/native/transformers/cuda/sdp_utils.cpp) with its order flash,
    memory efficient, math; cuDNN's kernel is used where the first two are switched off
    (``torch.nn.attention.sdpa_kernel``). Builds with cuDNN 9.15.1 and later put cuDNN first on sm90 and sm100; select
    it with ``sdpa_kernel`` to trace that.
    """
    aten = torch.ops.aten

    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
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

    site.replace("scaled_dot_product_attention", attend)


def _additive(mask: Any, query: Any, key: Any) -> Any:
    """Return a boolean mask as numbers to add, expanded over batch and heads."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def takes_cudnn(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool) -> bool:
    """Return whether CUDA uses cuDNN for this batch norm."""
    return (torch.backends.cudnn.enabled and weight is not None and bias is not None
            and x.dtype is not torch.bfloat16 and weight.dtype is not torch.bfloat16
            and (x.dtype is not torch.float16 or weight.dtype is torch.float32)
            and ((mean is not None and variance is not None) or (mean is None and variance is None and training))
            and x.dim() >= 3 and x.shape[0] <= _MOST_BATCH[training]
            and x.numel() < 2**31 - 1)


def norms(site: Site) -> None:
    """Run batch norm by cuDNN where CUDA does, and keep the statistics of every norm in fp32.

    The rule for cuDNN is that of ``_select_batch_norm_backend`` (ATen/native/Normalization.cpp).
    """
    if site.device.vendor == "nvidia":
        _cudnn(site)
    for name in ("native_layer_norm", "native_group_norm", "native_batch_norm"):
        operator = operator_of(name)
        if operator is not None:
            site.rules[operator] = _fp32_statistics(operator)


def _cudnn(site: Site) -> None:
    aten = torch.ops.aten
    fused, backward = operator_of("cudnn_batch_norm"), operator_of("cudnn_batch_norm_backward")

    class CudnnBatchNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool,
                    momentum: float, epsilon: float) -> Any:
            out, saved_mean, saved_variance, reserve = below_autograd(
                fused, x, weight, bias, mean, variance, training, momentum, epsilon)
            ctx.save_for_backward(x, weight, mean, variance, saved_mean, saved_variance, reserve)
            ctx.epsilon = epsilon
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, weight, mean, variance, saved_mean, saved_variance, reserve = ctx.saved_tensors
            layout = torch.channels_last if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) \
                else torch.contiguous_format
            made = below_autograd(backward, x, grads[0].contiguous(memory_format=layout), weight, mean, variance,
                                  saved_mean, saved_variance, ctx.epsilon, reserve)
            return (*made, None, None, None, None, None)

    def batch_norm(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float,
                   epsilon: float, cudnn_enabled: bool) -> Any:
        if training and cudnn_enabled and takes_cudnn(x, weight, bias, mean, variance, training):
            site.used("norms")
            return CudnnBatchNorm.apply(x, weight, bias, mean, variance, training, momentum, epsilon)
        return aten.native_batch_norm(x, weight, bias, mean, variance, training, momentum, epsilon)[0]

    def forward_rule(x: Any, weight: Any, *_: Any) -> Any:
        # A plain batch norm needs no reserve space, which holds bits of a fused ReLU.
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight), \
            x.new_empty(0, dtype=torch.uint8)

    def backward_rule(x: Any, grad: Any, weight: Any, *_: Any) -> Any:
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)

    site.rules[fused], site.rules[backward] = forward_rule, backward_rule
    site.replace("batch_norm", batch_norm)


def _fp32_statistics(operator: Any) -> Callable[..., Any]:
    def rule(*args: Any, **kwargs: Any) -> Any:
        out, mean, rstd = operator(*args, **kwargs)
        if mean.dtype in (torch.float16, torch.bfloat16):
            mean, rstd = (t.new_empty(t.shape, dtype=torch.float32) for t in (mean, rstd))
        return out, mean, rstd

    return rule


def rms_norm(site: Site) -> None:
    """Trace RMS norm as one kernel, its backward as another (PyTorch 2.8 on); the CPU runs a chain of small ones."""
    fused, backward = operator_of("_fused_rms_norm"), operator_of("_fused_rms_norm_backward")
    if fused is None or backward is None or site.device.vendor not in ("nvidia", "amd"):
        return  # an older torch decomposes it on CUDA too

    class RmsNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, shape: Any, weight: Any, eps: Any) -> Any:
            out, rstd = below_autograd(fused, x, shape, weight, eps)
            ctx.save_for_backward(x, weight, rstd)
            ctx.shape = shape
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, weight, rstd = ctx.saved_tensors
            mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
            # CUDA's kernel takes contiguous gradients.
            dx, dw = below_autograd(backward, grads[0], x, ctx.shape, rstd, weight, mask)
            return dx if mask[0] else None, None, dw if mask[1] else None, None

    def normalized(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        if (weight is not None and weight.dtype != x.dtype) or x.is_complex():
            return fused(x, normalized_shape, weight, eps)[0]  # decomposed, as on CUDA in this case
        site.used("rms_norm")
        return RmsNorm.apply(x, list(normalized_shape), weight, eps)

    def forward_rule(x: Any, shape: Any, weight: Any, eps: Any) -> Any:
        rows = list(x.shape[:x.dim() - len(shape)]) + [1] * len(shape)
        accumulated = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(rows, dtype=accumulated)

    def backward_rule(grad: Any, x: Any, shape: Any, rstd: Any, weight: Any, mask: Any) -> Any:
        return (torch.empty_like(x, memory_format=torch.contiguous_format) if mask[0] else None,
                torch.empty_like(weight) if weight is not None and mask[1] else None)

    site.rules[fused], site.rules[backward] = forward_rule, backward_rule
    site.replace("rms_norm", normalized)


def recurrent(site: Site) -> None:
    """Trace LSTM, GRU and plain recurrent layers: one cuDNN call for all layers and steps on NVIDIA GPUs."""
    forward, backward = operator_of("_cudnn_rnn"), operator_of("_cudnn_rnn_backward")
    if site.device.vendor != "nvidia" or forward is None or backward is None:
        return

    class CudnnRnn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, hx: Any, cx: Any, options: tuple[Any, ...], stride0: int, *weights: Any) -> Any:
            out, hy, cy, reserve, buffer = below_autograd(
                forward, x, list(weights), stride0, None, hx, cx, *options, [], None)
            ctx.save_for_backward(x, hx, cx, out, reserve, buffer, *weights)
            ctx.options, ctx.stride0 = options, stride0
            ctx.set_materialize_grads(False)
            return out, hy, cy

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, hx, cx, out, reserve, buffer, *weights = ctx.saved_tensors
            mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2], True]
            dx, dhx, dcx, dw = below_autograd(
                backward, x, weights, ctx.stride0, buffer, hx, cx, out, *grads[:3], *ctx.options, [], None, reserve,
                mask)
            return (dx if mask[0] else None, dhx if mask[1] else None, dcx if mask[2] else None, None, None, *dw)

    def run(mode: int, x: Any, hx: Any, cx: Any, params: Any, has_biases: bool, layers: int, dropout: float,
            train: bool, bidirectional: bool, batch_first: bool) -> Any:
        site.used("recurrent")
        if torch.is_autocast_enabled("cpu"):  # CUDA's autocast has a rule of its own for cuDNN's RNNs
            to = torch.get_autocast_dtype("cpu")
            x, hx, cx, *params = (t.to(to) if t is not None and t.is_floating_point() else t for t in (
                x, hx, cx, *params))
        per_layer = 4 if has_biases else 2
        projected = mode == 2 and hx.shape[2] != cx.shape[2]
        per_layer += 1 if projected else 0
        options = (mode, cx.shape[2] if projected else hx.shape[2], hx.shape[2] if projected else 0, layers,
                   batch_first, dropout, train, bidirectional)
        return CudnnRnn.apply(x, hx, cx, options, per_layer, *params)

    def lstm(x: Any, hx: Any, *rest: Any) -> Any:
        return run(_MODES["lstm"], x, hx[0], hx[1], *rest)

    def plain(mode: int) -> Any:
        def layer(x: Any, hx: Any, *rest: Any) -> Any:
            return run(mode, x, hx, None, *rest)[:2]

        return layer

    site.rules[forward], site.rules[backward] = _recurrent_rule, _recurrent_backward_rule
    site.replace("lstm.input", lstm)
    for name in ("gru", "rnn_tanh", "rnn_relu"):
        site.replace(f"{name}.input", plain(_MODES[name]))


def _recurrent_rule(x: Any, weight: Any, stride0: int, buffer: Any, hx: Any, cx: Any, mode: int, hidden: int,
                  projected: int, layers: int, batch_first: bool, dropout: float, train: bool, bidirectional: bool,
                  sizes: Any, state: Any) -> Any:
    directions = 2 if bidirectional else 1
    out = x.new_empty([*x.shape[:2], (projected or hidden) * directions])
    steps = x.shape[0] * x.shape[1]
    kept = steps * layers * directions * hidden * (_GATES[mode] + _KEPT) * x.element_size() if train else 0
    return (out, torch.empty_like(hx), x.new_empty(0) if cx is None else torch.empty_like(cx),
            x.new_empty(kept, dtype=torch.uint8), x.new_empty(0))


def _recurrent_backward_rule(x: Any, weight: Any, stride0: int, buffer: Any, hx: Any, cx: Any, *_: Any) -> Any:
    return (torch.empty_like(x), torch.empty_like(hx), x.new_empty(0) if cx is None else torch.empty_like(cx),
            [torch.empty_like(w) for w in weight])
