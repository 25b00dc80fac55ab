"""Steps of operations with literal sizes, for tests of what follows a size that is changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from micro import Micro

from kernel_models.operation import Operation
from tracer.graph import ExecutionGraph

SizedOp = tuple[Any, ...]
"""A name, the sizes of its tensors (a list of them for a list of tensors), and its numbers if it has some."""


def steps_of(folder: Path, *steps: Sequence[SizedOp]) -> ExecutionGraph:
    """Steps in a row, each with its operations one after another."""
    trace = Micro().calibrate()
    for place, ops in enumerate(steps):
        begin = 1000 * (place + 1)
        trace.step(begin, begin + 900, place + 1)
        for number, (name, tensors, *rest) in enumerate(ops):
            numbers = rest[0] if rest else []
            trace.op(name, begin + 10 + 10 * number, begin + 15 + 10 * number, **{
                "Input Dims": [*tensors, *([] for _ in numbers)],
                "Input type": [*("TensorList" if one and isinstance(one[0], list) else "float" for one in tensors),
                               *("ScalarList" if isinstance(one, list) else "Scalar" for one in numbers)],
                "Concrete Inputs": [*("" for _ in tensors), *map(str, numbers)]})
    return trace.read(folder)


def step_of(folder: Path, *ops: SizedOp) -> ExecutionGraph:
    """One step of operations."""
    return steps_of(folder, ops)


def shapes(operation: Operation) -> list[Any]:
    """Sizes of an operation's arguments, those that are tensors."""
    return [argument.shape for argument in operation.arguments if argument.shape]
