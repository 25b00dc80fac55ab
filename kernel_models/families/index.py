"""Gather, scatter, indexing, masks, and the permutations of sparse features.

Dimensions: elements moved, contiguous elements of each piece, elements of the indexed tensor.

    FLOPs  = 0, or one addition an element for those that accumulate.
    Bytes  = elements read and written, and an index (int64 unless flagged) a piece; accumulating ones read twice
             what they write. Masks read the mask and, where the count of chosen elements is unknown, assume all.

Source: the definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from kernel_models.families.elementwise import elementwise
from kernel_models.families.registry import Inputs, Unpriceable, backward, dimension, forward, pattern, without_gradient
from kernel_models.op_call import Family, OpCall, TensorSpec, broadcast, itemsize

_ACCUMULATE = ("scatter_add", "index_add", "scatter_reduce", "index_put_accumulate", "segment_sum", "bincount", "put",
               "index_reduce")


def index(
    kind: str, elements: int, inner: int, source_elements: int, dtype: str, index_dtype: str = "int64",
    flags: tuple[str, ...] = (),
) -> Iterator[OpCall]:
    """Yield the call of one indexed copy; none if it moves no elements."""
    if not elements:
        return
    size, adds = itemsize(dtype), kind in _ACCUMULATE
    inner = max(inner, 1)
    if index_dtype != "int64":
        flags = (*flags, f"index_{index_dtype}")
    yield OpCall(
        Family.INDEX, kind, (elements, inner, source_elements), dtype, flags=tuple(sorted(flags)),
        flops=float(elements if adds else 0),
        bytes_read=float(elements * size * (2 if adds else 1) + -(-elements // inner) * itemsize(index_dtype)),
        bytes_written=float(elements * size),
    )


@forward(Family.INDEX, "aten::index_select(self, dim, index)")
def _index_select(op: Inputs) -> Iterator[OpCall]:
    source, chosen = op.tensor("self"), op.tensor("index")
    at = dimension(op.integer("dim", 0), len(source.shape))
    inner = prod(source.shape[at + 1:])
    elements = prod(source.shape[:at]) * chosen.elements * inner
    yield from index("index_select", elements, inner, source.elements, source.dtype, chosen.dtype)


@forward(Family.INDEX, "aten::gather(self, dim, index)", "aten::take_along_dim(self, indices)",
         "aten::take(self, index)")
def _gather(op: Inputs) -> Iterator[OpCall]:
    chosen = op.tensor(op.names[-1])
    source = op.tensor("self")
    yield from index(op.short_name, chosen.elements, _shared_by(chosen), source.elements, source.dtype, chosen.dtype)


def _shared_by(chosen: TensorSpec) -> int:
    """Return the number of contiguous elements per stored index: an expanded index (an embedding's) picks rows."""
    inner = 1
    for size, step in zip(reversed(chosen.shape), reversed(chosen.strides), strict=True):
        if step != 0:
            break
        inner *= max(size, 1)
    return inner


@forward(Family.INDEX, "aten::scatter(self, dim, index, src)", "aten::scatter_add(self, dim, index, src)",
         "aten::scatter_reduce(self, dim, index, src)", "aten::_scatter_reduce(self, dim, index, src)")
def _scatter(op: Inputs) -> Iterator[OpCall]:
    target, chosen = op.tensor("self"), op.tensor("index")
    yield from index(op.short_name.lstrip("_"), chosen.elements, 1, target.elements, target.dtype, chosen.dtype)


@forward(Family.INDEX, "aten::index_add(self, dim, index, source)", "aten::index_copy(self, dim, index, source)",
         "aten::index_reduce(self, dim, index, source)", "aten::_index_copy(self, dim, index, source)")
def _index_add(op: Inputs) -> Iterator[OpCall]:
    target, chosen, source = op.tensor("self"), op.tensor("index"), op.tensor("source")
    yield from index(op.short_name.lstrip("_"), source.elements, source.elements // max(chosen.elements, 1),
                     target.elements, target.dtype, chosen.dtype)


@forward(Family.INDEX, "aten::index_fill(self, dim, index)")
def _index_fill(op: Inputs) -> Iterator[OpCall]:
    target, chosen = op.tensor("self"), op.tensor("index")
    at = dimension(op.integer("dim", 0), len(target.shape))
    piece = target.elements // max(target.shape[at], 1)
    yield from index("index_fill", piece * chosen.elements, prod(target.shape[at + 1:]), target.elements, target.dtype,
                     chosen.dtype)


@forward(Family.INDEX, "aten::index(self, indices)", "aten::_unsafe_index(self, indices)")
def _index(op: Inputs) -> Iterator[OpCall]:
    """Yield an indexing; without recorded indices, the whole tensor is assumed to be read."""
    source, chosen = op.tensor("self"), op.optional_list("indices")
    if not chosen:
        yield from index("index", source.elements, 1, source.elements, source.dtype, flags=("assumed",))
        return
    picked, inner = _chosen(source, chosen)
    yield from index("index", picked * inner, inner, source.elements, source.dtype)


def _chosen(source: TensorSpec, indices: list[TensorSpec]) -> tuple[int, int]:
    """Return how many places of a tensor the indices choose, and the elements at each place. A mask covers as many
    dimensions as it has, and is assumed to choose all elements."""
    pieces, along = [], 0
    for each in indices:
        sizes = source.shape[along:along + len(each.shape)]
        # Some profilers record no type of tensors in lists: an index with the tensor's own sizes is a mask.
        mask = each.dtype in ("bool", "uint8") or (len(sizes) > 1 and each.shape == sizes)
        pieces.append((each.elements,) if mask else each.shape)
        along += len(each.shape) if mask else 1
    return prod(broadcast(pieces)), prod(source.shape[along:])


@forward(Family.INDEX, "aten::index_put(self, indices, values, accumulate)",
         "aten::_index_put_impl(self, indices, values, accumulate)",
         "aten::_unsafe_index_put(self, indices, values, accumulate)")
def _index_put(op: Inputs) -> Iterator[OpCall]:
    target, chosen, values = op.tensor("self"), op.optional_list("indices"), op.tensor("values")
    picked, inner = _chosen(target, chosen) if chosen else (0, 0)
    # Complete values give the size of the pieces; a list of indices does not show the dimensions it skips.
    told = picked > 0 and values.elements > 1 and not values.elements % picked
    elements = values.elements if told else max(values.elements, picked * inner)
    kind = "index_put_accumulate" if op.flag("accumulate") else "index_put"
    yield from index(kind, elements, elements // picked if picked else 1, target.elements, target.dtype)


@forward(Family.INDEX, "aten::nonzero(self)", "aten::masked_select(self, mask)", "aten::argwhere(self)",
         "aten::masked_scatter(self, mask)", "aten::bincount(self)", "aten::histc(self)",
         "aten::repeat_interleave(self, repeats)", "aten::one_hot(self)", "aten::nonzero_static(self)",
         "aten::_masked_scale(self, mask)", "aten::masked_scatter_backward(grad_output, mask)", "aten::col2im(self)",
         "fbgemm::block_bucketize_sparse_features(lengths, indices)",
         "fbgemm::jagged_to_padded_dense(lengths, indices)", "fbgemm::expand_into_jagged_permute(lengths, indices)")
def _selection(op: Inputs) -> Iterator[OpCall]:
    """Yield a selection, element by element; all elements are assumed to be chosen."""
    source = op.optional("indices") or op.tensor(op.names[0])
    kind = "masked_select" if op.is_backward else op.short_name
    yield from index(kind, source.elements, 1, source.elements, source.dtype)


@forward(Family.INDEX, "aten::im2col(self, kernel_size, dilation, padding, stride)")
def _windows(op: Inputs) -> Iterator[OpCall]:
    """Yield the copy of all windows; a value is copied once for each window that covers it."""
    source, kernel = op.tensor("self"), op.ints("kernel_size")
    dilation, padding, stride = (op.ints(name) for name in ("dilation", "padding", "stride"))
    if not (kernel and dilation and padding and stride):
        raise Unpriceable("the windows")
    places = prod((size + 2 * pad - wide * (side - 1) - 1) // step + 1 for size, side, wide, pad, step in zip(
        source.shape[-2:], kernel, dilation, padding, stride, strict=True))
    yield from index("im2col", prod(source.shape[:-2]) * prod(kernel) * places, 1, source.elements, source.dtype)


@forward(Family.INDEX, "aten::searchsorted(sorted_sequence, self)", "aten::bucketize(self, boundaries)")
def _search(op: Inputs) -> Iterator[OpCall]:
    values = op.optional("self") or op.tensor(op.names[0])
    table = op.tensor("sorted_sequence" if "sorted_sequence" in op.names else "boundaries")
    yield from index("search", values.elements, 1, table.elements, values.dtype)


@forward(Family.INDEX, "fbgemm::permute_2D_sparse_data(permute, lengths, values, weights)",
         "fbgemm::permute_sparse_data(permute, lengths, values, weights)",
         "fbgemm::permute_sparse_features(permute, lengths, values, weights)",
         "fbgemm::permute_1D_sparse_data(permute, lengths, values, weights)")
def _permute_features(op: Inputs) -> Iterator[OpCall]:
    """Yield the permutation of lengths, then of each feature's values; values of one length stay contiguous."""
    lengths, values, weights = op.tensor("lengths"), op.tensor("values"), op.optional("weights")
    pieces = max(lengths.elements, 1)
    yield from index("permute_sparse", values.elements, values.elements // pieces, values.elements, values.dtype)
    yield from index("permute_lengths", lengths.elements, 1, lengths.elements, lengths.dtype)
    if weights is not None:
        yield from index("permute_sparse", weights.elements, weights.elements // pieces, weights.elements,
                         weights.dtype)


@forward(Family.INDEX, "fbgemm::permute_pooled_embs_auto_grad(pooled_embs, offset_dim_list)",
         "fbgemm::permute_pooled_embs(pooled_embs, offset_dim_list)",
         "fbgemm::recat_embedding_grad_output_mixed_D_batch(grad_output, dim_sum_per_rank)",
         "fbgemm::recat_embedding_grad_output_mixed_D(grad_output, dim_sum_per_rank)")
def _permute_pooled(op: Inputs) -> Iterator[OpCall]:
    """Yield the permutation of columns that moves whole embeddings."""
    rows, offsets = op.tensor(op.names[0]), op.optional(op.names[1])
    pieces = offsets.elements - 1 if offsets is not None and offsets.elements > 1 else 1
    columns = rows.shape[-1] if rows.shape else 1
    yield from index("permute_pooled", rows.elements, columns // pieces, rows.elements, rows.dtype)


@pattern(Family.INDEX, r"torch::autograd::CppNode<fbgemm_gpu::PermutePooledEmbsFunction.*>")
def _permute_pooled_backward(op: Inputs) -> Iterator[OpCall]:
    grad = next(iter(op.tensors()), None) or op.missing("gradient")
    yield from index("permute_pooled", grad.elements, grad.shape[-1] if grad.shape else 1, grad.elements, grad.dtype)


@forward(Family.INDEX, "fbgemm::bounds_check_indices(rows_per_table, indices, offsets)",
         "fbgemm::bounds_check_indices_v2(rows_per_table, indices, offsets)")
def _bounds_check(op: Inputs) -> Iterator[OpCall]:
    indices = op.tensor("indices")
    yield from index("bounds_check", indices.elements, 1, op.tensor("rows_per_table").elements, indices.dtype)


@forward(Family.INDEX, "_C_cache_ops::reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping)",
         "_C_cache_ops::reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)",
         "vllm::unified_kv_cache_update(key, value)")
def _cache_update(op: Inputs) -> Iterator[OpCall]:
    """Yield the storing of the step's keys and values at each token's place in the cache."""
    key = op.tensor("key")
    if not key.shape:
        raise Unpriceable("a number has no tokens")
    cache = op.optional("key_cache")
    inner = key.elements // max(key.shape[0], 1)
    yield from index("cache_update", 2 * key.elements, inner, cache.elements if cache is not None else key.elements,
                     key.dtype)


@backward(Family.INDEX, "aten::index_select(self, dim, index)", "aten::gather(self, dim, index)",
          "aten::index(self, indices)")
def _accumulate_back(op: Inputs) -> Iterator[OpCall]:
    """Yield zeros of the tensor's size, then the addition of the gradients at the indexed places."""
    source = op.tensor("self")
    yield from elementwise("fill", [], source.shape, source.dtype)
    rule = {"index_select": _index_select, "gather": _gather, "index": _index}[op.short_name]
    kinds = {"index_select": "index_add", "gather": "scatter_add", "index": "index_put_accumulate"}
    for call in rule(op):
        elements, inner, all_elements = call.dims
        yield from index(kinds[op.short_name], elements, inner, all_elements, call.dtype, flags=tuple(
            flag for flag in call.flags if not flag.startswith("index_")))


without_gradient("aten::nonzero", "aten::searchsorted", "aten::bucketize", "aten::bincount", "aten::one_hot")
