"""Batch norm by cuDNN where CUDA takes it; the statistics of layer and group norm in fp32.

The rule for cuDNN is that of ``_select_batch_norm_backend`` (ATen/native/Normalization.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tracer.shape_only.substitutions.substitution import Site, Substitution, below_autograd, operator_of

_LEAST_EPSILON = 0.0
"""cuDNN 8 on; older ones need 1e-5."""
_MOST_BATCH = {True: 880801, False: 65535}
"""Samples cuDNN takes, in training and in evaluation."""


def takes_cudnn(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, epsilon: float) -> bool:
    """Return whether CUDA hands this batch norm to cuDNN."""
    return (torch.backends.cudnn.enabled and weight is not None and bias is not None
            and x.dtype is not torch.bfloat16 and weight.dtype is not torch.bfloat16
            and (x.dtype is not torch.float16 or weight.dtype is torch.float32)
            and ((mean is not None and variance is not None) or (mean is None and variance is None and training))
            and x.dim() >= 3 and x.shape[0] <= _MOST_BATCH[training] and epsilon >= _LEAST_EPSILON
            and x.numel() < 2**31 - 1)


def _install(site: Site) -> None:
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
        if training and cudnn_enabled and takes_cudnn(x, weight, bias, mean, variance, training, epsilon):
            site.used("norms")
            return CudnnBatchNorm.apply(x, weight, bias, mean, variance, training, momentum, epsilon)
        return aten.native_batch_norm(x, weight, bias, mean, variance, training, momentum, epsilon)[0]

    def forward_rule(x: Any, weight: Any, *_: Any) -> Any:
        # The reserve space, bits of a fused ReLU, is not needed by a plain batch norm.
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


SUBSTITUTION = Substitution(
    "norms", "CUDA gives batch norm to cuDNN unless it is in bf16, and keeps the statistics of every norm in fp32.",
    cpu=frozenset({"aten::native_batch_norm", "aten::native_batch_norm_backward", "aten::empty",
                   "aten::native_layer_norm_backward", "aten::native_group_norm_backward"}),
    gpu=frozenset({"aten::native_batch_norm_backward", "aten::native_layer_norm_backward",
                   "aten::native_group_norm_backward", "aten::cudnn_batch_norm",
                   "aten::cudnn_batch_norm_backward", "aten::clone"}),
    install=_install)
