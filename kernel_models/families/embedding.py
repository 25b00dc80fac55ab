"""Embedding tables: lookups, bags of lookups, fused lookups of several tables, and their gradients.

Dimensions: number of lookups, output rows (bags; = lookups without pooling), rows and columns of a table, tables.

    FLOPs  = lookups·columns with pooling (one addition each), else 0; fused backward with the optimizer 5 times that.
    Bytes  = forward: ``lookups·columns`` of the table + the indices read, ``bags·columns`` written.
             Backward, dense: the gradient and indices read, and the *whole* gradient table written (zeros first).
             Backward, fused: the gradient and indices read, every row looked up read and written once.
             Backward, sparse: the gradient and indices read, a row of gradient written for every look-up.

Source: the definition (Lin et al. 2022, arXiv 2201.07821, section IV for the fused ones). Rows looked up twice count
twice; ``OpCall.accesses`` holds how often rows repeat, and their tables and bags, where known. Flags: "weighted";
"assumed" where columns are not recorded; "host_rows" where rows come from the host's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import Any

from kernel_models.families.registry import Inputs, Unpriceable, both, forward
from kernel_models.op_call import Family, OpCall, TablePart, itemsize, with_host_rows
from tracer.lookup_data.noted import noted_tables
from tracer.lookup_data.tables import QUANTIZED, TABLE_DTYPES, EmbeddingTable, stored_row_bytes

_COLUMNS = 128
"""Columns of a table where none are recorded: in the middle of published recommendation models' 16 to 320."""


def embedding(
    kind: str, lookups: int, bags: int, table_rows: int, columns: int, tables: int, dtype: str, index_dtype: str,
    flags: tuple[str, ...] = (), noted: Sequence[EmbeddingTable] = (),
) -> Iterator[OpCall]:
    """Yield the call. Kinds: "embedding", "bag", with "_backward" (dense), "_backward_sparse" or "_backward_fused".

    ``noted`` are the tables that the operation is known to look up (``tracer.lookup_data.noted``), for any batch.
    """
    if not lookups or not columns:
        return
    size, pooled = itemsize(dtype), kind.startswith("bag")
    of_row, of_output = float(columns * size), columns * size
    if dtype in QUANTIZED:
        of_row, of_output = stored_row_bytes(dtype, columns), columns * itemsize("fp16")
    index_bytes = lookups * itemsize(index_dtype) + (bags * itemsize(index_dtype) if pooled else 0)
    index_bytes += lookups * itemsize("fp32") if "weighted" in flags else 0
    rows, out = lookups * of_row, bags * of_output
    if kind.endswith("_fused"):
        read, written, flops = out + rows + index_bytes, rows, 5.0 * lookups * columns
    elif kind.endswith("_sparse"):
        read, written, flops = rows + index_bytes, rows, 0.0
    elif kind.endswith("_backward"):
        read, written, flops = out + index_bytes, max(table_rows * tables, 1) * of_row, float(lookups * columns)
    else:
        read, written, flops = rows + index_bytes, out, float(lookups * columns if pooled else 0)
    if index_dtype != "int64":
        flags = (*flags, f"index_{index_dtype}")
    parts = _accesses(noted, kind, lookups, bags, table_rows, columns, dtype, "weighted" in flags)
    yield OpCall(Family.EMBEDDING, kind, (lookups, bags, table_rows, columns, tables), dtype,
                 flags=with_host_rows(flags, parts), flops=flops, bytes_read=float(read), bytes_written=float(written),
                 accesses=parts)


def with_tables(call: OpCall, noted: Sequence[EmbeddingTable]) -> OpCall:
    """Return a look-up, or its gradient, with the tables ``noted`` instead of its own; other calls unchanged."""
    if call.family is not Family.EMBEDDING or not noted or "unsized" in call.flags:
        return call
    lookups, bags, rows, columns, _ = call.dims
    parts = _accesses(noted, call.kind, lookups, bags, rows, columns, call.dtype, "weighted" in call.flags)
    return replace(call, accesses=parts, flags=with_host_rows(call.flags, parts))


def _accesses(noted: Sequence[EmbeddingTable], kind: str, lookups: int, bags: int, rows: int, columns: int, dtype: str,
              weighted: bool) -> tuple[TablePart, ...]:
    """Return each table's share of the look-ups: its bags in the batch in which it was noted, scaled to this batch."""
    pooled, total = kind.startswith("bag"), sum(table.bag for table in noted)
    fused = kind.endswith("_fused")
    optimizer: dict[str, Any] = {} if fused else {"optimizer": "none"}
    stored = dtype if dtype in TABLE_DTYPES and not (fused and dtype in QUANTIZED) else "fp32"
    found = []
    for table in noted:
        own = lookups * table.bag / total if total else 0.0
        samples = bags / len(noted) if pooled else own
        if not own or not samples:
            continue
        bag = own / samples
        whole: dict[str, Any] = {"columns": columns} if len(noted) == 1 else {}
        longest = max(round(table.longest_bag * bag / table.bag), ceil(bag)) if table.longest_bag else 0
        found.append(_part(replace(
            table.resized(rows or table.rows) if len(noted) == 1 else table, name="", bag=bag,
            longest_bag=longest if pooled else 1, bag_quantiles=(), dtype=stored, weighted=weighted,
            pooling="sum" if pooled else "none", **whole, **optimizer), round(samples)))
    return tuple(found)


