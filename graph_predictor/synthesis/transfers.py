"""Pairs of sends and receives between the ranks of a pipeline.

A send does not wait for its receiver (the data is buffered); a receive waits until its sender has begun. Ranks that
were traced by shapes one by one note sender and receiver of each; the order between two ranks is that of the program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from tracer.arrays import Int64
from tracer.graph import ExecutionGraph

SEND, RECEIVE = "send", "recv"


def paired_transfers(graphs: Sequence[ExecutionGraph], kernel_ptr: Int64) -> list[tuple[int, int]]:
    """(receive, send) of every pair, kernels of the program whose ranks begin at ``kernel_ptr``.

    What has no counterpart among the ranks is left out.
    """
    found: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(lambda: {SEND: [], RECEIVE: []})
    for graph, low in zip(graphs, kernel_ptr.tolist(), strict=False):
        table = graph.collectives
        for row in np.flatnonzero(table.kernel >= 0).tolist():
            kind = graph.string(int(table.kind[row]))
            if kind in (SEND, RECEIVE):
                key = graph.string(int(table.group[row])), graph.string(int(table.ranks[row]))
                found[key][kind].append(low + int(table.kernel[row]))
    return [pair for ends in found.values() if len(ends[SEND]) == len(ends[RECEIVE])
            for pair in zip(ends[RECEIVE], ends[SEND], strict=True)]
