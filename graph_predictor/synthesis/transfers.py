"""Which receive of a pipeline's rank takes what another rank sends.

A send does not wait for its receiver (the data is buffered); a receive waits until its sender has begun. Ranks that
were traced by shapes one by one note sender and receiver of each; the order between two ranks is that of the program.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from graph_predictor.simulation.build import Built

SEND, RECEIVE = "send", "recv"


def paired_transfers(built: Built) -> list[tuple[int, int]]:
    """(receive, send) of every pair, kernels of the program. What has no counterpart among the ranks is left out."""
    program = built.program
    found: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(lambda: {SEND: [], RECEIVE: []})
    for rank, graph in enumerate(built.graphs):
        table, low = graph.collectives, int(program.kernel_ptr[rank])
        for row in np.flatnonzero(table.kernel >= 0).tolist():
            kind = graph.string(int(table.kind[row]))
            if kind in (SEND, RECEIVE):
                key = graph.string(int(table.group[row])), graph.string(int(table.ranks[row]))
                found[key][kind].append(low + int(table.kernel[row]))
    return [pair for ends in found.values() if len(ends[SEND]) == len(ends[RECEIVE])
            for pair in zip(ends[RECEIVE], ends[SEND], strict=True)]
