"""Matrix products.

Dimensions: out[batch, m, n] = A[batch, m, k] · B[batch, k, n], in elements. Layout: memory order of A and B, "n"
row-major and "t" column-major; a linear layer's forward, whose weight is stored [n, k], is "nt".

    FLOPs  = ``2·batch·m·n·k`` (+ ``batch·m·n`` with a bias or an accumulated input); four times the first for complex
             numbers, twice for packed pairs of fp4 (k counts pairs).
    Bytes  = A + B + out + bias (n) or accumulated input (m·n), each distinct element once.

A multiply-add is two operations. Source: the definition of a matrix product, as TraceLens and NVIDIA's "Matrix
Multiplication Background User's Guide" count. fp8 products write the type they were asked for (flag "out_bf16").
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from kernel_models.families.reduction import reduction
from kernel_models.families.registry import Inputs, Unpriceable, backward, forward
from kernel_models.op_call import Family, OpCall, TensorSpec, itemsize, multiply_adds, stored_itemsize

FLIP = {"n": "t", "t": "n"}


def layout_of(matrix: TensorSpec) -> str:
    """Return the order of the last two dimensions: "n" row-major, "t" column-major; other layouts are copied to "n"
    first."""
    rows, columns = matrix.shape[-2:]
    row_step, column_step = matrix.strides[-2:]
    if rows > 1 and columns > 1:
        return "t" if row_step == 1 and column_step >= rows else "n"
    # A single row or column has either order; its step to the next one shows the order of the whole matrix.
    return "t" if row_step == 1 and column_step != 1 and column_step >= rows else "n"


def gemm(
    batch: int, m: int, n: int, k: int, dtype: str, layout: str = "nn", *, kind: str = "", added: str = "",
    flags: tuple[str, ...] = (), out_dtype: str = "", shared: str = "", weight_dtype: str = "",
) -> Iterator[OpCall]:
    """Yield the call of one product; none if it has no results.

    ``added`` is "bias" (n values) or "accumulate" (m·n values). ``shared`` names the operand, "a" or "b", that all
    products of the batch share. ``weight_dtype`` is the stored type of B, if it differs from the type of the products
    ("int4", "fp4": values, not packed pairs).
    """
    results = batch * m * n
    if not results:
        return
    size, out = itemsize(dtype), itemsize(out_dtype or dtype)
    extra = {"": 0, "bias": n, "accumulate": results}[added]
    marks = [*flags, *(f"shared_{one}" for one in shared)]
    if added:
        marks.append(added)
    if out_dtype and itemsize(out_dtype) != size:
        marks.append(f"out_{out_dtype}")
    kept = float(size)
    if weight_dtype and weight_dtype != dtype:
        marks.append(f"weight_{weight_dtype}")
        kept = stored_itemsize(weight_dtype)
    reads = float((1 if "a" in shared else batch) * m * k * size + extra * out)
    reads += (1 if "b" in shared else batch) * k * n * kept
    yield OpCall(
        Family.GEMM, kind or ("mm" if batch == 1 else "bmm"), (batch, m, n, k), dtype, layout, tuple(sorted(marks)),
        flops=2.0 * results * k * multiply_adds(dtype) + (results if added else 0),
        bytes_read=reads, bytes_written=float(results * out),
    )


def product(
    op: Inputs,
    a: TensorSpec,
    b: TensorSpec,
    added: TensorSpec | None = None,
    out_dtype: str = "",
    flags: tuple[str, ...] = (),
    kind: str = "",
) -> Iterator[OpCall]:
    """Yield a · b for matrices or batches of them, plus ``added``, which is broadcast as in the framework."""
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
        raise Unpriceable(f"{op.name}: {a.shape} · {b.shape}")
    m, k = a.shape[-2:]
    n = b.shape[-1]
    batch = max(prod(a.shape[:-2]), prod(b.shape[:-2]))
    shared = "".join(
        name for name, one in (("a", a), ("b", b)) if batch > 1 and one.stored <= one.shape[-2] * one.shape[-1])
    what = ""
    if added is not None:
        what = "accumulate" if added.stored > n else "bias"
    yield from gemm(batch, m, n, k, op.math_dtype(a), layout_of(a) + layout_of(b), added=what, shared=shared,
                    out_dtype=out_dtype, flags=flags, kind=kind)


@forward(Family.GEMM, "aten::mm(self, mat2)", "aten::bmm(self, mat2)", "aten::_int_mm(self, mat2)",
         "aten::addmm(self, mat1, mat2, beta, alpha)", "aten::_addmm_activation(self, mat1, mat2)",
         "aten::baddbmm(self, batch1, batch2, beta, alpha)", "aten::addbmm(self, batch1, batch2)")
def _mm(op: Inputs) -> Iterator[OpCall]:
    """Yield a matrix product; with three matrices, the first is added to the product of the others."""
    adds = len(op.names) > 2
    a, b = map(op.tensor, op.names[1:3] if adds else op.names)
    unused = op.short_name == "baddbmm" and op.number("beta") == 0
    yield from product(op, a, b, op.optional("self") if adds and not unused else None,
                       "int32" if op.short_name == "_int_mm" else "")


@forward(Family.GEMM, "aten::_scaled_mm(self, mat2, scale_a, scale_b, bias, scale_result, out_dtype)")
def _scaled_mm(op: Inputs) -> Iterator[OpCall]:
    a = op.tensor("self")
    scale = op.optional("scale_a")
    yield from product(
        op, a, op.tensor("mat2"), op.optional("bias"), kind="scaled", out_dtype=op.dtype("out_dtype") or a.dtype,
        flags=("rowwise",) if scale is not None and scale.elements > 1 else ())


@forward(Family.GEMM, "_C::cutlass_scaled_mm(out, a, b, a_scales, b_scales, bias)")
def _cutlass_scaled_mm(op: Inputs) -> Iterator[OpCall]:
    yield from product(op, op.tensor("a"), op.tensor("b"), op.optional("bias"), kind="scaled",
                       out_dtype=op.tensor("out").dtype)


@forward(Family.GEMM, "aten::_grouped_mm(self, mat2, offs, bias)",
         "aten::_scaled_grouped_mm(self, mat2, scale_a, scale_b, offs, bias, scale_result, out_dtype)")
def _grouped_mm(op: Inputs) -> Iterator[OpCall]:
    """Yield a batch of products of different heights, given by offsets; all are priced with the mean height."""
    a, b, offsets = op.tensor("self"), op.tensor("mat2"), op.optional("offs")
    if len(a.shape) == 3 and len(b.shape) == 3:
        yield from product(op, a, b)
        return
    groups = offsets.elements if offsets is not None else max(prod(a.shape[:-2]), prod(b.shape[:-2]))
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if len(a.shape) == 2 and len(b.shape) == 2:
        k = -(-k // groups)
    elif len(a.shape) == 2:
        m = -(-m // groups)
    else:
        n = -(-n // groups)
    yield from gemm(groups, m, n, k, op.math_dtype(a), layout_of(a) + layout_of(b), kind="grouped",
                    out_dtype="bf16" if a.dtype == "fp8" else "")


@forward(Family.GEMM, "aten::mv(self, vec)", "aten::addmv(self, mat, vec)")
def _mv(op: Inputs) -> Iterator[OpCall]:
    matrix = op.tensor(op.names[-2])
    m, k = matrix.shape
    yield from gemm(1, m, 1, k, op.math_dtype(matrix), layout_of(matrix) + "n",
                    added="accumulate" if len(op.names) > 2 else "")


@forward(Family.GEMM, "aten::addr(self, vec1, vec2)")
def _addr(op: Inputs) -> Iterator[OpCall]:
    m, n = op.tensor("vec1").elements, op.tensor("vec2").elements
    yield from gemm(1, m, n, 1, op.math_dtype(op.tensor("vec1")), added="accumulate")


@forward(Family.GEMM, "aten::linear(input, weight, bias)", "vllm::rocm_unquantized_gemm(x, weight, bias)",
         "aten::mkldnn_linear(self, weight, bias)")
def _linear(op: Inputs) -> Iterator[OpCall]:
    m, n, k, dtype, layout = _linear_sizes(op)
    yield from gemm(1, m, n, k, dtype, layout, added="bias" if op.has(op.names[2]) else "")


@backward(Family.GEMM, "aten::linear(input, weight, bias)")
def _linear_backward(op: Inputs) -> Iterator[OpCall]:
    """Yield the gradients of the input dY·W, of the weight dYᵀ·X, and of the bias (a sum over rows)."""
    m, n, k, dtype, layout = _linear_sizes(op)
    yield from gemm(1, m, k, n, dtype, "n" + FLIP[layout[1]])
    yield from gemm(1, n, k, m, dtype, "tn")
    if op.has("bias"):
        yield from reduction("sum", n, m, n, op.tensor("input").dtype)


def _linear_sizes(op: Inputs) -> tuple[int, int, int, str, str]:
    inputs, weight = op.tensor(op.names[0]), op.tensor("weight")
    if len(weight.shape) != 2 or not inputs.shape or inputs.shape[-1] != weight.shape[1]:
        raise Unpriceable(f"{op.name}: {inputs.shape} · {weight.shape}ᵀ")
    n, k = weight.shape
    return prod(inputs.shape[:-1]), n, k, op.math_dtype(inputs), "n" + FLIP[layout_of(weight)]


@forward(Family.GEMM, "aten::linear_backward(self, grad_output, weight, output_mask)")
def _linear_gradients(op: Inputs) -> Iterator[OpCall]:
    source, weight = op.tensor("self"), op.tensor("weight")
    (n, k), m, dtype = weight.shape, prod(source.shape[:-1]), op.math_dtype(source)
    mask = op.ints("output_mask") or (1, 1, 1)
    if mask[0]:
        yield from gemm(1, m, k, n, dtype, "n" + layout_of(weight))
    if mask[1]:
        yield from gemm(1, n, k, m, dtype, "tn")
    if mask[2:3] == (1,):
        yield from reduction("sum", n, m, n, source.dtype)


@forward(Family.GEMM, "aten::matmul(self, other)")
def _matmul(op: Inputs) -> Iterator[OpCall]:
    yield from product(op, *_matmul_operands(op))


def _matmul_operands(op: Inputs) -> tuple[TensorSpec, TensorSpec]:
    """Return operands folded as in ``torch.matmul``: a 2-d right operand makes the left's leading dimensions rows."""
    a, b = op.tensor("self"), op.tensor("other")
    if not a.shape or not b.shape:
        raise Unpriceable("a number is no matrix")
    if len(a.shape) == 1:
        a = TensorSpec((1, *a.shape), a.dtype)
    if len(b.shape) == 1:
        b = TensorSpec((*b.shape, 1), b.dtype)
    if len(b.shape) == 2 and len(a.shape) > 2:
        a = TensorSpec((prod(a.shape[:-1]), a.shape[-1]), a.dtype)
    return a, b


