"""Another implementation of the optimizer's step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.prediction.result import OPTIMIZER
from graph_predictor.prediction.rewriting import host_weight, units_of
from graph_predictor.prediction.scenario import EditError, Replacement, Rewriting, Scenario, WorkUnits, sized
from kernel_models.op_call import Family, OpCall
from tracer.arrays import Bool, Float64
from tracer.graph import OpKind, Phase
from tracer.optimizer_memory import MUCH, STATES

OPERATIONS = {"adam": 12.0, "sgd": 4.0, "adagrad": 8.0, "rmsprop": 8.0}
"""Floating-point operations for each parameter, counted from the formulas."""
FEW_STATES = 1.5
"""Bytes of an optimizer's states for each byte of parameters; with fewer it keeps one value for each, else two."""


@dataclass(frozen=True)
class FusedOptimizer:
    """Fuse the optimizer's step: its kernels read and write every value once.

    Assumes fp32 parameters, and that the optimizer's annotation marks all of its operations. One kernel a step remains
    (on a CPU one loop a parameter): it reads parameters, gradients and states and writes parameters and states. It
    takes the replaced kernels' time × model(fused) / model(replaced). Of the optimizer's host time, the part before its
    first operation (Python collects the parameters) and that operation remain. Gradient clipping outside the optimizer
    stays.
    """

    def describe(self) -> str:
        """Return one phrase for reports."""
        return "fused optimizer"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        scenario = scenario.claim("the optimizer", "--fused-optimizer")
        units = units_of(scenario)
        mine = _of_optimizer(units)
        if not mine.any():
            raise EditError("No operation of the step is marked as the optimizer's: there is nothing to fuse.")
        kernels = int(units.kernels[mine].sum())
        if kernels <= scenario.cycle.steps * len(scenario.built.graphs) or _fused_already(scenario, units, mine):
            raise EditError("The optimizer is fused already.")
        scenario.known_source()
        if not fuse(scenario, units).replacements:
            raise EditError("The sizes of the parameters were not recorded: the fused step cannot be priced; record "
                            "with record_shapes=True.")
        return replace(scenario, rewrites={**scenario.rewrites, OPTIMIZER: fuse})


def fuse(scenario: Scenario, units: WorkUnits) -> Rewriting:
    """Replace the optimizer's operations by one fused operation for each rank and step."""
    mine = np.flatnonzero(_of_optimizer(units))
    kind = _kind(scenario)
    states = STATES[kind]
    found = []
    for key in np.unique(np.stack([units.rank[mine], units.step[mine]]), axis=1).T.tolist():
        own = mine[(units.rank[mine] == key[0]) & (units.step[mine] == key[1])]
        own = own[np.argsort(units.start[own], kind="stable")]
        sizes = _parameters(scenario, units, own)
        if not sizes:
            return Rewriting([])
        # A GPU's kernel updates many tensors at once; a CPU updates one after another, each still in its cache.
        found.append(Replacement(own, tuple(
            OpCall(Family.OPTIMIZER, kind, (1, elements), "fp32", flops=OPERATIONS[kind] * elements,
                   bytes_read=4.0 * elements * (2 + states), bytes_written=4.0 * elements * (1 + states))
            for elements in (sizes if units.on_host else [sum(sizes)]))))
    heads = [(int(units.rank[one.units[0]]), int(units.op[one.units[0]])) for one in found]
    return Rewriting(found, _host_weight(scenario, heads))


def _of_optimizer(units: WorkUnits) -> Bool:
    found: Bool = units.alive & (units.phase == Phase.OPTIMIZER)
    return found


def _fused_already(scenario: Scenario, units: WorkUnits, mine: Bool) -> bool:
    """Return whether an operation of the optimizer names itself fused."""
    names = {scenario.built.graphs[r].string(int(scenario.built.graphs[r].ops.name[op]))
             for r, op in zip(units.rank[mine].tolist(), units.op[mine].tolist(), strict=True) if op >= 0}
    return any("_fused_adam" in name or "_fused_sgd" in name or "_fused_adagrad" in name for name in names)


def _parameters(scenario: Scenario, units: WorkUnits, own: np.ndarray) -> list[int]:
    """Return the number of elements of each parameter of a rank. Every operation of an optimizer runs over all
    parameters, most of them once a step; operations on lists have the elements of each list."""
    sizes: dict[int, list[int]] = defaultdict(list)
    graph = scenario.built.graphs[int(units.rank[own[0]])]
    for u in own.tolist():
        for call in units.calls[u]:
            if sized((call,)) and call.family in (Family.ELEMENTWISE, Family.OPTIMIZER):
                elements = call.dims[0 if call.family is Family.ELEMENTWISE else 1]
                sizes[int(graph.ops.name[units.op[u]])].append(int(elements))
    most = max(map(sum, sizes.values()), default=0)
    return min((each for each in sizes.values() if most and sum(each) >= MUCH * most), key=sum, default=[])


def _kind(scenario: Scenario) -> str:
    """Return the optimizer's key in ``STATES``: from its annotation in the recording, or from the memory of states in a
    trace by shapes. For any other optimizer it is Adam's, which keeps the most."""
    graphs = (scenario if scenario.origin is None else scenario.origin.scenario).built.graphs
    names = " ".join(graph.string(int(code)).lower() for graph in graphs
                     for code in np.unique(graph.ops.name[graph.ops.kind == OpKind.ANNOTATION]))
    named = next((kind for kind in STATES if f"optimizer.step#{kind}." in names), None)
    memory = graphs[0].meta.memory
    one_state = memory.get("optimizer_state", 0) < FEW_STATES * memory.get("parameters", 0)
    return named or ("sgd" if one_state else "adam")


def _host_weight(scenario: Scenario, heads: list[tuple[int, int]]) -> Float64:
    """Return a factor on each slice of host time: 0 in the optimizer, except in ``heads`` and before them."""
    chosen = []
    for rank, graph in enumerate(scenario.built.graphs):
        kept = np.zeros(len(graph.ops), np.bool_)
        for of_rank, head in heads:
            here = head if of_rank == rank else -1
            while here >= 0:
                kept[here] = True
                here = int(graph.ops.parent[here])
        chosen.append((graph.ops.phase == Phase.OPTIMIZER) & ~kept)
    return host_weight(scenario, chosen, 0.0)
