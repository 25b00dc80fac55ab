"""Activation checkpointing: a block's forward run again in backward, or no longer."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.prediction.result import kept_when_recomputed
from graph_predictor.prediction.rewriting import host_weight
from graph_predictor.prediction.scenario import EditError, Scenario
from graph_predictor.simulation.host_slices import top_operations
from kernel_models.op_call import PRODUCTS, Family
from kernel_models.operation import family_of
from tracer.arrays import Bool, Int64
from tracer.columns import within
from tracer.graph import ExecutionGraph, OpKind, Phase

LEAST_BLOCK = 3
"""Least number of operations of a repeated block, if only the sequence of operations shows it."""


@dataclass(frozen=True)
class Recompute:
    """Switch activation checkpointing of every repeated block on or off.

    On: the kernels and host time of the blocks' forward come twice. The repetition is priced in forward rather than in
    backward; the step is equally long, unless different resources decide forward and backward. Collectives of the
    blocks are not repeated, and what Python spends on checkpointing itself is neither added nor taken away. Blocks are
    modules with a number in their name; where modules were not recorded, the longest run of equal operations in
    forward. Off: forward operations that run within backward are left out. Memory (known for steps traced by shapes):
    with checkpointing, each block's input and one block's activations are kept.
    """

    on: bool

    def describe(self) -> str:
        """Return one phrase for reports."""
        return f"recomputation {'on' if self.on else 'off'}"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        scenario = scenario.claim("recomputation", f"--recompute {'on' if self.on else 'off'}")
        recomputed = [recomputed_operations(graph) for graph in scenario.built.graphs]
        if self.on:
            if any(found.any() for found in recomputed):
                raise EditError("The step recomputes its forward in backward already.")
            chosen, blocks = zip(*(forward_blocks(graph) for graph in scenario.built.graphs), strict=True)
            if not any(found.any() for found in chosen):
                raise EditError("No block of the forward repeats itself, neither by its modules' names nor by its "
                                "operations: there is nothing to recompute block by block.")
            return _on(scenario, list(chosen), min(blocks))
        if not any(found.any() for found in recomputed):
            raise EditError("The step recomputes nothing: no forward operation runs within its backward.")
        changed = _times(scenario, recomputed, 0.0)
        unknown = any(graph.meta.memory for graph in scenario.built.graphs)
        return changed.with_note("What is recomputed in backward was left out" + (
            "; the activations that are then kept are not counted in the peak memory." if unknown else "."))


def _on(scenario: Scenario, chosen: list[Bool], blocks: int) -> Scenario:
    changed = _times(scenario, chosen, 2.0)
    forward = [(graph.ops.phase == Phase.FORWARD) & (graph.ops.kind == OpKind.OPERATION)
               for graph in scenario.built.graphs]
    shares = [float(found[mine].mean()) for found, mine in zip(chosen, forward, strict=True) if mine.any()]
    share = math.fsum(shares) / max(len(shares), 1)
    kept = [kept_when_recomputed(graph, found, blocks) for graph, found in zip(scenario.built.graphs, chosen,
                                                                               strict=True)]
    factors = {**changed.activation_factors, "recompute": max(kept)}
    return replace(changed, activation_factors=factors).with_note(
        f"{blocks} blocks, {share:.0%} of forward's operations, are run again in backward.")


def _times(scenario: Scenario, chosen: list[Bool], factor: float) -> Scenario:
    """Return the scenario with kernels and host time of each rank's chosen operations scaled by a factor."""
    program = scenario.built.program
    kernel = np.ones(len(program.kernel_item))
    around = [found | _around(graph, found) if not factor else found for graph, found in zip(
        scenario.built.graphs, chosen, strict=True)]
    host = host_weight(scenario, around, factor, chosen)
    for rank, (graph, found) in enumerate(zip(scenario.built.graphs, chosen, strict=True)):
        within = np.append(found, False)
        low = int(program.kernel_ptr[rank])
        mine = low + np.flatnonzero(within[graph.kernels.op])
        kernel[mine[scenario.work.kernel_group[mine] >= 0]] *= factor
    return replace(scenario, kernels=scenario.kernels.scaled(kernel), host=scenario.host.scaled(host))


def _around(graph: ExecutionGraph, recomputed: Bool) -> Bool:
    """Return a mask of the backward functions around recomputed operations; Python between these belongs to them."""
    found = np.zeros(len(graph.ops), np.bool_)
    above = graph.ops.parent[recomputed]
    found[above[above >= 0]] = True
    return found & ~recomputed & (graph.ops.kind == OpKind.OPERATION)


