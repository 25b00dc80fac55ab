"""Whether the same operations compute in other element types: fp64 where fp32 was, or fp32 where bf16 was."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from tracer.graph import OpKind
from tracer.job import Job

_NAME = re.compile(r"[A-Za-z][\w:<>]*")
Operations = dict[tuple[str, str], Counter[str]]
"""Counts of a step's operations: by name and shapes, and of those by their list of element types."""


def retyped(old: Job, new: Job) -> tuple[int, str] | None:
    """Compare operations of the same names and shapes.

    Returns:
        How many of a step have inputs of other types, and the most frequent change in words ("float → double"; empty
        if there is none). None where a job names no element types.
    """
    before, after = _typed(old), _typed(new)
    if not before or not after:
        return None
    changed = 0
    changes: Counter[str] = Counter()
    for key, types in after.items():
        was = before.get(key)
        if was is None:
            continue
        gone, come = was - types, types - was
        number = min(gone.total(), come.total())
        changed += number
        if number:
            changes[_words(gone.most_common(1)[0][0], come.most_common(1)[0][0])] += number
    return changed, changes.most_common(1)[0][0] if changes else ""


def _typed(job: Job) -> Operations:
    found: Operations = {}
    for graph in job.graphs:
        ops, steps = graph.ops, max(len(graph.steps), 1)
        rows = np.flatnonzero((ops.kind == OpKind.OPERATION) & (ops.step >= 0) & (ops.dtypes >= 0))
        keys, number = np.unique(np.stack([ops.name[rows], ops.shapes[rows], ops.dtypes[rows]]), axis=1,
                                 return_counts=True)
        for (name, shapes, dtypes), count in zip(keys.T.tolist(), number.tolist(), strict=True):
            text = graph.string(dtypes)
            if _NAME.search(text):
                found.setdefault((graph.string(name), graph.string(shapes)), Counter())[text] += max(
                    1, round(count / steps))
    return found


def _words(before: str, after: str) -> str:
    """The types in which two lists of them differ."""
    pairs = zip(_NAME.findall(before), _NAME.findall(after), strict=False)
    return next((f"{old} → {new}" for old, new in pairs if old != new), f"{before} → {after}")
