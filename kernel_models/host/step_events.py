"""``HostStep``: the host's time of one program's step, operation by operation, at the level at which a step is traced.

::

    recorded   |--- aten::linear ---|                       operations nest
                 |t| |- aten::addmm -|
    here         t      addmm                               what the dispatcher runs below autograd
    host     [b ]t[ b ][    addmm    ][    before next       time in each operation, and before it

The outermost operations that are not made of others everywhere (``composite_operations``) have a row each. What wraps
them (modules, autograd's nodes, operations made of others, Python) lies in the time before them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources

import numpy as np
import numpy.typing as npt

from kernel_models.operation import is_free
from tracer.arrays import Float64, Int8, Int64

Names = npt.NDArray[np.object_]

LISTS = ("_foreach", "_fused")
"""Marks in the names of operations on lists of tensors."""
END = ""
"""Name of what follows the last operation, and of what is before the first."""


@dataclass(frozen=True, slots=True)
class HostStep:
    """One step of one program.

    Attributes:
        name, phase: of each operation, and the ``Phase`` it belongs to, in the order they run; [n].
        tensors: in the list that an operation works on; 0 for none; [n].
        before_ns: time before each operation, and after the last one; [n + 1]; zeros where nobody measured it.
        inside_ns: time in each, with its calls, without a CPU's own computation; [n].
        compute_ns: what each computes on the host itself; zeros where a GPU does; [n].
        launch_ns: what one launch took; 0 where none was recorded.
        calls: of Python functions before each operation, and after the last one; [n + 1]; ``None`` where nobody
            counted.
    """

    name: Names
    phase: Int8
    tensors: Int64
    before_ns: Float64
    inside_ns: Float64
    compute_ns: Float64
    launch_ns: float = 0.0
    calls: Float64 | None = None

    def __len__(self) -> int:
        return len(self.name)

    def scaled(self, factor: float) -> HostStep:
        """Return the step on a host that takes ``factor`` times as long."""
        return replace(self, before_ns=self.before_ns * factor, inside_ns=self.inside_ns * factor,
                       launch_ns=self.launch_ns * factor)

    @property
    def sharded(self) -> bool:
        """Return whether FSDP shards the program's parameters."""
        return any(name.startswith("fsdp::") for name in self.name.tolist())

    @property
    def host_ns(self) -> float:
        """Host time of the step."""
        return float(self.before_ns.sum() + self.inside_ns.sum())


@lru_cache(maxsize=1)
def composite_operations() -> frozenset[str]:
    """Return names of operations that are made of others on every device, so that no trace below autograd has them."""
    text = resources.files("kernel_models.host").joinpath("composite_operations.json").read_text(encoding="utf-8")
    return frozenset(f"aten::{name}" for name in json.loads(text)["names"])


def is_flat(name: str) -> bool:
    """Return whether an operation of that name has a row: the dispatcher runs it below autograd."""
    if "::" not in name or name.startswith(("autograd::", "torch::", "enumerate(")):
        return False
    return name not in composite_operations()


def host_class(name: str) -> str:
    """Class of an operation by what the host does for it."""
    if any(mark in name for mark in LISTS):
        return "list"
    if is_free(name) or name in ("aten::empty", "aten::empty_like", "aten::detach"):
        return "view"
    if name.endswith("_backward"):
        return "backward"
    return "in place" if name.endswith("_") else "other"
