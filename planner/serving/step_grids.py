"""Step times by interpolation on grids, whose points are priced once.

A server takes thousands of steps with any number of tokens, sequences and contexts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.parallel.corrections import CorrectionFactors
from planner.serving.setup import ServingSetup
from tracer.arrays import Float64

TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144,
          8192, 12_288, 16_384, 32_768)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
CONTEXTS = (1, 128, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 1 << 20)
PIECES = (1, 64, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
PASTS = (0, 1024, 2048, 4096, 8192, 16_384, 32_768, 131_072, 1 << 20)
"""Points of the grids: tokens of a step; sequences; contexts; tokens of a prompt's piece; tokens before the piece.
Chosen."""
COMPANY = 8
"""Number of prompts in one attention kernel from which a prompt's share is priced: one kernel reads a step's pieces."""
COLUMNS = 6
PRODUCT, OTHER, WITHIN, BETWEEN, LAUNCHES, CALLS = range(COLUMNS)
"""Columns of parts: µs of products with attention, of other kernels, of collectives within a node, and of collectives
between nodes; number of launched kernels, and of collectives."""

Lines = tuple[list[float], list[float]]
Squares = tuple[list[list[float]], list[list[float]]]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Equal pieces of prompts that a step reads: number of prompts, new tokens of each, cached tokens of each."""

    prompts: int
    new: int
    past: int = 0


def alone(pieces: Sequence[PrefillChunk], share: float) -> tuple[PrefillChunk, float]:
    """Return the longest piece, and how often it is priced as a kernel of its own: once, or less if a GPU has only a
    share of it. All other pieces are priced as one of ``COMPANY``."""
    return max(pieces, key=lambda each: each.new), min(share * sum(each.prompts for each in pieces), 1.0)


class StepSurface:
    """Step times from grids, µs; the correction factors are already in the grids.

    Args:
        tokens, rows: grids of (device µs, host µs) over ``TOKENS`` and over ``SEQUENCES``.
        decoding, pieces: the same over ``SEQUENCES`` × ``CONTEXTS``, and over ``PIECES`` × ``PASTS``.
        company: the same as ``pieces`` for a piece among ``COMPANY``.
        setup, rates: setup and factors of the model that made the grids.
        layers: number of layers of the decoder.
        graph_us: host time of launching a CUDA graph of one stage's step, µs.
        waits: whether the engine waits for a step before it prepares the next step.
    """

    def __init__(self, tokens: Lines, rows: Lines, decoding: Squares, pieces: Squares, company: Squares,
                 setup: ServingSetup, rates: CorrectionFactors, *, layers: int, graph_us: float, waits: bool) -> None:
        self._tokens, self._rows, self._decoding = tokens, rows, decoding
        self._pieces, self._company = pieces, company
        self._share = 1.0 / (setup.attention_dp * setup.pp)
        self._drafted = float(setup.drafted)
        self._draft = 0 if setup.speculation is None else setup.speculation.tokens
        self._block = 1.0 / layers
        self._meet = rates.meet
        self._captured = setup.engine.graph_batch if setup.graphs else 0
        self._piecewise = setup.piecewise_tokens
        self._layers_us = layers * rates.host_us
        self._graph_us = graph_us * setup.pp
        self._waits = waits
        self._step_us = rates.step_us
        self._begin_us = setup.engine.begin_us if rates.step_us else 0.0
        self._each_us = setup.engine.sequence_us * rates.step_us / setup.engine.step_us if setup.engine.step_us else 0.0

    def us(self, sequences: float, context: float, pieces: Sequence[PrefillChunk] = (), finished: float = 0.0) -> float:
        """Return the time of a step, µs, equal to ``ServingModel.time``."""
        share = self._share
        own = sequences * share
        tokens = own * self._drafted
        for piece in pieces:
            tokens += piece.prompts * share * piece.new
        device, host = _on_line(self._tokens, TOKENS, tokens)
        more, calls = _on_line(self._rows, SEQUENCES, own * self._drafted + finished * share)
        device, host = device + more, self._layers_us if tokens <= self._piecewise else host + calls
        if own > 0:
            read, calls = _on_square(self._decoding, SEQUENCES, CONTEXTS, own, context)
            device, host = device + read, host + calls
            if self._draft:
                one, one_host = _on_line(self._tokens, TOKENS, own)
                end, end_host = _on_line(self._rows, SEQUENCES, own)
                device += self._draft * ((one + read) * self._block + end)
                host += self._draft * ((one_host + calls) * self._block + end_host)
        if pieces:
            first, count = alone(pieces, share)
            more, calls = _on_square(self._pieces, PIECES, PASTS, first.new, first.past)
            device, host = device + count * more, host + count * calls
            for piece in pieces:
                left = piece.prompts * share
                if piece is first:  # equal pieces may be the same object
                    left, count = left - count, 0.0
                if left:
                    device += left * _on_square(self._company, PIECES, PASTS, piece.new, piece.past)[0]
        if not pieces and sequences <= self._captured:
            host = self._graph_us
        engine = self._step_us + self._each_us * (sequences + finished) + (self._begin_us if pieces else 0.0)
        if not self._waits:
            return together(device, host + engine, self._meet)
        return together(device, host, self._meet) + engine


def _place(points: Sequence[int], value: float) -> tuple[int, float]:
    """Return the grid point below a value, and the way to the next point as a share (above 1 beyond the last point)."""
    row = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
    return row, max(value - points[row], 0.0) / (points[row + 1] - points[row])


def _on_line(grid: Lines, points: Sequence[int], value: float) -> tuple[float, float]:
    if value <= 0:
        return 0.0, 0.0
    row, way = _place(points, value)
    return grid[0][row] * (1 - way) + grid[0][row + 1] * way, grid[1][row]


def _on_square(grid: Squares, rows: Sequence[int], columns: Sequence[int], down: float, right: float
               ) -> tuple[float, float]:
    (i, y), (j, x) = _place(rows, down), _place(columns, right)
    above, below = grid[0][i], grid[0][i + 1]
    return ((above[j] * (1 - x) + above[j + 1] * x) * (1 - y) + (below[j] * (1 - x) + below[j + 1] * x) * y,
            grid[1][i][j])


def together(device: float, host: float, meet: float) -> float:
    """Return the time of a device and a host that work at once: the norm of order ``meet``, near the longer time."""
    longest = max(device, host)
    if longest <= 0:
        return 0.0
    return float(longest * (1 + (min(device, host) / longest) ** meet) ** (1 / meet))


def between(grid: Float64, points: Sequence[int], value: float) -> Float64:
    """Return the parts [6] at a value, interpolated on a grid; numbers of calls are those of the point below."""
    if value <= 0:
        return np.zeros(COLUMNS)
    row, way = _place(points, value)
    found: Float64 = grid[row] * (1 - way) + grid[row + 1] * way
    found[LAUNCHES:] = grid[row, LAUNCHES:]
    return found


def in_square(grid: Float64, rows: Sequence[int], columns: Sequence[int], row_value: float, column_value: float
              ) -> Float64:
    """Return the parts [6] at a pair of values, interpolated on a two-dimensional grid like ``between``."""
    (i, down), (j, right) = _place(rows, row_value), _place(columns, column_value)
    above = grid[i, j] * (1 - right) + grid[i, j + 1] * right
    below = grid[i + 1, j] * (1 - right) + grid[i + 1, j + 1] * right
    found: Float64 = above * (1 - down) + below * down
    found[LAUNCHES:] = grid[i, j, LAUNCHES:]
    return found