@backward(Family.GEMM, "aten::mm(self, mat2)", "aten::bmm(self, mat2)", "aten::matmul(self, other)")
def _mm_backward(op: Inputs) -> Iterator[OpCall]:
    a, b = _matmul_operands(op) if op.short_name == "matmul" else (op.tensor("self"), op.tensor("mat2"))
    yield from _both_gradients(op, a, b)


@backward(Family.GEMM, "aten::addmm(self, mat1, mat2)", "aten::baddbmm(self, batch1, batch2)")
def _addmm_backward(op: Inputs) -> Iterator[OpCall]:
    a, b = op.tensor(op.names[1]), op.tensor(op.names[2])
    yield from _both_gradients(op, a, b)
    added, n, rows = op.optional("self"), b.shape[-1], prod(a.shape[:-1])
    if added is not None and added.stored == n < rows * n:
        yield from reduction("sum", n, rows, n, a.dtype)


def _both_gradients(op: Inputs, a: TensorSpec, b: TensorSpec) -> Iterator[OpCall]:
    """Yield dA = dC·Bᵀ, and dB = Aᵀ·dC, which PyTorch computes as dBᵀ = dCᵀ·A for a column-major B."""
    batch = max(prod(a.shape[:-2]), prod(b.shape[:-2]))
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    dtype, lies_a, lies_b = op.math_dtype(a), layout_of(a), layout_of(b)
    yield from gemm(batch, m, k, n, dtype, "n" + FLIP[lies_b])
    if lies_b == "t":
        yield from gemm(batch, n, k, m, dtype, "t" + lies_a)
    else:
        yield from gemm(batch, k, n, m, dtype, FLIP[lies_a] + "n")
