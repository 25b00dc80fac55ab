"""Copies, casts, concatenation, transfers, random numbers, and views, which copy nothing.

Copies: elements, and how many are contiguous in both tensors (= elements: one run). A cast is a copy that changes the
element type; its dtype is the target's. Concatenation: elements of the output, tensors joined, and the mean length of
the pieces that are copied in one run. Transfers and memsets: bytes.

    FLOPs  = 0
    Bytes  = every element read once and written once; a broadcast source's distinct elements

Source: the definition. Kinds of transfers: "h2d", "d2h", "d2d", "p2p"; flags "pinned" or "pageable": the host's side.

Operations without device work are views, metadata, reservations of memory, and bookkeeping. Source: PyTorch 2.13's
schemas (operations whose result aliases an input that they do not write), and operations that only look at sizes or
reserve memory. Composites such as ``aten::reshape`` or ``aten::contiguous`` copy in an operation of their own, which is
priced.

Random numbers and dropout. Dimensions: elements.

    FLOPs  = 10 an element (a Philox round's share; Salmon et al. 2011), one more for dropout's scaling
    Bytes  = elements written; dropout reads its input and writes output and a one-byte mask

Source: the definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from kernel_models.families.elementwise import elementwise
from kernel_models.families.reduction import sort
from kernel_models.families.registry import (
    Inputs,
    Unpriceable,
    backward,
    dimension,
    forward,
    free,
    mixed_types,
    without_gradient,
    words,
)
from kernel_models.op_call import Family, OpCall, TensorSpec, contiguous_strides, itemsize


def copy(source: TensorSpec, target: TensorSpec) -> Iterator[OpCall]:
    """Yield the call of one copy or cast; none if there is nothing to copy."""
    elements = target.elements
    if not elements:
        return
    run = _common_run(source, target)
    layout = "" if run == elements else "broadcast" if source.stored < elements else "strided"
    flags = mixed_types([source], target.dtype)
    if source.stored < elements:
        flags = tuple(sorted((*flags, f"from={source.stored}")))
    yield OpCall(
        Family.COPY, "copy" if source.dtype == target.dtype else "cast", (elements, run), target.dtype, layout, flags,
        bytes_read=float(min(source.stored, elements) * itemsize(source.dtype)),
        bytes_written=float(elements * itemsize(target.dtype)),
    )


def _common_run(source: TensorSpec, target: TensorSpec) -> int:
    """Return the contiguous elements of a run in both tensors, in the target's order of dimensions."""
    if source.shape != target.shape:
        return target.shape[-1] if target.shape else 1
    expected = 1
    for at in reversed(target.order):
        if source.strides[at] != expected or target.strides[at] != expected:
            break
        expected *= target.shape[at]
    return expected


