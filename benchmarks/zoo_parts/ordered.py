"""What is kept of a traced step whose order matters: the operations that work on the device, one after the other."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

from kernel_models.op_call import OpCall
from kernel_models.operation import Operation, calls_at, is_free
from tracer.graph import ExecutionGraph, OpKind
from zoo_parts.traced import Traced


@dataclass(frozen=True, slots=True)
class Ordered:
    """A step's operations in order.

    Attributes:
        distinct: each operation once, with how often it runs.
        order: rows of ``distinct`` in the order in which they run; views and the like are left out.
    """

    distinct: Traced
    order: list[int]

    @property
    def operations(self) -> int:
        """How many operations of the step work on the device."""
        return len(self.order)

    def calls(self, batch: int) -> list[tuple[OpCall, ...]]:
        """Device work at a batch, operation by operation."""
        known = [calls_at(operation, place) for operation, place, _ in self.distinct.at_batch(batch)]
        return [known[row] for row in self.order if known[row]]

    def save(self, path: Path) -> None:
        """Write to a file, whole or not at all."""
        content = json.dumps([self.distinct.rows, self.order], separators=(",", ":")).encode()
        part = path.with_suffix(".part")
        part.write_bytes(gzip.compress(content, 6))
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Ordered:
        """Back from a file."""
        rows, order = json.loads(gzip.decompress(path.read_bytes()))
        return cls(Traced(rows), order)


def ordered_of(graph: ExecutionGraph) -> Ordered:
    """The operations of a graph's step that work on the device."""
    places: dict[tuple[object, ...], int] = {}
    counts: list[int] = []
    order = []
    for op in range(len(graph.ops)):
        name = graph.string(int(graph.ops.name[op]))
        if graph.ops.kind[op] != OpKind.OPERATION or is_free(name):
            continue
        arguments = tuple((one.dtype, one.shape, one.stride, one.value)
                          for one in Operation.from_graph(graph, op).arguments)
        row = places.setdefault((name, int(graph.ops.place[op]), arguments), len(places))
        counts[row:row + 1] = [counts[row] + 1 if row < len(counts) else 1]
        order.append(row)
    return Ordered(Traced([[name, place, arguments, count] for (name, place, arguments), count in
                           zip(places, counts, strict=True)]), order)
