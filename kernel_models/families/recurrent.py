"""Recurrent layers: whole sequences in one call (cuDNN, MIOpen), and single fused cells.

Dimensions: sequence, batch, input size, hidden size, layers, directions. Kinds "rnn", "gru", "lstm" (1, 3 and 4 gates),
and these with "_backward"; "lstm_cell" and "gru_cell" are the pointwise part of one step.

    FLOPs  = ``sequence·batch·directions · gates·hidden · 2·(inputs + hidden)``, summed over layers. The first layer has
             the input size as inputs, the others ``directions·hidden``. Backward takes twice that.
    Bytes  = weights once, inputs and outputs of every layer once; backward twice that.

Source: the definitions (Appleyard et al. 2016, arXiv 1604.01946). They ignore that each step waits for the one before.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernel_models.families.registry import Inputs, Unpriceable, both, forward
from kernel_models.op_call import Family, OpCall, itemsize

_GATES = {"rnn": 1, "gru": 3, "lstm": 4}  # by definition
_MODES = ("rnn", "rnn", "lstm", "gru")


def recurrent(
    kind: str, sequence: int, batch: int, inputs: int, hidden: int, layers: int, directions: int, dtype: str
) -> Iterator[OpCall]:
    """Yield the call of a whole layer stack over a whole sequence; no call for an empty sequence."""
    if not sequence * batch * hidden:
        return
    gates = _GATES[kind.removesuffix("_backward")]
    wide = [inputs, *[directions * hidden] * (layers - 1)]
    weights = sum(directions * gates * hidden * (one + hidden + 2) for one in wide)
    products = sum(directions * gates * hidden * (one + hidden) for one in wide)
    reads = sequence * batch * sum(wide)
    writes = sequence * batch * directions * hidden * layers
    times, size = 2 if kind.endswith("_backward") else 1, itemsize(dtype)
    yield OpCall(Family.RECURRENT, kind, (sequence, batch, inputs, hidden, layers, directions), dtype,
                 flops=2.0 * times * sequence * batch * products,
                 bytes_read=float(times * (weights + reads) * size), bytes_written=float(times * writes * size))


_CUDNN = ("input, weight, weight_stride0, weight_buf, hx, cx, mode, hidden_size, proj_size, num_layers, batch_first, "
          "dropout, train, bidirectional")
_MIOPEN = ("input, weight, weight_stride0, hx, cx, mode, hidden_size, num_layers, batch_first, dropout, train, "
           "bidirectional")
_COMPOSITE = "(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)"


@both(Family.RECURRENT, f"aten::_cudnn_rnn({_CUDNN})", f"aten::miopen_rnn({_MIOPEN})", f"aten::lstm{_COMPOSITE}",
      f"aten::gru{_COMPOSITE}")
@forward(Family.RECURRENT,
         "aten::_cudnn_rnn_backward(input, weight, weight_stride0, weight_buf, hx, cx, output, grad_output, grad_hy, "
         "grad_cy, mode, hidden_size, proj_size, num_layers, batch_first, dropout, train, bidirectional)",
         "aten::miopen_rnn_backward(input, weight, weight_stride0, weight_buf, hx, cx, output, grad_output, grad_hy, "
         "grad_cy, mode, hidden_size, num_layers, batch_first, dropout, train, bidirectional)")
def _stack(op: Inputs) -> Iterator[OpCall]:
    source = op.tensor("input")
    if len(source.shape) != 3:
        raise Unpriceable(f"{op.name}: {source.shape}")
    sequence, batch = source.shape[:2] if not op.flag("batch_first") else (source.shape[1], source.shape[0])
    kind = _MODES[op.integer("mode", 2) % 4] if "mode" in op.names else op.short_name.split("_")[0]
    state = op.optional("hx")
    first = state or next(iter(op.optional_list("hx")), None)
    hidden = op.integer("hidden_size", 0)
    hidden = hidden or (first.shape[-1] if first is not None and first.shape else 0)
    if not hidden:
        raise Unpriceable("the hidden size")
    directions = 2 if op.flag("bidirectional") else 1
    layers = op.integer("num_layers", 0) or (first.shape[0] // directions if first is not None else 1)
    yield from recurrent(kind + op.suffix, sequence, batch, source.shape[2], hidden, layers, directions, source.dtype)


@forward(Family.RECURRENT,
         "aten::mkldnn_rnn_layer(input, weight0, weight1, weight2, weight3, hx_, cx_, reverse, batch_sizes, mode, "
         "hidden_size)",
         "aten::mkldnn_rnn_layer_backward(input, weight1, weight2, weight3, weight4, hx_, cx_tmp, output, hy_, cy_, "
         "grad_output, grad_hy, grad_cy, reverse, mode, hidden_size)")
def _one_layer(op: Inputs) -> Iterator[OpCall]:
    """Yield one direction of one layer on a CPU; its input has the sequence first even if ``batch_first`` is set."""
    source, state = op.tensor("input"), op.tensor("hx_")
    if len(source.shape) != 3 or not state.shape:
        raise Unpriceable(f"{op.name}: {source.shape}")
    kind = _MODES[op.integer("mode", 2) % 4] + op.suffix
    yield from recurrent(kind, source.shape[0], source.shape[1], source.shape[2], state.shape[-1], 1, 1, source.dtype)


@forward(Family.RECURRENT, "aten::_thnn_fused_lstm_cell(input_gates, hidden_gates, cx)",
         "aten::_thnn_fused_gru_cell(input_gates, hidden_gates, hx)")
def _cell(op: Inputs) -> Iterator[OpCall]:
    """Yield a cell: both gate tensors and the state are read, new states written, ten operations per gate value."""
    gates, state = op.tensor("input_gates"), op.tensor(op.names[2])
    batch, hidden = state.elements // max(state.shape[-1], 1), state.shape[-1]
    if batch * hidden:
        kind = "lstm_cell" if "lstm" in op.name else "gru_cell"
        many = 4 if kind == "lstm_cell" else 3
        size = itemsize(gates.dtype)
        yield OpCall(Family.RECURRENT, kind, (1, batch, 0, hidden, 1, 1), gates.dtype,
                     flops=10.0 * batch * hidden * many,
                     bytes_read=float(batch * hidden * size * (2 * many + 1)),
                     bytes_written=float(batch * hidden * size * (many + 2)))


@forward(Family.RECURRENT, "aten::_thnn_fused_lstm_cell_backward_impl(grad_hy, grad_cy, cx, cy, workspace)",
         "aten::_thnn_fused_lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace)",
         "aten::_thnn_fused_gru_cell_backward(grad_hy, workspace)")
def _cell_backward(op: Inputs) -> Iterator[OpCall]:
    work, lstm = op.tensor("workspace"), "lstm" in op.name
    many = 4 if lstm else 5
    hidden = work.shape[-1] // many
    batch = work.elements // max(work.shape[-1], 1)
    if batch * hidden:
        size = itemsize(work.dtype)
        yield OpCall(Family.RECURRENT, "lstm_cell_backward" if lstm else "gru_cell_backward",
                     (1, batch, 0, hidden, 1, 1), work.dtype, flops=15.0 * batch * hidden * many,
                     bytes_read=float(batch * hidden * size * (many + 4)),
                     bytes_written=float(batch * hidden * size * (many + 1)))
