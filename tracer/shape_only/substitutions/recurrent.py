"""LSTM, GRU and plain recurrent layers: one cuDNN call for all layers and steps on NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

import torch

from tracer.shape_only.substitutions.substitution import Site, Substitution, below_autograd, operator_of

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
_KEPT = 1
"""Values of a unit and step that cuDNN keeps for backward beside its gates. An estimate: the reserve's size is cuDNN's
own, and only a GPU can be asked for it."""


def _install(site: Site) -> None:
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

    site.rules[forward], site.rules[backward] = _forward_rule, _backward_rule
    site.replace("lstm.input", lstm)
    for name in ("gru", "rnn_tanh", "rnn_relu"):
        site.replace(f"{name}.input", plain(_MODES[name]))


def _forward_rule(x: Any, weight: Any, stride0: int, buffer: Any, hx: Any, cx: Any, mode: int, hidden: int,
                  projected: int, layers: int, batch_first: bool, dropout: float, train: bool, bidirectional: bool,
                  sizes: Any, state: Any) -> Any:
    directions = 2 if bidirectional else 1
    out = x.new_empty([*x.shape[:2], (projected or hidden) * directions])
    steps = x.shape[0] * x.shape[1]
    kept = steps * layers * directions * hidden * (_GATES[mode] + _KEPT) * x.element_size() if train else 0
    return (out, torch.empty_like(hx), x.new_empty(0) if cx is None else torch.empty_like(cx),
            x.new_empty(kept, dtype=torch.uint8), x.new_empty(0))


def _backward_rule(x: Any, weight: Any, stride0: int, buffer: Any, hx: Any, cx: Any, *_: Any) -> Any:
    return (torch.empty_like(x), torch.empty_like(hx), x.new_empty(0) if cx is None else torch.empty_like(cx),
            [torch.empty_like(w) for w in weight])


SUBSTITUTION = Substitution(
    "recurrent", "cuDNN runs all layers and steps of a recurrent network in one call; the CPU runs a call for each.",
    cpu=frozenset({"aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward", "aten::slice", "aten::select",
                   "aten::squeeze", "aten::unsqueeze", "aten::stack", "aten::cat", "aten::zeros", "aten::transpose",
                   "aten::transpose_", "aten::select_backward", "aten::slice_backward", "aten::add", "aten::mm",
                   "aten::addmm", "aten::t", "aten::view", "aten::unbind", "aten::unsafe_chunk", "aten::unsafe_split",
                   "aten::sigmoid_", "aten::tanh_", "aten::sigmoid", "aten::tanh", "aten::mul", "aten::add_",
                   "aten::sigmoid_backward", "aten::tanh_backward", "aten::sum", "aten::detach", "aten::zeros_like",
                   "aten::empty_like", "aten::bernoulli_", "aten::div_", "aten::clone", "aten::_unsafe_view",
                   "aten::new_zeros", "aten::unsqueeze_", "aten::contiguous", "aten::zero_", "aten::empty",
                   "aten::_to_copy"}),
    # Its output lies as asked for, so that what follows need not copy it.
    gpu=frozenset({"aten::_cudnn_rnn", "aten::_cudnn_rnn_backward", "aten::addmm", "aten::view", "aten::t",
                   "aten::mm", "aten::_to_copy"}),
    install=_install)