def concat(kind: str, tensors: list[TensorSpec], dim: int, dtype: str) -> Iterator[OpCall]:
    """Yield the call that joins these tensors along a dimension, or splits a tensor into these."""
    tensors = [tensor for tensor in tensors if tensor.elements]
    if not tensors:
        return
    elements = sum(tensor.elements for tensor in tensors)
    outer = prod(tensors[0].shape[:dimension(dim, len(tensors[0].shape))])
    moved = float(elements * itemsize(dtype))
    yield OpCall(
        Family.CONCAT, kind, (elements, len(tensors), max(elements // (outer * len(tensors)), 1)), dtype,
        bytes_read=moved, bytes_written=moved,
    )


def transfer(kind: str, size: int, flags: tuple[str, ...] = ()) -> OpCall:
    """Return the call of a transfer from one memory to another."""
    return OpCall(Family.TRANSFER, kind, (size,), "uint8", flags=flags, bytes_read=float(size),
                  bytes_written=float(size))


def memset(size: int) -> OpCall:
    """Return the call that sets bytes to a value."""
    return OpCall(Family.MEMSET, "memset", (size,), "uint8", bytes_written=float(size))


@forward(Family.COPY, "aten::copy(self, src)")
def _copy(op: Inputs) -> Iterator[OpCall]:
    yield from copy(op.tensor("src"), op.tensor("self"))


@forward(Family.COPY, "aten::clone(self)", "aten::contiguous(self)", "aten::repeat(self, repeats)",
         "aten::flip(self)", "aten::roll(self)", "aten::rot90(self)", "aten::_pack_padded_sequence(self)",
         "aten::tile(self, dims)", "aten::channel_shuffle(self)", "aten::pixel_shuffle(self)",
         "aten::pixel_unshuffle(self)")
def _clone(op: Inputs) -> Iterator[OpCall]:
    source = op.tensor("self")
    if op.short_name == "contiguous" and source.strides == contiguous_strides(source.shape):
        return
    times = prod(op.ints(op.names[1]) or (1,)) if len(op.names) > 1 else 1
    if times > 1:
        elements = source.elements * times
        yield OpCall(
            Family.COPY, "copy", (elements, source.shape[-1] if source.shape else 1), source.dtype, "broadcast",
            (f"from={source.stored}",), bytes_read=float(source.bytes),
            bytes_written=float(elements * itemsize(source.dtype)))
        return
    # A clone of a dense source keeps its order of dimensions.
    same = source.is_dense and op.short_name == "clone" and not op.arguments[1:2]
    yield from copy(source, source if same else TensorSpec(source.shape, source.dtype))


@forward(Family.COPY, "aten::_to_copy(self, dtype)", "aten::to(self, dtype)", "aten::type_as(self, other)")
def _to(op: Inputs) -> Iterator[OpCall]:
    """Yield a cast if the element type changes; ``aten::to`` with an equal or unrecorded type is free."""
    source = op.tensor("self")
    other = op.optional("other")
    wanted = other.dtype if other is not None else op.dtype("dtype")
    if op.short_name == "_to_copy" or wanted not in ("", source.dtype):
        dense = source.stride if source.is_dense else None
        yield from copy(source, TensorSpec(source.shape, wanted or source.dtype, dense))


@forward(Family.COPY, "aten::constant_pad_nd(self, pad)", "aten::reflection_pad1d(self, pad)",
         "aten::reflection_pad2d(self, pad)", "aten::replication_pad1d(self, pad)",
         "aten::replication_pad2d(self, pad)", "aten::replication_pad3d(self, pad)", "aten::pad(self, pad)")
def _pad(op: Inputs) -> Iterator[OpCall]:
    source, pad = op.tensor("self"), op.ints("pad") or ()
    shape = list(source.shape)
    for i in range(0, len(pad) - 1, 2):
        shape[-1 - i // 2] += pad[i] + pad[i + 1]
    target = TensorSpec(tuple(shape), source.dtype)
    if source.elements and target.elements:
        yield OpCall(
            Family.COPY, "pad", (target.elements, source.shape[-1]), source.dtype, "strided",
            (f"from={source.stored}",), bytes_read=float(source.bytes), bytes_written=float(target.bytes))


@forward(Family.COPY, *(f"aten::{name}(self)" for name in (
    "_reshape_copy", "lift_fresh_copy", "view_copy", "expand_copy", "permute_copy", "transpose_copy", "t_copy",
    "slice_copy", "select_copy", "squeeze_copy", "unsqueeze_copy", "alias_copy", "detach_copy", "as_strided_copy")))
def _view_copy(op: Inputs) -> Iterator[OpCall]:
    """Yield the copy of a view; the view is assumed to be as large as the whole tensor."""
    source = op.tensor("self")
    yield from copy(source, TensorSpec(source.shape, source.dtype))


@forward(Family.COPY, "aten::slice_backward(grad_output, input_sizes)",
         "aten::select_backward(grad_output, input_sizes)",
         "aten::diagonal_backward(grad_output, input_sizes)", "aten::unfold_backward(grad_in, input_sizes)")
def _view_backward(op: Inputs) -> Iterator[OpCall]:
    """Yield zeros of the viewed tensor's size, then a copy of the gradient into its place."""
    grad, size = op.tensor(op.names[0]), op.ints("input_sizes")
    if size is None:
        op.missing("size")
    yield from elementwise("fill", [], size, grad.dtype)
    yield from copy(grad, grad)


@forward(Family.COPY, "aten::slice_scatter(self, src)", "aten::select_scatter(self, src)")
def _view_scatter(op: Inputs) -> Iterator[OpCall]:
    """Yield a copy of the whole tensor, then a copy of the part into it."""
    for tensor in (op.tensor("self"), op.tensor("src")):
        yield from copy(tensor, tensor)


@forward(Family.COPY, *(f"aten::{kind}_pad{n}d_backward(grad_output, self)" for kind in ("reflection", "replication")
                        for n in (1, 2, 3)))
def _pad_backward(op: Inputs) -> Iterator[OpCall]:
    grad, source = op.tensor("grad_output"), op.tensor("self")
    if source.elements:
        yield OpCall(
            Family.COPY, "pad_backward", (grad.elements, grad.shape[-1]), grad.dtype, "strided",
            (f"to={source.elements}",), flops=float(grad.elements), bytes_read=float(grad.bytes),
            bytes_written=float(source.elements * itemsize(grad.dtype)))


@forward(Family.CONCAT, "aten::cat(tensors, dim, out)", "aten::concat(tensors, dim)", "aten::_cat(tensors, dim)",
         "aten::concatenate(tensors, dim)", "aten::stack(tensors, dim, out)", "aten::_stack(tensors, dim)",
         "aten::hstack(tensors)", "aten::vstack(tensors)", "aten::_chunk_cat(tensors, dim)",
         "aten::flatten_dense_tensors(tensors)")
def _cat(op: Inputs) -> Iterator[OpCall]:
    """Yield a concatenation; a list that was not recorded has the size of the output tensor.

    Older profilers put the output first.
    """
    tensors = op.optional_list("tensors")
    out = op.optional("tensors") or op.optional("out")
    if not tensors and out is None:
        op.missing("tensors")
    dim = op.integer("dim", 0)
    if tensors and (rank := len(tensors[0].shape)):
        if op.name.endswith(("::stack", "::_stack")):
            dim %= rank + 1
            tensors = [TensorSpec((*each.shape[:dim], 1, *each.shape[dim:]), each.dtype) for each in tensors]
        elif op.name.endswith("::hstack"):
            dim = min(rank - 1, 1)
    yield from concat("cat", tensors or [out for out in (out,) if out is not None], dim if tensors else 0,
                      out.dtype if out is not None else tensors[0].dtype)


@forward(Family.CONCAT, "aten::split_with_sizes_copy(self, split_sizes, dim)",
         "aten::split_copy(self, split_sizes, dim)",
         "aten::unbind_copy(self)")
def _split(op: Inputs) -> Iterator[OpCall]:
    source = op.tensor("self")
    at = dimension(op.integer("dim", 0), len(source.shape))
    sizes = op.ints("split_sizes")
    pieces = sizes or (source.shape[at] if source.shape else 1,)
    yield from concat("split", [
        TensorSpec((*source.shape[:at], size, *source.shape[at + 1:]), source.dtype) for size in pieces
    ], at, source.dtype)


@forward(Family.CONCAT, "fsdp::all_gather_copy_in(all_gather_inputs, all_gather_output)",
         "fsdp::chunk_cat(tensors, dim, num_chunks, out)")
def _copied_in(op: Inputs) -> Iterator[OpCall]:
    """Yield FSDP2's copies of a block's shards, or of its gradients, into one buffer."""
    tensors = op.optional_list(op.names[0])
    if not tensors:
        op.missing(op.names[0])
    yield from concat("cat", [TensorSpec((each.elements,), each.dtype) for each in tensors], 0, tensors[0].dtype)


@forward(Family.CONCAT, "fsdp::split_with_sizes_copy(all_gather_output, all_gather_input_split_sizes, dim, out)")
def _copied_out(op: Inputs) -> Iterator[OpCall]:
    """Yield FSDP2's copies of a block's parameters out of the all-gather's output."""
    source, pieces = op.tensor("all_gather_output"), op.optional_list("out")
    yield from concat("split", pieces or [source], 0, source.dtype)


@backward(Family.COPY, "aten::cat(tensors, dim)", "aten::stack(tensors, dim)", "aten::unbind(self)",
          "aten::clone(self)", "aten::contiguous(self)")
def _views(op: Inputs) -> Iterator[OpCall]:
    """Yield nothing: gradients of joined tensors are views of the gradient; a copy passes its gradient on."""
    yield from ()


@backward(Family.COPY, "aten::_to_copy(self, dtype)", "aten::to(self, dtype)", "aten::copy(self, src)")
def _cast_back(op: Inputs) -> Iterator[OpCall]:
    if op.short_name == "copy":
        yield from copy(op.tensor("self"), op.tensor("src"))
        return
    source, wanted = op.tensor("self"), op.dtype("dtype")
    if wanted not in ("", source.dtype):
        yield from copy(TensorSpec(source.shape, wanted), TensorSpec(source.shape, source.dtype))


@forward(Family.TRANSFER, "aten::_local_scalar_dense(self)", "aten::item(self)")
def _to_number(op: Inputs) -> Iterator[OpCall]:
    """Yield the copy of one number to the host; the host waits for it."""
    yield transfer("d2h", itemsize(op.tensor("self").dtype), ("pageable",))


@forward(Family.TRANSFER, "aten::_pin_memory(self)")
def _pin(op: Inputs) -> Iterator[OpCall]:
    raise Unpriceable("a copy in the host's memory")


without_gradient("aten::_local_scalar_dense", "aten::item")


VIEWS = words(
    "_conj _fw_primal _indices _make_dual _neg_view _nested_get_values _nested_view_from_buffer "
    "_nested_view_from_jagged _reshape_alias _unsafe_view _sparse_broadcast_to _unpack_dual _values adjoint alias "
    "as_strided as_strided_ broadcast_to ccol_indices chunk col_indices conj crow_indices detach detach_ diagonal "
    "dsplit expand expand_as flatten hsplit imag indices lift lift_fresh linalg_diagonal mH mT matrix_H moveaxis "
    "movedim narrow numpy_T permute real reshape reshape_as resolve_conj resolve_neg row_indices select slice "
    "slice_inverse split split_with_sizes squeeze swapaxes swapdims t t_ tensor_split transpose transpose_ unbind "
    "unflatten unfold unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze unsqueeze_ squeeze_ values view "
    "view_as view_as_complex view_as_real vsplit atleast_1d atleast_2d atleast_3d ravel broadcast_tensors meshgrid "
    "unflatten_dense_tensors")
METADATA = words(
    "size stride dim numel is_same_size is_floating_point is_complex is_contiguous is_nonzero is_pinned is_cuda "
    "storage_offset result_type can_cast promote_types sym_size sym_stride sym_numel sym_storage_offset "
    "sym_is_contiguous item_ requires_grad_ retain_grad set_ set_data _version output_nr "
    "_has_compatible_shallow_copy_type "
    "_fused_sdp_choice _nnpack_available _use_cudnn_ctc_loss _debug_has_internal_overlap cudnn_is_acceptable "
    "_cudnn_init_dropout_state is_inference is_leaf _assert_async _assert_scalar _assert_tensor_metadata "
    "_functional_assert_async _print sym_constrain_range")
MEMORY = words(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_ resize_as_ _resize_output_ "
    "record_stream _cudnn_rnn_flatten_weight _efficientzerotensor")

free(*(f"aten::{name}" for name in (*VIEWS, *METADATA, *MEMORY)), "detach", "detach_", "prim::device", "prim::dtype",
     "_c10d_functional::wait_tensor")  # the stream waits, no kernel runs


_IN_PLACE = words("uniform normal bernoulli random exponential cauchy log_normal geometric rand_like randn_like "
                  "randint_like poisson binomial _standard_gamma _sample_dirichlet")
_NEW = words("rand randn randint")
_HAND_BACK = words("dropout feature_dropout")
"""Dropouts that do nothing at p = 0 (ATen/native/Dropout.cpp); the native operator draws its mask even then."""


def random(kind: str, elements: int, dtype: str) -> Iterator[OpCall]:
    """Yield the call that draws random numbers; with kind "dropout" it also drops elements of an input."""
    if not elements:
        return
    size, drops = itemsize(dtype), kind == "dropout"
    yield OpCall(Family.RANDOM, kind, (elements,), dtype, flops=float(elements * (11 if drops else 10)),
                 bytes_read=float(elements * size if drops else 0),
                 bytes_written=float(elements * (size + (1 if drops else 0))))


@forward(Family.RANDOM, *(f"aten::{name}(self)" for name in _IN_PLACE))
def _fill(op: Inputs) -> Iterator[OpCall]:
    tensor = op.tensor("self")
    yield from random(op.short_name, tensor.elements, tensor.dtype)


@forward(Family.RANDOM, *(f"aten::{name}(size)" for name in _NEW))
def _new(op: Inputs) -> Iterator[OpCall]:
    """Yield a new tensor with the first list of numbers as its size; fp32, or int64 for integers, by default."""
    lists = [argument.value for argument in op.arguments if argument.value.startswith("[")]
    if not lists:
        op.tensor("size")
    sizes = [int(part) for part in lists[0].strip("[]").split(",") if part.strip()]
    yield from random(op.short_name, prod(sizes), "int64" if "int" in op.short_name else "fp32")


@forward(Family.RANDOM, "aten::native_dropout(input, p, train)", "aten::_fused_dropout(input, p)",
         "aten::dropout(input, p, train)", "aten::feature_dropout(input, p, train)")
def _dropout(op: Inputs) -> Iterator[OpCall]:
    """Yield a dropout; nothing outside training or at p = 0, where the input is returned."""
    tensor = op.tensor("input")
    drops = op.short_name not in _HAND_BACK or op.number("p") != 0
    if drops and op.flag("train", True):
        yield from random("dropout", tensor.elements, tensor.dtype)


@backward(Family.ELEMENTWISE, "aten::native_dropout(input, p, train)", "aten::_fused_dropout(input, p)",
          "aten::dropout(input, p, train)")
def _dropout_backward(op: Inputs) -> Iterator[OpCall]:
    tensor = op.tensor("input")
    if op.flag("train", True):
        yield from elementwise(
            "native_dropout_backward", [tensor, TensorSpec(tensor.shape, "bool")], dtype=tensor.dtype
        )


@forward(Family.RANDOM, "aten::randperm(n)")
def _permutation(op: Inputs) -> Iterator[OpCall]:
    n = op.integer("n", 0) or max((t.elements for t in op.tensors()), default=0)
    if not n:
        op.tensor("n")
    yield from random("randperm", n, "int64")
    yield from sort("sort", 1, n, n, "int64")


@forward(Family.RANDOM, "aten::multinomial(self, num_samples)")
def _multinomial(op: Inputs) -> Iterator[OpCall]:
    tensor = op.tensor("self")
    yield from random("multinomial", tensor.elements, tensor.dtype)


without_gradient(*(f"aten::{name}" for name in (*_IN_PLACE, *_NEW, "randperm", "multinomial")))
