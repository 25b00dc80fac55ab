"""What kernels vary by from step to step, and how far out the slowest of many ranks lies."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from graph_predictor.figures import signed_percent
from tracer.graph import ExecutionGraph, KernelKind


def further_out(graphs: Sequence[ExecutionGraph], ranks: int, of: int) -> tuple[float, str]:
    """Return how much longer (log) kernels of the slowest of ``of`` ranks take than of the slowest of ``ranks``, where
    ranks' kernels vary as these graphs' do from step to step; and a sentence that says so."""
    sigma = kernel_jitter(graphs)
    if sigma is None:
        return 0.0, "No rank has two steps alike, so that nobody knows how kernels vary: none is taken to be slower."
    further = sigma * (slowest_of(of) - slowest_of(ranks))
    return further, (f"Ranks' kernels vary by {sigma:.2%} from step to step, so that the slowest rank's take "
                     f"{signed_percent(np.expm1(further), 2)}.")


def slowest_of(ranks: int) -> float:
    """Return how far the largest of so many normal values lies from their mean, in standard deviations (Blom 1958)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def kernel_jitter(graphs: Sequence[ExecutionGraph]) -> float | None:
    """Return the standard deviation of the log of what a rank's own kernels take, from step to step.

    Steps that launch other kernels are not compared; ``None`` where no rank has two alike.
    """
    deviations, freedom = 0.0, 0
    for graph in graphs:
        kernels = graph.kernels
        own = (kernels.kind == KernelKind.COMPUTE) & (kernels.step >= 0)
        steps = len(graph.steps)
        count = np.bincount(kernels.step[own], minlength=steps)
        total = np.bincount(kernels.step[own], weights=kernels.duration_ns[own], minlength=steps)
        if not count.any():
            continue
        usual = np.bincount(count[count > 0]).argmax()
        logs = np.log(total[(count == usual) & (total > 0)])
        deviations += float(((logs - logs.mean()) ** 2).sum())
        freedom += max(len(logs) - 1, 0)
    return float(np.sqrt(deviations / freedom)) if freedom else None
