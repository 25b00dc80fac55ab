"""Work that the step no longer does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

import numpy as np

from graph_predictor.prediction.scenario import EditError, Replacement, Rewriting, Scenario, WorkUnits
from tracer.arrays import Bool
from tracer.columns import within
from tracer.graph import ExecutionGraph, OpKind

MOST_NAMES = 3  # chosen: names that a sentence shows


@dataclass(frozen=True)
class Remove:
    """Remove operations by name, or by a pattern with ``*`` and ``?``, with everything inside them: host time,
    launches, kernels and waits. Alternatives are separated by ``|``.

    A bound on what a step without the operation takes. Assumes that all other operations stay as they are: those of
    backward are operations of their own, with their own names, and Python between the operations still runs.

    Attributes:
        operation: the name or pattern, in upper and lower case as recorded.
    """

    operation: str

    def describe(self) -> str:
        """Return one phrase for reports."""
        return f"{self.operation} removed"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        graphs = scenario.built.graphs
        named = [self._named(graph) for graph in graphs]
        removed = [within(graph.ops.parent, mine) for graph, mine in zip(graphs, named, strict=True)]
        outermost = [mine & ~np.append(inside, False)[graph.ops.parent] for graph, mine, inside in zip(
            graphs, named, removed, strict=True)]
        in_steps = [mine & np.isin(graph.ops.step, rows) for graph, mine, rows in zip(
            graphs, outermost, scenario.cycle.row, strict=True)]
        if not any(mine.any() for mine in in_steps):
            raise EditError(self._unknown(graphs))

        def rewriting(_: Scenario, units: WorkUnits) -> Rewriting:
            gone = np.zeros(len(units), np.bool_)
            for rank, mine in enumerate(removed):
                gone |= (units.rank == rank) & np.append(mine, False)[units.op]
            rows = np.flatnonzero(gone & units.alive)
            return Rewriting([Replacement(rows, ())] if len(rows) else [], removed=removed)

        # Before all other rewrites, which apply to the work that is left.
        return replace(scenario, rewrites={**scenario.rewrites, f"- {self.operation}": rewriting}).with_note(
            self._what(scenario, in_steps, removed))

    def _named(self, graph: ExecutionGraph) -> Bool:
        """Return which rows of a rank's ``ops`` have a name that matches."""
        patterns = [text.strip() for text in self.operation.split("|")]
        names = np.array([any(fnmatchcase(text, pattern) for pattern in patterns) for text in graph.strings] or [False],
                         np.bool_)
        found: Bool = names[graph.ops.name] & (graph.ops.kind == OpKind.OPERATION)
        return found

    def _unknown(self, graphs: list[ExecutionGraph]) -> str:
        """Return the reason why nothing can be removed."""
        names = sorted({graph.string(code) for graph in graphs for code in np.unique(
            graph.ops.name[graph.ops.kind == OpKind.OPERATION]).tolist()})
        if not names:
            return "No operation of the step was recorded: there is none to remove."
        near = get_close_matches(self.operation, names, MOST_NAMES, 0.0)
        return (f"The step has no operation {self.operation!r}; name one of its own, such as {', '.join(near)}, or "
                "give a pattern, such as 'aten::*dropout*'.")

    def _what(self, scenario: Scenario, operations: list[Bool], removed: list[Bool]) -> str:
        """Return a sentence on the removed work: counts and times a step, of all ranks."""
        slices, program, steps = scenario.slices, scenario.built.program, scenario.cycle.steps
        mine = scenario.cycle.working[slices.item] & (slices.op >= 0)
        kernel = scenario.cycle.kernel & np.concatenate([np.append(inside, False)[graph.kernels.op]
                                                         for inside, graph in zip(removed, scenario.built.graphs,
                                                                                  strict=True)])
        host_ns = sum(float(scenario.host_times()[rows][inside[slices.op[rows]]].sum()) for rank, inside in enumerate(
            removed) for rows in [np.flatnonzero(mine & (slices.rank == rank))])
        names = Counter[str]()
        for graph, chosen in zip(scenario.built.graphs, operations, strict=True):
            for code, count in zip(*np.unique(graph.ops.name[chosen], return_counts=True), strict=True):
                names[graph.string(int(code))] += int(count)
        device_ns = program.kernel_duration[kernel].sum() / steps
        device = f" and {kernel.sum() / steps:,.10g} kernels of {device_ns / 1e6:,.3f} ms" if len(kernel) else ""
        ranks = f" of {len(removed)} ranks" if len(removed) > 1 else ""
        return (f"Removed a step{ranks}: {_listed(names, steps)}, with {host_ns / steps / 1e6:,.3f} ms of host time"
                f"{device}. Their backward, if it has other names, and memory stay as they were.")


def _listed(names: Counter[str], steps: int) -> str:
    """Return how often each operation ran a step, the most frequent first."""
    known = names.most_common(MOST_NAMES)
    more = sum(names.values()) - sum(count for _, count in known)
    return ", ".join(f"{count / steps:,.10g} × {name}" for name, count in known) + (
        f" and {more / steps:,.10g} others" if more else "")
