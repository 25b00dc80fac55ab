"""Reductions and scans.

Dimensions: ``outer`` results, each of ``reduced`` values; ``inner`` is the stride between the values of one result in
elements (1: they lie side by side). A scan (cumsum) has as many results as values and is ``outer`` × ``reduced`` too.

    FLOPs  = outer·reduced (norms, variances: twice that)
    bytes  = outer·reduced read, outer written (scans: as much as is read; positions of maxima: int64)

Source: the definition. Where the reduced dimensions were not recorded, everything is taken to be reduced.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from kernel_models.dtypes import itemsize
from kernel_models.families.registry import Inputs, backward, dimension, forward, without_gradient
from kernel_models.op_call import Family, OpCall
from kernel_models.tensors import TensorSpec

_TWICE = frozenset({"norm", "linalg_vector_norm", "var", "std", "var_mean", "std_mean", "logsumexp", "renorm", "dot"})
_POSITIONS = frozenset({"argmax", "argmin"})
_WITH_POSITIONS = frozenset({"max", "min", "mode", "aminmax", "cummax", "cummin"})
_TO_BOOL = frozenset({"any", "all", "equal"})
_SCANS = frozenset({"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"})


def reduction(
    kind: str, outer: int, reduced: int, inner: int, dtype: str, out_dtype: str = "", flags: tuple[str, ...] = ()
) -> Iterator[OpCall]:
    """The call of one reduction or scan; none if it has no values to look at."""
    values = outer * reduced
    if not values:
        return
    results = values if kind in _SCANS else outer
    out_dtype = "bool" if kind in _TO_BOOL else out_dtype or dtype
    size = itemsize("int64") if kind in _POSITIONS else itemsize(out_dtype)
    if out_dtype != dtype and kind not in _TO_BOOL:
        flags = (*flags, f"out_{out_dtype}")
    reads = 2 if kind == "dot" else 1
    yield OpCall(
        Family.REDUCTION, kind, (outer, reduced, inner), dtype, flags=tuple(sorted(flags)),
        flops=float(values * (2 if kind in _TWICE else 1)),
        bytes_read=float(reads * values * itemsize(dtype)),
        bytes_written=float(results * (size + (8 if "positions" in flags else 0))),
    )


def over(kind: str, tensor: TensorSpec, dims: tuple[int, ...] | None, out_dtype: str = "") -> Iterator[OpCall]:
    """Reduce the given dimensions of a tensor; all of them for ``None`` or none."""
    rank = len(tensor.shape)
    chosen = {dimension(d, rank) for d in dims} if dims else set(range(rank))
    reduced = prod(size for d, size in enumerate(tensor.shape) if d in chosen)
    steps = [step for d, step in enumerate(tensor.strides) if d in chosen and tensor.shape[d] > 1]
    outer = prod(size for d, size in enumerate(tensor.shape) if d not in chosen)
    positions = kind in _WITH_POSITIONS and dims is not None
    yield from reduction(kind, outer, reduced, max(min(steps, default=1), 1), tensor.dtype, out_dtype,
                         ("positions",) if positions else ())


@forward(Family.REDUCTION, "aten::sum(self, dim, keepdim, dtype)", "aten::mean(self, dim, keepdim, dtype)",
         "aten::nansum(self, dim, keepdim, dtype)", "aten::amax(self, dim, keepdim)", "aten::amin(self, dim, keepdim)",
         "aten::var(self, dim)", "aten::std(self, dim)", "aten::var_mean(self, dim)", "aten::std_mean(self, dim)",
         "aten::logsumexp(self, dim)", "aten::count_nonzero(self, dim)", "aten::prod(self, dim)")
def _sum(op: Inputs) -> Iterator[OpCall]:
    yield from over(op.short_name, op.tensor("self"), op.ints("dim"), op.dtype("dtype") if "dtype" in op.names else "")


@forward(Family.REDUCTION, "aten::linalg_vector_norm(self, ord, dim)", "aten::norm(self, p, dim)",
         "aten::native_norm(self, p, dim)")
def _norm(op: Inputs) -> Iterator[OpCall]:
    yield from over("linalg_vector_norm", op.tensor("self"), op.ints("dim"))


@forward(Family.REDUCTION, "aten::max(self, dim)", "aten::min(self, dim)", "aten::argmax(self, dim)",
         "aten::argmin(self, dim)", "aten::any(self, dim)", "aten::all(self, dim)", "aten::mode(self, dim)")
def _max(op: Inputs) -> Iterator[OpCall]:
    dim = op.number("dim")
    yield from over(op.short_name, op.tensor("self"), None if dim is None else (int(dim),))


@forward(Family.REDUCTION, "aten::aminmax(self)", "aten::_aminmax(self)", "aten::equal(self, other)",
         "aten::trace(self)")
def _whole(op: Inputs) -> Iterator[OpCall]:
    yield from over(op.short_name, op.tensor("self"), None)


@forward(Family.REDUCTION, "aten::_is_all_true(self)", "aten::_is_any_true(self)")
def _checked(op: Inputs) -> Iterator[OpCall]:
    yield from over("all" if "all" in op.name else "any", op.tensor("self"), None)


@forward(Family.REDUCTION, "aten::cumsum(self, dim)", "aten::cumprod(self, dim)", "aten::logcumsumexp(self, dim)",
         "aten::_cummax_helper(self, values, indices, dim)", "aten::_cummin_helper(self, values, indices, dim)",
         "aten::cummax(self, dim)", "aten::cummin(self, dim)")
def _scan(op: Inputs) -> Iterator[OpCall]:
    kind = op.short_name.removeprefix("_").removesuffix("_helper")
    yield from over(kind, op.tensor("self"), (op.integer("dim", -1),))


@forward(Family.REDUCTION, "fbgemm::asynchronous_complete_cumsum(t_in)",
         "fbgemm::asynchronous_inclusive_cumsum(t_in)", "fbgemm::asynchronous_exclusive_cumsum(t_in)")
def _offsets(op: Inputs) -> Iterator[OpCall]:
    yield from over("cumsum", op.tensor("t_in"), (-1,))


@forward(Family.REDUCTION, "aten::dot(self, tensor)", "aten::vdot(self, other)")
def _dot(op: Inputs) -> Iterator[OpCall]:
    yield from reduction("dot", 1, op.tensor("self").elements, 1, op.tensor("self").dtype)


@backward(Family.ELEMENTWISE, "aten::sum(self, dim)", "aten::mean(self, dim)")
def _spread(op: Inputs) -> Iterator[OpCall]:
    """The gradient is broadcast: a view for a sum, divided by the count for a mean."""
    if op.short_name == "mean":
        from kernel_models.families.elementwise import elementwise

        tensor = op.tensor("self")
        yield from elementwise("div", [TensorSpec(tensor.shape, tensor.dtype, (0,) * len(tensor.shape))], tensor.shape)


without_gradient("aten::argmax", "aten::argmin", "aten::any", "aten::all", "aten::equal", "aten::count_nonzero",
                 "aten::_is_all_true", "aten::_is_any_true")
