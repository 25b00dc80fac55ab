"""What is kept of a traced step: its distinct operations and how often each runs, for any batch."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_models.op_call import OpCall
from kernel_models.operation import Operation, calls_at
from tracer.graph import ExecutionGraph, OpKind
from tracer.views import Argument

BATCH = 1009
"""Batch that is traced: a prime that no other size of a model is a multiple of."""
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")


@dataclass(frozen=True, slots=True)
class Traced:
    """A step's distinct operations as plain rows [name, place, [[dtype, shape, stride, value], …], count]."""

    rows: list[list[Any]]

    def at_batch(self, batch: int) -> Iterator[tuple[Operation, int, int]]:
        """Operations at a batch, each with its place and how often it runs."""
        for name, place, arguments, count in self.rows:
            given = tuple(Argument(dtype, _sizes(shape, batch), _sizes(stride, batch), _text(value, batch))
                          for dtype, shape, stride, value in arguments)
            yield Operation(name, given), place, count

    def calls(self, batch: int) -> Counter[OpCall]:
        """Device work at a batch: how often each call runs."""
        found: Counter[OpCall] = Counter()
        for operation, place, count in self.at_batch(batch):
            for call in calls_at(operation, place):
                found[call] += count
        return found

    @property
    def operations(self) -> int:
        """How many operations the step runs."""
        return sum(row[-1] for row in self.rows)

    def save(self, path: Path) -> None:
        """Write to a file, whole or not at all."""
        part = path.with_suffix(".part")
        part.write_bytes(gzip.compress(json.dumps(self.rows, separators=(",", ":")).encode(), 6))
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Traced:
        """Back from a file."""
        return cls(json.loads(gzip.decompress(path.read_bytes())))


def traced_of(graph: ExecutionGraph) -> Traced:
    """The distinct operations of a graph's steps."""
    found: Counter[tuple[Any, ...]] = Counter()
    for op in range(len(graph.ops)):
        if graph.ops.kind[op] != OpKind.OPERATION:
            continue
        arguments = tuple((one.dtype, one.shape, one.stride, one.value) for one in graph.arguments(op))
        found[graph.string(int(graph.ops.name[op])), int(graph.ops.place[op]), arguments] += 1
    return Traced([[name, place, arguments, count] for (name, place, arguments), count in found.items()])


def _sizes(sizes: Any, batch: int) -> Any:
    if sizes is None:
        return None
    if isinstance(sizes, (list, tuple)):
        return tuple(_sizes(one, batch) for one in sizes)
    return sizes // BATCH * batch if isinstance(sizes, int) and sizes and sizes % BATCH == 0 else sizes


def _text(value: str, batch: int) -> str:
    return _NUMBER.sub(lambda found: str(_sizes(int(found[0]), batch)), value) if value else value
