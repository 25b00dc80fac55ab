"""Tables of operators as TraceLens writes them: one row an operation with the arguments that the profiler recorded.

Columns: name, Input Dims, Input type, Input Strides and Concrete Inputs (Python literals, one entry an argument), and
kernel times in microseconds by their statistic, of which the median is taken. Their device is nowhere in them. An
operation becomes its call by the same rules as a trace's; left out are those of several calls, those without sizes,
and copies from or to the host, whose time is the link's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernel_models.datasets.samples import Samples
from kernel_models.datasets.tables import DEVICE, Reader
from kernel_models.kernel_names import uses_tf32
from kernel_models.op_call import OpCall
from kernel_models.operation import Operation, calls_of
from tracer.views import Argument

if TYPE_CHECKING:
    import pandas

_ARGUMENTS = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
_TIME = "Kernel Time (µs)_median"
_KERNELS = "kernel_details_summary"
_HOST_LINK = ("Memcpy HtoD", "Memcpy DtoH", "Pageable", "Pinned")
_NO_TYPES = frozenset({"", "Scalar", "ScalarList", "TensorList"})
SOFTWARE = "torch"
"""The tables name no version."""


def operation_of(name: str, dims: str, types: str, strides: str, values: str) -> Operation:
    """The operation of a row's texts.

    Raises:
        ValueError: a text is no literal.
    """
    try:
        shapes, dtypes, steps, numbers = (tuple(ast.literal_eval(text)) for text in (dims, types, strides, values))
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"the arguments of {name[:60]} are not Python literals") from error
    # The element type of tensors in lists is not recorded: it is that of the first tensor.
    named = next((str(dtype) for dtype in dtypes if str(dtype) not in _NO_TYPES), "bf16")
    return Operation(name, tuple(
        Argument(str(dtype), shape, step, str(value))
        for shape, dtype, step, value in zip(shapes, dtypes, steps, numbers, strict=False)), named)


def read(frame: pandas.DataFrame, path: Path) -> Iterator[Samples]:
    """One samples object for each family; the shape group is the sizes."""
    found: dict[str, list[tuple[OpCall, float]]] = {}
    kernels = frame[_KERNELS] if _KERNELS in frame else [""] * len(frame)
    texts = frame[list(_ARGUMENTS)].astype(str).to_numpy().tolist()
    times = frame[_TIME].astype(float).tolist()
    for name, (dims, types, strides, values), time, ran in zip(frame["name"], texts, times, kernels, strict=True):
        call = _call(str(name), (dims, types, strides, values), str(ran))
        if call is not None and np.isfinite(time) and time > 0:
            found.setdefault(call.family.value, []).append((call, time))
    for mine in found.values():
        yield Samples(str(frame[DEVICE].iloc[0]), SOFTWARE, path.name, [call for call, _ in mine],
                      np.array([time for _, time in mine]),
                      {"shape": ["x".join(map(str, call.dims)) for call, _ in mine]})


def _call(name: str, texts: tuple[Any, ...], kernels: str) -> OpCall | None:
    """The one call of an operation whose sizes are known."""
    if "Synthetic Op" in name or any(word in kernels for word in _HOST_LINK):
        return None
    calls = calls_of(operation_of(name, *texts), uses_tf32(kernels))
    return calls[0] if len(calls) == 1 and "unsized" not in calls[0].flags else None


READER = Reader("operators", frozenset({"name", *_ARGUMENTS, _TIME}), read, names_device=False)
