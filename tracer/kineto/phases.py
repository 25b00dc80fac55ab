"""Forward, backward, optimizer or data: what part of a step each operation belongs to."""

from __future__ import annotations

import re

import numpy as np

from tracer.graph import NONE, OpKind, OpTable, Phase
from tracer.kineto.nesting import Nesting, inherit

_ENGINE = "autograd::engine::evaluate_function"
_BACKWARD_NODE = re.compile(r"(?:Backward\d*|AccumulateGrad)(?:: .*)?$")
_OPTIMIZER = re.compile(r"Optimizer\.")
_DATA = re.compile(r"enumerate\(Data(?:Loader|Pipe)\)")

AUTOGRAD_SHARE = 0.5
"""A thread belongs to autograd if at least this share of its top-level operations are backward nodes."""


def phases(ops: OpTable, nesting: Nesting, strings: list[str]) -> np.ndarray:
    """``Phase`` of each operation. An operation inherits its ancestor's; the innermost marker wins.

    BACKWARD: below an autograd node, on a thread that runs mostly such nodes, or with a forward thread recorded.
    OPTIMIZER and DATA: inside the annotations of those names. FORWARD: what remains inside a step. Else OTHER.
    A closure that the optimizer calls (``optimizer.step(closure)``, as Lightning does) is no part of its own work.
    """
    count = len(ops)
    own = np.full(count, NONE, np.int8)
    if count == 0:
        return own
    node = np.zeros(count, bool)
    for code in np.unique(ops.name).tolist():
        text = strings[code]
        if text.startswith(_ENGINE) or _BACKWARD_NODE.search(text):
            node |= ops.name == code
        elif _OPTIMIZER.match(text):
            own[ops.name == code] = Phase.OPTIMIZER
        elif _DATA.match(text):
            own[ops.name == code] = Phase.DATA
    own[node] = Phase.BACKWARD
    # 0 means "recorded in the forward pass" since 2022; the forward thread's number is 1 or more.
    own[(ops.forward_thread > 0) & (own == NONE)] = Phase.BACKWARD
    top = (ops.parent == NONE) & (ops.kind == OpKind.OPERATION)
    threads = int(ops.thread.max()) + 1
    tops = np.bincount(ops.thread[top], minlength=threads)
    nodes = np.bincount(ops.thread[top & node], minlength=threads)
    autograd = (tops > 0) & (nodes >= AUTOGRAD_SHARE * tops)
    out = inherit(own, nesting, NONE)
    out[_in_closures(ops, own, node, nesting)] = NONE
    rest = out == NONE
    out[rest & autograd[ops.thread]] = Phase.BACKWARD
    rest = out == NONE
    out[rest] = np.where(ops.step[rest] >= 0, Phase.FORWARD, Phase.OTHER)
    return out


def _in_closures(ops: OpTable, own: np.ndarray, node: np.ndarray, nesting: Nesting) -> np.ndarray:
    """Return which operations below an optimizer's annotation belong to a closure that it called.

    ::

        Optimizer.step#Adam.step  |--------------------------------------|
        the caller's thread         forward ops             adam's ops
        the autograd thread                     backward
                                    '-- the closure -------' (to the end of the last backward node)
    """
    found = np.zeros(len(ops), bool)
    markers = np.flatnonzero(own == Phase.OPTIMIZER)
    backward = np.flatnonzero(node)
    if not len(markers) or not len(backward):
        return found
    backward = backward[np.argsort(ops.start_ns[backward], kind="stable")]
    starts = ops.start_ns[backward]
    ends = ops.start_ns[backward] + ops.duration_ns[backward]
    low = np.searchsorted(starts, ops.start_ns[markers])
    high = np.searchsorted(starts, ops.start_ns[markers] + ops.duration_ns[markers])
    until = np.full(len(ops), np.iinfo(np.int64).min)
    for marker, first, last in zip(markers[high > low].tolist(), low[high > low].tolist(), high[high > low].tolist(),
                                   strict=True):
        until[marker] = ends[first:last].max()
    nearest = inherit(np.where(own != NONE, np.arange(len(ops)), NONE), nesting, NONE)
    below = (nearest != NONE) & (nearest != np.arange(len(ops)))
    found[below] = ops.start_ns[below] < until[nearest[below]]
    return found