@lru_cache(maxsize=4096)
def _part(table: EmbeddingTable, samples: int) -> TablePart:
    return TablePart.of(table, samples)


@both(Family.EMBEDDING, "aten::embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse)")
def _embedding(op: Inputs) -> Iterator[OpCall]:
    weight, indices = op.tensor("weight"), op.tensor("indices")
    if len(weight.shape) != 2:
        raise Unpriceable(f"{op.name}: table {weight.shape}")
    yield from embedding(_kind(op, "embedding"), indices.elements, indices.elements, *weight.shape, 1, weight.dtype,
                         indices.dtype, noted=noted_tables(op.text("indices")))


def _kind(op: Inputs, kind: str) -> str:
    """Return the kind of a look-up, or of its gradient: sparse by the operation's name, or by its argument."""
    sparse = op.is_backward and ("sparse" in op.name or op.flag("sparse"))
    return kind + op.suffix + ("_sparse" if sparse else "")


_BAG = "(weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset)"


@both(Family.EMBEDDING, f"aten::_embedding_bag{_BAG}", f"aten::embedding_bag{_BAG}")
@forward(Family.EMBEDDING, f"aten::_embedding_bag_forward_only{_BAG}")
def _bag(op: Inputs) -> Iterator[OpCall]:
    weight, indices, offsets = op.tensor("weight"), op.tensor("indices"), op.optional("offsets")
    if len(weight.shape) != 2:
        raise Unpriceable(f"{op.name}: table {weight.shape}")
    bags = indices.shape[0] if offsets is None else offsets.elements - int(op.flag("include_last_offset"))
    flags = ("weighted",) if op.has("per_sample_weights") else ()
    yield from embedding(_kind(op, "bag"), indices.elements, bags, *weight.shape, 1, weight.dtype, indices.dtype,
                         flags, noted_tables(op.text("indices")))


@forward(Family.EMBEDDING, "aten::embedding_dense_backward(grad_output, indices, num_weights)",
         "aten::embedding_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq, sparse)",
         "aten::embedding_sparse_backward(grad_output, indices, num_weights)",
         "aten::_embedding_bag_dense_backward(grad_output, indices, offset2bag, bag_size, maximum_indices, "
         "num_weights)",
         "aten::_embedding_bag_backward(grad_output, indices, offsets, offset2bag, bag_size, maximum_indices, "
         "num_weights, scale_grad_by_freq, mode, sparse)",
         "aten::_embedding_bag_sparse_backward(grad_output, indices, offsets, offset2bag, bag_size, num_weights)")
def _table_backward(op: Inputs) -> Iterator[OpCall]:
    grad, indices, pooled = op.tensor("grad_output"), op.tensor("indices"), "bag" in op.name
    yield from embedding(_kind(op, "bag" if pooled else "embedding"), indices.elements,
                         grad.shape[0] if pooled else indices.elements, op.integer("num_weights", 0), grad.shape[-1], 1,
                         grad.dtype, indices.dtype, noted=noted_tables(op.text("indices")))


_OPTIMIZERS = ("sgd", "approx_sgd", "adagrad", "approx_adagrad", "rowwise_adagrad", "approx_rowwise_adagrad", "adam",
               "partial_rowwise_adam", "lamb", "partial_rowwise_lamb", "lars_sgd", "none",
               "rowwise_adagrad_with_counter", "rowwise_adagrad_with_weight_decay")
_DENSE = ("fbgemm::dense_embedding_codegen_lookup_function(dev_weights, weights_offsets, D_offsets, total_D, max_D, "
          "hash_size_cumsum, total_hash_size_bits, indices, offsets, pooling_mode, indice_weights)")
_FUSED = tuple(
    f"fbgemm::split_embedding_codegen_lookup_{optimizer}_function(placeholder, dev_weights, uvm_weights, "
    "lxu_cache_weights, weights_placements, weights_offsets, D_offsets, total_D, max_D, hash_size_cumsum, "
    "total_hash_size_bits, indices, offsets, pooling_mode, indice_weights)" for optimizer in _OPTIMIZERS)


