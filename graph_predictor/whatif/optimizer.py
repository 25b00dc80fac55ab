"""Another implementation of the optimizer's step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.prediction.scenario import EditError, Scenario
from graph_predictor.program import Int64
from kernel_models.op_call import Family, OpCall
from tracer.graph import OpKind, Phase

STATES = {"adam": 2, "sgd": 1}
"""Values an optimizer keeps beside each parameter: Adam's two moments, SGD's momentum."""


@dataclass(frozen=True)
class FusedOptimizer:
    """The optimizer's step as fused kernels that read and write every value once.

    Assumes: parameters in fp32; the operations marked as the optimizer's, by its annotation, are all of it and their
    host time shrinks with their number of kernels; one kernel a step is left that reads parameters, gradients and
    states and writes parameters and states back. Gradient clipping outside the optimizer stays.
    """

    def describe(self) -> str:
        """One phrase."""
        return "fused optimizer"

    def apply(self, scenario: Scenario) -> Scenario:
        """See ``Edit``."""
        scenario = scenario.claim("the optimizer", "--fused-optimizer")
        work = scenario.work
        in_cycle = _pieces_in_cycle(scenario)
        mine = np.flatnonzero(in_cycle & (work.op >= 0) & _is_optimizer(scenario))
        if not len(mine):
            raise EditError("No operation of the step is marked as the optimizer's: there is nothing to fuse.")
        if len(np.unique(work.piece[np.isin(work.piece, mine) & scenario.cycle.kernel])) <= scenario.cycle.steps:
            raise EditError("The optimizer is fused already.")
        scenario.known_source()
        elements, kind = _elements(scenario, mine), _kind(scenario)
        if not elements:
            raise EditError("The sizes of the parameters were not recorded: the fused step cannot be priced; record "
                            "with "
                            "record_shapes=True.")
        # The first piece of each rank and step becomes the fused kernel, the others nothing.
        calls, after = list(work.calls), dict(scenario.calls)
        group = work.group.copy()
        steps = scenario.cycle.steps
        states = STATES[kind]
        fused = OpCall(Family.OPTIMIZER, kind, (1, elements), "fp32", flops=12.0 * elements,
                       bytes_read=4.0 * elements * (2 + states), bytes_written=4.0 * elements * (1 + states))
        kernel_factor = np.ones(len(work.piece)) if scenario.kernel_factor is None else scenario.kernel_factor.copy()
        for rank in np.unique(work.rank[mine]).tolist():
            own = mine[work.rank[mine] == rank]
            heads = np.array([part[0] for part in np.array_split(own, steps) if len(part)])
            for head in heads.tolist():
                calls.append(work.calls[group[head]])
                group[head] = len(calls) - 1
                after[len(calls) - 1] = (fused,)
            gone = np.setdiff1d(own, heads)
            kernel_factor[np.isin(work.piece, gone)] = 0.0
        kept = _host_kept(scenario)
        return replace(scenario, work=replace(work, calls=calls, group=group), calls=after, kernel_factor=kernel_factor,
                       host_kept=kept if scenario.host_kept is None else kept & scenario.host_kept)


def _is_optimizer(scenario: Scenario) -> np.ndarray:
    """Pieces of device work whose operation is the optimizer's."""
    work = scenario.work
    found = np.zeros(len(work.op), np.bool_)
    for rank, graph in enumerate(scenario.built.graphs):
        rows = np.flatnonzero((work.rank == rank) & (work.op >= 0))
        found[rows] = graph.ops.phase[work.op[rows]] == Phase.OPTIMIZER
    return found


def _pieces_in_cycle(scenario: Scenario) -> np.ndarray:
    found = np.zeros(len(scenario.work.op), np.bool_)
    found[np.unique(scenario.work.piece[scenario.cycle.kernel & (scenario.work.piece >= 0)])] = True
    return found


def _elements(scenario: Scenario, mine: Int64) -> int:
    """Parameters of the first rank: the data of the largest single operation kind over the optimizer's pieces, a
    step."""
    work = scenario.work
    by_name: dict[tuple[int, str], float] = {}
    graph = scenario.built.graphs[0]
    for i in mine[work.rank[mine] == 0].tolist():
        name = graph.string(int(graph.ops.name[work.op[i]]))
        for call in work.calls[work.group[i]]:
            if "unsized" not in call.flags and call.family in (Family.ELEMENTWISE, Family.OPTIMIZER):
                elements = call.dims[0] if call.family is Family.ELEMENTWISE else call.dims[1]
                by_name[i, name] = by_name.get((i, name), 0.0) + elements
    totals: dict[str, float] = {}
    for (_, name), elements in by_name.items():
        totals[name] = totals.get(name, 0.0) + elements
    return int(min(totals.values(), default=0.0) / scenario.cycle.steps)


def _kind(scenario: Scenario) -> str:
    """Adam or SGD, by the name of the optimizer's annotation."""
    names = " ".join(graph.string(int(code)) for graph in scenario.built.graphs
                     for code in np.unique(graph.ops.name[graph.ops.kind == OpKind.ANNOTATION]))
    return "sgd" if "Optimizer.step#SGD" in names else "adam"


def _host_kept(scenario: Scenario) -> np.ndarray:
    """Pieces of host time outside the optimizer's operations."""
    pieces = scenario.pieces
    kept = np.ones(len(pieces), np.bool_)
    for rank, graph in enumerate(scenario.built.graphs):
        rows = np.flatnonzero(pieces.rank == rank)
        op = np.where(pieces.op[rows] >= 0, pieces.op[rows], pieces.following[rows])
        phase = np.append(graph.ops.phase, -1)[op]
        kept[rows] = phase != Phase.OPTIMIZER
    return kept
