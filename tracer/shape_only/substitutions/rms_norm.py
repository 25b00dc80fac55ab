"""RMS norm: one fused kernel on CUDA (PyTorch 2.8 on), a chain of small ones on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from tracer.shape_only.substitutions.substitution import Site, Substitution, below_autograd, operator_of


def _install(site: Site) -> None:
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

    def rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        if (weight is not None and weight.dtype != x.dtype) or x.is_complex():
            return fused(x, normalized_shape, weight, eps)[0]  # decomposes, as CUDA does then
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
    site.replace("rms_norm", rms_norm)


SUBSTITUTION = Substitution(
    "rms_norm", "CUDA runs RMS norm as one kernel and its backward as another.",
    cpu=frozenset({"aten::pow", "aten::mean", "aten::add", "aten::rsqrt", "aten::mul", "aten::expand", "aten::div",
                   "aten::sum", "aten::view", "aten::alias", "aten::detach", "aten::_to_copy", "aten::clone",
                   "aten::neg", "aten::mul_", "aten::type_as", "aten::_unsafe_view"}),
    gpu=frozenset({"aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"}),
    install=_install)
