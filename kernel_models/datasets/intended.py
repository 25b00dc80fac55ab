"""Whether a micro-benchmark really ran what it was meant to, by the names of its kernels (on a CPU: operations).

A name that says nothing is believed; one that speaks of another family, or of another implementation of attention than
the one that was forced, is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kernel_models.kernel_names import family_hint
from kernel_models.op_call import Family, OpCall
from kernel_models.operation import family_of

_ALSO: dict[Family, frozenset[Family]] = {
    # What a family's kernels may be made of, as libraries implement it.
    Family.CONV: frozenset({Family.GEMM}),
    Family.ATTENTION: frozenset({Family.GEMM, Family.SOFTMAX}),
    Family.RECURRENT: frozenset({Family.GEMM, Family.ELEMENTWISE}),
    Family.REDUCTION: frozenset({Family.ELEMENTWISE, Family.SORT, Family.COPY}),
    Family.EMBEDDING: frozenset({Family.INDEX, Family.SORT, Family.REDUCTION}),
    Family.INDEX: frozenset({Family.ELEMENTWISE, Family.SORT, Family.EMBEDDING, Family.COPY}),
    Family.SORT: frozenset({Family.INDEX, Family.REDUCTION}),
    Family.COPY: frozenset({Family.ELEMENTWISE, Family.TRANSFER}),
    Family.CONCAT: frozenset({Family.COPY, Family.ELEMENTWISE, Family.TRANSFER}),
    Family.TRANSFER: frozenset({Family.COPY, Family.ELEMENTWISE}),
    Family.MEMSET: frozenset({Family.ELEMENTWISE}),
    Family.RANDOM: frozenset({Family.ELEMENTWISE}),
    Family.LOSS: frozenset({Family.ELEMENTWISE, Family.REDUCTION, Family.SOFTMAX}),
    Family.POOLING: frozenset({Family.REDUCTION, Family.ELEMENTWISE}),
    Family.NORM: frozenset({Family.REDUCTION, Family.ELEMENTWISE}),
    Family.SOFTMAX: frozenset({Family.REDUCTION}),
    Family.OPTIMIZER: frozenset({Family.ELEMENTWISE, Family.REDUCTION}),
    Family.ELEMENTWISE: frozenset({Family.COPY}),
}
_BACKENDS = {"flash": re.compile(r"flash"), "cudnn": re.compile(r"cudnn"),
             "efficient": re.compile(r"fmha|efficient|mem_eff")}
_OPERATION = "aten::"


def is_intended(call: OpCall, row: Mapping[str, Any]) -> bool:
    """Return whether any kernel named in a row of a micro-benchmark's table can be the call's; true where none was
    seen."""
    found = row.get("kernels")
    names = [] if found is None else [str(name) for name in found]
    if not names:
        return True
    on_gpu = [name for name in names if not name.startswith(_OPERATION)]
    if call.family is Family.ATTENTION and row.get("backend") in _BACKENDS and on_gpu:
        told = _BACKENDS[row["backend"]]
        return any(told.search(name) for name in on_gpu)
    wanted = {call.family, Family.OTHER} | _ALSO.get(call.family, frozenset())
    return any(_family(name) in wanted for name in names)


def _family(name: str) -> Family:
    return family_of(name) if name.startswith(_OPERATION) else family_hint(name)
