"""A step's operations at other sizes, kind by kind: from one capture whose dimensions are scaled, or by the laws of
several.

Operations of one name with the same arguments in every capture are one *kind*. Those of several captures are aligned in
program order; a kind's arguments at the new sizes follow from its arguments in the captures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graph_predictor.prediction.operation_costs import OperationCosts, every_operation, operation_costs, partners
from graph_predictor.prediction.scenario import EditError, Scenario
from graph_predictor.sizes.argument_laws import new_arguments
from graph_predictor.sizes.number_laws import NoLawError, NumberLaws
from graph_predictor.sizes.scaled_shapes import ScaledShapes
from kernel_models.operation import Operation
from tracer.arrays import Bool, Float64, Int64
from tracer.graph import NONE

MOST_ALONE = 0.02
"""Share of a step's time that operations without a partner in another capture may have, and those without a law."""
NO_PARTNER = -2


@dataclass(frozen=True, slots=True)
class Kind:
    """Equal operations: of one name and the same arguments, in every capture.

    Attributes:
        name: of the operation.
        recorded: one of each capture; of the first alone where another has no partner.
        new: at the new sizes; as in the first capture where it has no partners.
        lawless: why its numbers follow no law, if they do not (a buffer that goes by blocks of a library's, a count
            that depends on the data, a pair that is none); such operations have no partners.
        undecided: whether it works on what may be a parameter or samples, for all that one capture says.
    """

    name: str
    recorded: tuple[Operation, ...]
    new: Operation
    lawless: str = ""
    undecided: bool = False


class ResizedRank:
    """One rank's operations at other sizes, as a source of shapes gives them.

    Attributes:
        rank: position in each job.
        costs: what the operations of each capture cost, self times; the first capture is the one that is edited.
        partner: row of each capture for every row of the first, [captures, rows]; -1 for none.
        kinds, kind: kinds of operations, and that of each row of the first capture.
    """

    rank: int
    costs: list[OperationCosts]
    partner: Int64
    kinds: list[Kind]
    kind: Int64

    @property
    def paired(self) -> Bool:
        """Rows of the first capture that every other one has."""
        return np.asarray((self.partner >= 0).all(axis=0), np.bool_)

    def collective(self, row: int) -> tuple[float, ...] | None:
        """Elements of an operation's collective in every capture and at the new sizes; ``None`` where it is none."""
        raise NotImplementedError


class ScaledRank(ResizedRank):
    """One rank of one capture whose dimensions are scaled.

    Args:
        scenario: of the capture.
        rank: position in the job.
        shapes: before and after.
    """

    def __init__(self, scenario: Scenario, rank: int, shapes: ScaledShapes) -> None:
        self.rank, self.shapes = rank, shapes
        own = _self_times(scenario, rank)
        self.costs, self.partner = [own], np.arange(len(own))[None, :]
        ops, numbers = own.graph.ops, dict[tuple[Any, ...], int]()
        columns = np.stack([ops.name, ops.shapes, ops.dtypes, ops.strides, ops.scalars])[:, own.op].T.tolist()
        self.kind = np.array([numbers.setdefault((*key, shapes.layouts(op)), len(numbers))
                              for op, key in zip(own.op.tolist(), columns, strict=True)], np.int64)
        _, first = np.unique(self.kind, return_index=True)
        self.kinds = [self._kind(op) for op in own.op[first].tolist()]

    def _kind(self, op: int) -> Kind:
        recorded = Operation.from_graph(self.costs[0].graph, op)
        return Kind(recorded.name, (recorded,), self.shapes.operation_of(op), undecided=self.shapes.undecided(op))

    def collective(self, row: int) -> tuple[float, ...] | None:
        """See ``ResizedRank``."""
        found = _elements_of(self.costs[0], row)
        return None if found is None else (found[1], found[1] * float(self.shapes.payload(found[0])))


