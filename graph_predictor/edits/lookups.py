"""Other indices of the embedding tables."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.prediction.pricing import change_ratios, prices_of, resized_on_cpu
from graph_predictor.prediction.scenario import EditError, Scenario
from kernel_models.families.embedding import with_tables
from kernel_models.op_call import OpCall
from kernel_models.operation import Operation, calls_of
from kernel_models.trace_calls import pair_lookups
from tracer.arrays import Float64
from tracer.columns import nearest
from tracer.graph import ExecutionGraph
from tracer.lookup_data.indices import Indices, read_indices
from tracer.lookup_data.noted import find_lookups, note_indices, noted_tables
from tracer.lookup_data.tables import EmbeddingTable

Noted = dict[int, tuple[EmbeddingTable, ...]]
"""Row of ``graph.ops`` → tables it looks up."""


@dataclass(frozen=True)
class OtherIndices:
    """Look up rows of embedding tables by other indices: their repetitions and bag lengths decide the time.

    Each look-up and its gradient take their recorded time × model(these indices) / model(recorded indices). The
    recorded indices are those that the capture counted (``--lookups``) or that the workload states, else rows drawn
    evenly. Assumes that the number of look-ups stays that of the step.
    """

    indices: Indices

    @classmethod
    def parse(cls, text: str) -> OtherIndices:
        """Return the edit with indices from a file or a law. Raises ``TableError``."""
        return cls(read_indices(text))

    def describe(self) -> str:
        """Return one phrase for reports."""
        return f"indices of {self.indices.source}"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        scenario = scenario.claim("the indices", "--indices")
        scenario.known_source()
        noted = [tables_with(graph, self.indices) for graph in scenario.built.graphs]
        tables, notes = [found for found, _ in noted], list(dict.fromkeys(note for _, own in noted for note in own))
        for note in notes:
            scenario = scenario.with_note(note)
        if scenario.built.computes_on_host:
            return _on_cpu(scenario, tables)
        work, kernels = scenario.work, scenario.kernels
        calls = [kernels.calls.get(number, work.calls[number]) for number in work.call_row.tolist()]
        new = [tuple(with_tables(call, tables[rank].get(op, ())) for call in own)
               for own, rank, op in zip(calls, work.rank.tolist(), work.op.tolist(), strict=True)]
        if new == calls:
            raise EditError(f"No look-up of the step changes with {self.describe()}: "
                            f"{' '.join(notes) or 'it looks rows up so already.'}")
        regrouped, after = work.regrouped(new)
        return replace(scenario, regrouped=regrouped, kernels=replace(kernels, calls=after))


def tables_with(graph: ExecutionGraph, indices: Indices) -> tuple[Noted, list[str]]:
    """Return the tables of each operation that looks up rows, with these indices, and sentences on what was not found.
    ``graph`` does not change."""
    copy = replace(graph, strings=list(graph.strings), ops=graph.ops.take(np.arange(len(graph.ops))))
    notes = note_indices(copy, indices)
    found = {row: noted_tables(copy.arguments(row)[position].value)
             for own in find_lookups(copy) for row, position in own.rows}
    found.update({row: found[lookup] for row, (lookup, _) in pair_lookups(copy).items() if lookup in found})
    return found, notes


def _on_cpu(scenario: Scenario, tables: list[Noted]) -> Scenario:
    """Return the scenario on a CPU: time in operations that look up rows, inner ones included, × model(new/old)."""
    slices = scenario.slices
    weight: Float64 = np.ones(len(slices))
    differs = False
    for rank, graph in enumerate(scenario.built.graphs):
        rows = list(tables[rank])
        before: list[tuple[OpCall, ...]] = [calls_of(Operation.from_graph(graph, row)) for row in rows]
        after = [tuple(with_tables(call, tables[rank][row]) for call in own)
                 for row, own in zip(rows, before, strict=True)]
        differs |= before != after
        spec, models = scenario.known_source(), scenario.devices.source_models
        ratio = change_ratios(prices_of(before, spec, models), prices_of(after, spec, models)).ratio
        of_op = np.ones(len(graph.ops) + 1)
        of_op[rows] = ratio
        looks_up = np.zeros(len(graph.ops), np.bool_)
        looks_up[rows] = True
        of_op[:-1] = of_op[nearest(graph.ops.parent, looks_up, np.arange(len(graph.ops)))]
        mine = (slices.rank == rank) & (slices.op >= 0)
        weight[mine] = of_op[slices.op[mine]]
    if not differs:
        raise EditError("No look-up of the step changes with these indices: it looks rows up so already.")
    changed = np.abs(weight - 1.0) > 0
    ns = scenario.host_times() * weight
    working = scenario.cycle.working[slices.item]
    spread = resized_on_cpu(ns[changed], weight[changed], float(ns[working].sum()))
    return replace(scenario, host=scenario.host.scaled(weight).widened(spread))
