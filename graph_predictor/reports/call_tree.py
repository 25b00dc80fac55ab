"""The call tree of a step: phases, the modules in them, the operations in those, with own host and GPU time.

The times are those of ``breakdown``, of the mean step that counts and all ranks together; a node's own time is not
that of the nodes below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graph_predictor.prediction.replay import Replay, ReplayedStep
from graph_predictor.reports.operation_sums import NO_LAUNCH, NO_PHASE, OUTSIDE, OperationSums
from graph_predictor.simulation.critical_path import Causes
from tracer.graph import Phase

STEP = "step"


@dataclass(slots=True)
class CallNode:
    """A phase, module or operation: ``parent`` is a number of the tree (-1: of the step itself). ns, of all steps."""

    name: str
    kind: str
    parent: int
    calls: int = 0
    host_ns: int = 0
    waiting_ns: int = 0
    gpu_ns: int = 0


@dataclass(frozen=True, slots=True)
class CallTree:
    """Nodes, parents before their children, and the number of steps their times are of."""

    nodes: list[CallNode]
    steps: int

    def inclusive(self, what: str) -> list[int]:
        """Return of every node its time and that of all below it, ns: ``host_ns``, ``waiting_ns`` or ``gpu_ns``."""
        sums = [getattr(node, what) for node in self.nodes]
        for at in range(len(self.nodes) - 1, 0, -1):
            sums[self.nodes[at].parent] += sums[at]
        return sums


def call_tree(replay: Replay, counted: Sequence[tuple[int, str]] | None = None) -> CallTree:
    """Return the tree of a replay's steps that count.

    Args:
        replay: what was replayed.
        counted: the steps by rank and name, where they are not all that count.
    """
    wanted = None if counted is None else set(counted)
    steps = [s for s in replay.steps if (s.counts if wanted is None else (s.rank, s.name) in wanted)]
    graphs = replay.graphs
    position = {(g.meta.rank if g.meta.rank >= 0 else i): i for i, g in enumerate(graphs)}
    causes = Causes(replay.program, replay.simulated, [g.kernels.kind for g in graphs])
    tree = _Growing()
    ranks: dict[int, _RankTree] = {}
    for step in steps:
        at = position[step.rank]
        if at not in ranks:
            ranks[at] = _RankTree(tree, OperationSums(replay, at, causes))
        ranks[at].add(step)
    return CallTree(tree.nodes, max(len(steps), 1))


class _Growing:
    """Nodes found so far, by parent, name and kind."""

    def __init__(self) -> None:
        self.nodes = [CallNode(STEP, STEP, -1)]
        self.known: dict[tuple[int, str, str], int] = {}

    def child(self, parent: int, name: str, kind: str) -> int:
        key = parent, name, kind
        if key not in self.known:
            self.known[key] = len(self.nodes)
            self.nodes.append(CallNode(name, kind, parent))
        return self.known[key]

    def base(self, phase: str, module: str) -> int:
        """The node of a module in a phase."""
        at = self.child(0, phase, "phase")
        for part in filter(None, module.split("/")):
            at = self.child(at, part, "module")
        return at


class _RankTree:
    """The nodes of one rank's operations."""

    def __init__(self, tree: _Growing, times: OperationSums) -> None:
        self.tree, self.times = tree, times
        self.node: dict[int, int] = {}
        self.bases: dict[tuple[int, int], int] = {}
        ops = times.graph.ops
        self.step_names = set(times.graph.steps.name.tolist())
        self.columns = [column.tolist() for column in (ops.name, ops.parent, ops.module, ops.phase)]

    def add(self, step: ReplayedStep) -> None:
        rows, sums = self.times.operation_sums(step)
        many = len(self.times.graph.ops)
        for row, (calls, host, waiting, gpu) in zip(rows.tolist(), sums.T.tolist(), strict=True):
            node = self.tree.nodes[self._of(row) if row < many else self._apart(row - many)]
            node.calls += calls
            node.host_ns += host
            node.waiting_ns += waiting
            node.gpu_ns += gpu

    def _apart(self, which: int) -> int:
        return self.tree.child(self.tree.base(NO_PHASE, ""), (OUTSIDE, NO_LAUNCH)[which], "operation")

    def _of(self, row: int) -> int:
        """The node of an operation: below the one it is called in, where that is of the same module and phase."""
        chain = []
        names, parents, modules, phases = self.columns
        while row not in self.node:
            chain.append(row)
            above = parents[row]
            if above < 0 or names[above] in self.step_names:
                break
            if modules[above] != modules[row] or phases[above] != phases[row]:
                break
            row = above
        at = self.node.get(row)
        if at is None:
            at = self._base(modules[row], phases[row])
        for each in reversed(chain):
            at = self.node[each] = self.tree.child(at, self.times.graph.string(names[each]), "operation")
        return at

    def _base(self, module: int, phase: int) -> int:
        if (module, phase) not in self.bases:
            named = Phase(phase).name.lower() if phase >= 0 else NO_PHASE
            self.bases[module, phase] = self.tree.base(named, self.times.graph.string(module))
        return self.bases[module, phase]
