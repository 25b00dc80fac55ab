"""The memory of parameters and optimizer state, from the shapes in an optimizer's recorded operations.

A profiler counts a host's memory only from its own start: parameters and the optimizer's state were allocated long
before and are missing. An optimizer's step processes most of them once::

    mul_(parameters)  lerp_(first moments, gradients)  addcmul_(second moments, …)  addcdiv_(parameters, …)
      elements: P                  P                             P                          P
"""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import Any

import numpy as np

from tracer.arrays import Int64
from tracer.graph import ExecutionGraph, OpKind, Phase

STATES = {"adam": 2, "sgd": 1, "adagrad": 1, "rmsprop": 1}
"""Values that an optimizer keeps for each parameter: Adam's two moments, SGD's momentum, or a mean of squares."""
MUCH = 0.1
"""Operations on fewer elements than this share of the largest work on the optimizer's step counters, not on parameters.
Chosen: a counter has one element, a step all parameters."""
_BYTES = {"double": 8, "c10::Half": 2, "c10::BFloat16": 2}
"""Bytes of an element by the profiler's name of its type. All other types, and lists of tensors, count 4: most
parameters are in fp32."""


def kept_by_optimizer(graph: ExecutionGraph) -> tuple[int, int]:
    """Return the bytes of the parameters that an optimizer changes, and of its state; zeros if no operation shows them.

    Parameters that it does not change, and states that it does not change in place, are not included.
    """
    ops = graph.ops
    operations = ops.kind == OpKind.OPERATION
    mine = np.flatnonzero((ops.phase == Phase.OPTIMIZER) & operations & (ops.step >= 0)
                          & ~np.where(ops.parent >= 0, operations[ops.parent], False))
    mine = mine[ops.step[mine] == ops.step[mine[:1]]]
    changed: dict[str, int] = defaultdict(int)
    for row in mine.tolist():
        name = graph.string(int(ops.name[row]))
        if name.endswith("_") and (arguments := graph.arguments(row)):
            changed[name] += _elements(arguments[0].shape) * _BYTES.get(arguments[0].dtype, 4)
    most = max(changed.values(), default=0)
    parameters = min((size for size in changed.values() if size >= MUCH * most), default=0) if most else 0
    return parameters, parameters * _states(graph, mine, set(changed))


def _states(graph: ExecutionGraph, mine: Int64, names: set[str]) -> int:
    """Return the number of values that an optimizer keeps for each parameter, by its annotation; 0 if unknown."""
    ops = graph.ops
    said = " ".join(graph.string(int(code)).lower() for code in np.unique(ops.name[ops.kind == OpKind.ANNOTATION])
                    if graph.string(int(code)).startswith("Optimizer.step#"))
    kind = next((kind for kind in STATES if kind in said), None)
    if kind == "sgd" and not names & {"aten::mul_", "aten::_foreach_mul_"}:  # they shrink the momentum
        fused = [row for row in mine.tolist() if graph.string(int(ops.name[row])).startswith("aten::_fused_sgd")]
        return int(any(len(graph.arguments(row)) > 2 and bool(graph.arguments(row)[2].shape) for row in fused))
    return 0 if kind is None else STATES[kind]


def _elements(shape: Any) -> int:
    """Return the elements of a tensor or of a list of tensors."""
    if shape is None:
        return 0
    return sum(map(_elements, shape)) if any(isinstance(part, tuple) for part in shape) else prod(shape)