@both(Family.EMBEDDING, *_FUSED, _DENSE)
def _fused_tables(op: Inputs) -> Iterator[OpCall]:
    """Yield look-ups of several tables in one kernel; offsets hold the bags of all tables, and an end."""
    kind = f"bag{op.suffix}" + ("_fused" if op.is_backward and "dense" not in op.name else "")
    weights, indices, offsets = op.tensor("dev_weights"), op.tensor("indices"), op.tensor("offsets")
    if not weights.elements and "uvm_weights" in op.names:
        weights = max((op.tensor(name) for name in ("uvm_weights", "lxu_cache_weights")), key=lambda t: t.elements)
    tables = max(op.tensor("D_offsets").elements - 1, 1)
    total, flags = op.number("total_D"), ["weighted"] if op.has("indice_weights") else []
    # Row-wise Adagrad keeps a number per row: the longest vector of floats that divides the weights gives the columns.
    state = [t.elements for t in op.tensors()[11:] if t.dtype == "fp32" and 1 < t.elements < weights.elements]
    if total:
        columns = max(round(total / tables), 1)
    elif "rowwise" in op.name and state and weights.elements // max(state) >= 4:
        columns = weights.elements // max(state)
    else:
        columns = _COLUMNS
        flags.append("assumed")
    rows = weights.elements // max(columns * tables, 1)
    yield from embedding(kind, indices.elements, max(offsets.elements - 1, 0), rows, columns, tables, weights.dtype,
                         indices.dtype, tuple(flags), noted_tables(op.text("indices")))


_PRECISIONS = {"max_int4_D": "int4", "max_int8_D": "int8", "max_float16_D": "fp16", "max_float32_D": "fp32"}


@forward(Family.EMBEDDING,
         "fbgemm::int_nbit_split_embedding_codegen_lookup_function(dev_weights, uvm_weights, weights_placements, "
         "weights_offsets, weights_tys, D_offsets, total_D, max_int2_D, max_int4_D, max_int8_D, max_float16_D, "
         "max_float32_D, indices, offsets, pooling_mode, indice_weights, output_dtype, lxu_cache_weights)")
def _inferred_tables(op: Inputs) -> Iterator[OpCall]:
    """Yield look-ups of tables without gradients; the widest of several precisions is used for all.

    Weights are bytes. All are in one memory: the device's if it has any, else the host's, with a cache if there is one.
    """
    near, far, kept = (op.optional(name) for name in ("dev_weights", "uvm_weights", "lxu_cache_weights"))
    indices, offsets = op.tensor("indices"), op.tensor("offsets")
    tables = max(op.tensor("D_offsets").elements - 1, 1)
    stored = [dtype for name, dtype in _PRECISIONS.items() if op.integer(name, 0) > 0]
    dtype, total = stored[-1] if stored else "int8", op.integer("total_D", 0)
    columns = 2 * max(round(total / tables / 2), 1) if total else _COLUMNS  # even, because int4 fills whole bytes
    flags = ["weighted"] if op.has("indice_weights") else []
    if len(stored) != 1 or not total:
        flags.append("assumed")
    on_device = near is not None and near.elements > 0
    held = near if on_device else far
    rows = max(int((held.elements if held is not None else 0) / (stored_row_bytes(dtype, columns) * tables)), 1)
    bags = max(offsets.elements - 1, 0)
    noted = noted_tables(op.text("indices"))
    if not on_device and far is not None and far.elements and not noted and bags:
        share = min(kept.elements / far.elements, 1.0) if kept is not None else 0.0
        noted = tuple(EmbeddingTable(
            f"table {i}", rows, columns, dtype, indices.elements / bags, optimizer="none", output_dtype="fp16",
            location="uvm_cached" if share else "uvm", cache_load_factor=share or 1.0) for i in range(tables))
    yield from embedding("bag", indices.elements, bags, rows, columns, tables, dtype, indices.dtype, tuple(flags),
                         noted)


@forward(Family.EMBEDDING, *(f"torch::autograd::CppNode<SplitLookupFunction_{optimizer}_Op>(grad)"
                             for optimizer in (*_OPTIMIZERS, "Dense")))
def _fused_backward_node(op: Inputs) -> Iterator[OpCall]:
    """Yield fused tables' backward where only the gradient [samples, columns of all tables] was recorded.

    One lookup per bag is assumed, in tables of 128 columns. ``kernel_models.trace_calls`` uses the forward operation's
    arguments instead where it is known.
    """
    grad = op.tensor("grad")
    samples, total = grad.shape[0], grad.elements // max(grad.shape[0], 1)
    tables = max(total // _COLUMNS, 1)
    yield from embedding("bag_backward_fused", samples * tables, samples * tables, 0, total // tables, tables,
                         grad.dtype, "int64", ("assumed",))