def recomputed_operations(graph: ExecutionGraph) -> Bool:
    """Return the forward operations that run within backward, and the operations inside them, as a mask over rows.

    In recordings they have an autograd sequence number of their own, which operations of backward functions lack. In a
    step traced by shapes, backward carries forward's numbers; there, recomputed numbers are larger than all before.
    """
    ops = graph.ops
    backward = (ops.phase == Phase.BACKWARD) & (ops.sequence >= 0)
    found = np.zeros(len(ops), np.bool_)
    if not (ops.forward_thread > 0).any():
        order = np.argsort(ops.start_ns, kind="stable")
        numbers = ops.sequence[order]
        before = np.concatenate([[-1], np.maximum.accumulate(numbers)[:-1]]) if len(order) else numbers
        found[order[(numbers > before) & backward[order]]] = True
        return within(ops.parent, found)
    named = np.array([text.startswith("aten::") for text in graph.strings] or [False], np.bool_)
    found = backward & (ops.forward_thread <= 0) & named[ops.name] & (ops.kind == OpKind.OPERATION)
    return within(ops.parent, found)


def forward_blocks(graph: ExecutionGraph) -> tuple[Bool, int]:
    """Return the operations of forward's repeated blocks, and the number of blocks in a step."""
    forward = graph.ops.phase == Phase.FORWARD
    found, count = _by_module(graph, forward)
    if not count:
        found, count = _by_sequence(graph, forward)
    return within(graph.ops.parent, found) & forward, count


def _by_module(graph: ExecutionGraph, forward: Bool) -> tuple[Bool, int]:
    """Find blocks by modules' paths, such as Gpt2/blocks/2/attention: the outermost numbered part that has numbered
    siblings."""
    module = graph.ops.module
    block: dict[int, str] = {}
    beside: dict[str, set[str]] = defaultdict(set)
    for code in np.unique(module[forward & (module >= 0)]).tolist():
        parts = graph.string(code).split("/")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is not None:
            block[code] = "/".join(parts[:at + 1])
            beside["/".join(parts[:at])].add(parts[at])
    of_name: dict[str, list[int]] = defaultdict(list)
    for code, name in block.items():
        of_name[name].append(code)
    # Numbered layers of a plain sequence are single operations, not blocks.
    names = sorted(name for name, codes in of_name.items() if len(beside[name.rpartition("/")[0]]) > 1
                   and (forward & np.isin(module, codes)).sum() >= LEAST_BLOCK)
    found = np.zeros(len(module), np.bool_)
    for name in names:
        mine = np.flatnonzero(forward & np.isin(module, of_name[name]))
        for step in np.unique(graph.ops.step[mine]).tolist():
            rows = mine[graph.ops.step[mine] == step]
            rows = rows[np.argsort(graph.ops.start_ns[rows], kind="stable")]
            found[rows[:_needed(graph, rows)]] = True
    return found, len(names)


def _needed(graph: ExecutionGraph, rows: Int64) -> int:
    """Return how many of a block's operations run again. Recomputation stops early (PyTorch's does): at the last
    operation that keeps something for backward, or before it if that is a product, which keeps only its inputs."""
    for count in range(len(rows), 0, -1):
        family = family_of(graph.string(int(graph.ops.name[rows[count - 1]])))
        if family in PRODUCTS:
            return count - 1
        if family not in (Family.OTHER, Family.ELEMENTWISE, Family.COPY):
            return count
    return len(rows)


def _by_sequence(graph: ExecutionGraph, forward: Bool) -> tuple[Bool, int]:
    """Find blocks in each step as its longest run of equal groups of operations (names and sizes), back to back."""
    ops = graph.ops
    found = np.zeros(len(ops), np.bool_)
    most = 0
    top = top_operations(graph)
    top = top[forward[top]]
    for step in np.unique(ops.step[top]).tolist():
        rows = top[ops.step[top] == step]
        rows = rows[np.argsort(ops.start_ns[rows], kind="stable")]
        _, token = np.unique(np.stack([ops.name[rows], ops.shapes[rows]]), axis=1, return_inverse=True)
        first, length, blocks = repeated_run(token.reshape(-1).astype(np.int64))
        found[rows[first:first + length]] = True
        most = max(most, blocks)
    return found, most


def repeated_run(token: Int64) -> tuple[int, int, int]:
    """Return (first, length, repeats) of the longest run that repeats one period; of equally long runs, that with the
    shortest period."""
    best = (0, 0, 0)
    for period in range(LEAST_BLOCK, len(token) // 2 + 1):
        same = token[period:] == token[:-period]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], same.astype(np.int8), [0]])))
        if not len(edges):
            continue
        begins, lengths = edges[::2], edges[1::2] - edges[::2]
        at = int(np.argmax(lengths))
        repeats = (int(lengths[at]) + period) // period
        if repeats >= 2 and repeats * period > best[1]:
            best = (int(begins[at]), repeats * period, repeats)
    return best