class PairedRank(ResizedRank):
    """One rank of all captures.

    Args:
        scenarios: of the captures; the first is the one that is edited.
        rank: position in each job.
        laws: of numbers, captures in the same order.

    Raises:
        EditError: the captures run different programs, or sizes follow no law.
    """

    def __init__(self, scenarios: list[Scenario], rank: int, laws: NumberLaws) -> None:
        self.rank, self.laws = rank, laws
        self.costs = [_self_times(one, rank) for one in scenarios]
        first = self.costs[0]
        self.partner = np.stack([np.arange(len(first)), *(partners(first, other) for other in self.costs[1:])])
        self._check_alone()
        self.kinds = []
        self.kind = self._find_kinds()
        self._check_lawless()

    def _check_alone(self) -> None:
        for number, costs in enumerate(self.costs):
            alone = self._alone(number)
            time = _least_ns(costs)
            share = float(time[alone].sum()) / max(float(time.sum()), 1.0)
            if share > MOST_ALONE:
                others = [self._worst(other) for other in range(len(self.costs))
                          if other != number and self._alone(other).any()]
                nor = f", nor has {others[0]}" if others else ""
                raise EditError(
                    f"The captures do not run the same operations: {self._worst(number)} has no partner in another "
                    f"({share:.0%} of a step's time is of such operations){nor}; give captures of one program, and if "
                    "these are, its libraries choose another implementation at a size between them: capture it at "
                    "sizes on one side of that.")

    def _alone(self, number: int) -> Bool:
        """Rows of a capture that another one does not have."""
        if number == 0:
            return ~self.paired
        return np.asarray(~np.isin(np.arange(len(self.costs[number])), self.partner[number]), np.bool_)

    def _worst(self, number: int) -> str:
        """The operation that takes longest of those that another capture does not have, and the capture's sizes."""
        costs, alone = self.costs[number], np.flatnonzero(self._alone(number))
        worst = int(alone[np.argmax(_least_ns(costs)[alone])])
        sizes = ", ".join(f"{name}={size}" for name, size in self.laws.sizes[number].items())
        return f"{costs.graph.string(int(costs.graph.ops.name[costs.op[worst]]))} of the one at {sizes}"

    def _find_kinds(self) -> Int64:
        columns: list[Int64] = []
        for costs, partner in zip(self.costs, self.partner, strict=True):
            rows = np.append(costs.op, NONE)[partner]
            table = costs.graph.ops
            columns += [np.where(rows >= 0, np.append(column, NONE)[rows], NO_PARTNER) for column in (
                table.name, table.shapes, table.dtypes, table.strides, table.scalars)]
        _, example, kind = np.unique(np.stack(columns), axis=1, return_index=True, return_inverse=True)
        self.kinds = [self._kind(int(row)) for row in example]
        return kind.reshape(-1).astype(np.int64)

    def _kind(self, row: int) -> Kind:
        recorded = tuple(Operation.from_graph(costs.graph, int(costs.op[at]))
                         for costs, at in zip(self.costs, self.partner[:, row].tolist(), strict=True) if at >= 0)
        own = recorded[0]
        if len(recorded) < len(self.costs):
            return Kind(own.name, recorded, own)
        try:
            new = new_arguments(self.laws, own.name, [one.arguments for one in recorded])
        except NoLawError as error:
            return Kind(own.name, recorded[:1], own, str(error))
        return Kind(own.name, recorded, replace(own, arguments=new))

    def _check_lawless(self) -> None:
        """Operations without a law have no partners; too many are refused, with the one that takes longest."""
        lawless = np.array([bool(kind.lawless) for kind in self.kinds], np.bool_)[self.kind]
        time = _least_ns(self.costs[0])
        if time[lawless].sum() > MOST_ALONE * max(float(time.sum()), 1.0):
            worst = self.kinds[self.kind[int(np.flatnonzero(lawless)[np.argmax(time[lawless])])]]
            raise EditError(f"The sizes of {worst.name} differ between the captures in a way that was not understood: "
                            f"{worst.lawless}; {time[lawless].sum() / time.sum():.0%} of the step is of such "
                            "operations; trace the program again (--code), or scale one capture (leave --also out).")
        self.partner[1:, lawless] = NONE

    def collective(self, row: int) -> tuple[float, ...] | None:
        """See ``ResizedRank``. Raises ``EditError`` where the elements follow no law."""
        found = [_elements_of(costs, at) if at >= 0 else None
                 for costs, at in zip(self.costs, self.partner[:, row].tolist(), strict=True)]
        elements = tuple(one[1] for one in found if one is not None)
        if len(elements) < len(found):
            return None
        try:
            return (*elements, self.laws.value(elements))
        except NoLawError as error:
            raise EditError(f"The payload of {self.kinds[int(self.kind[row])].name} differs between the captures in a "
                            f"way that was not understood: {error}.") from None


def _self_times(scenario: Scenario, rank: int) -> OperationCosts:
    return operation_costs(scenario.cycle, scenario.slices, rank, every_operation(scenario.built.graphs[rank]),
                           operation_of_kernels(scenario, rank))


def _elements_of(costs: OperationCosts, row: int) -> tuple[int, int] | None:
    """An operation's row of the collectives and its elements; ``None`` where it is none."""
    table = costs.graph.collectives
    rows = np.flatnonzero(table.op == costs.op[row]).tolist()
    if not rows:
        return None
    return rows[0], max(int(table.elements_in[rows[0]]), int(table.elements_out[rows[0]]), 0)


def operation_of_kernels(scenario: Scenario, rank: int) -> Int64:
    """Operation that each kernel of a rank is priced with (the nearest with sizes); of collectives their own."""
    work, program = scenario.work, scenario.built.program
    piece = work.kernel_group[int(program.kernel_ptr[rank]):int(program.kernel_ptr[rank + 1])]
    own = scenario.built.graphs[rank].kernels.op.astype(np.int64)
    return np.where(piece >= 0, np.append(work.op, NONE)[piece], own)


def _least_ns(costs: OperationCosts) -> Float64:
    """Time of every operation in the step in which it was quickest: a pause that falls into a step is no work."""
    found: Float64 = (costs.inside + costs.device).min(axis=0)
    return found
