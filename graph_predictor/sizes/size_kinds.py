"""Captures of one program at several sizes, operation by operation: which are each other's partners, which are equal.

Operations are aligned in program order. Those of one name with the same arguments in every capture are one *kind*; a
kind's arguments at the new sizes follow from its arguments in the captures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from graph_predictor.prediction.scenario import EditError, Scenario
from graph_predictor.sizes.argument_laws import new_arguments
from graph_predictor.sizes.number_laws import NoLawError, NumberLaws
from graph_predictor.sizes.slots import Slots, partners, slots_of
from kernel_models.operation import Operation
from tracer.arrays import Float64, Int64
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
    """

    name: str
    recorded: tuple[Operation, ...]
    new: Operation
    lawless: str = ""


class PairedRank:
    """One rank of all captures.

    Args:
        scenarios: of the captures; the first is the one that is edited.
        rank: position in each job.
        laws: of numbers, captures in the same order.

    Attributes:
        slots: operations of each capture, see ``Slots``.
        partner: slot of each capture for every slot of the first, [captures, slots]; -1 for none.
        kinds, kind: kinds of operations, and that of each slot of the first capture.

    Raises:
        EditError: the captures run different programs, or sizes follow no law.
    """

    def __init__(self, scenarios: list[Scenario], rank: int, laws: NumberLaws) -> None:
        names: dict[str, int] = {}
        self.rank, self.laws = rank, laws
        self.slots: list[Slots] = [slots_of(one, rank, names) for one in scenarios]
        first = self.slots[0]
        self.partner: Int64 = np.stack(
            [np.arange(len(first.op)), *(partners(first, other) for other in self.slots[1:])])
        self._check_alone()
        self.kinds: list[Kind] = []
        self.kind: Int64 = self._find_kinds()
        self._check_lawless()

    @property
    def paired(self) -> npt.NDArray[np.bool_]:
        """Slots of the first capture that every other one has."""
        return np.asarray((self.partner >= 0).all(axis=0), np.bool_)

    def _check_alone(self) -> None:
        for number, slots in enumerate(self.slots):
            alone = self._alone(number)
            time = _least_ns(slots)
            share = float(time[alone].sum()) / max(float(time.sum()), 1.0)
            if share > MOST_ALONE:
                others = [self._worst(other) for other in range(len(self.slots))
                          if other != number and self._alone(other).any()]
                nor = f", nor has {others[0]}" if others else ""
                raise EditError(
                    f"The captures do not run the same operations: {self._worst(number)} has no partner in another "
                    f"({share:.0%} of a step's time is of such operations){nor}; give captures of one program, and if "
                    "these are, its libraries choose another implementation at a size between them: capture it at "
                    "sizes on one side of that.")

    def _alone(self, number: int) -> npt.NDArray[np.bool_]:
        """Slots of a capture that another one does not have."""
        if number == 0:
            return ~self.paired
        return np.asarray(~np.isin(np.arange(len(self.slots[number].op)), self.partner[number]), np.bool_)

    def _worst(self, number: int) -> str:
        """The operation that takes longest of those that another capture does not have, and the capture's sizes."""
        slots, alone = self.slots[number], np.flatnonzero(self._alone(number))
        worst = int(alone[np.argmax(_least_ns(slots)[alone])])
        sizes = ", ".join(f"{name}={size}" for name, size in self.laws.sizes[number].items())
        return f"{slots.graph.string(int(slots.graph.ops.name[slots.op[worst]]))} of the one at {sizes}"

    def _find_kinds(self) -> Int64:
        columns: list[Int64] = []
        for slots, partner in zip(self.slots, self.partner, strict=True):
            rows = np.append(slots.op, NONE)[partner]
            table = slots.graph.ops
            columns += [np.where(rows >= 0, np.append(column, NONE)[rows], NO_PARTNER) for column in (
                table.name, table.shapes, table.dtypes, table.strides, table.scalars)]
        _, example, kind = np.unique(np.stack(columns), axis=1, return_index=True, return_inverse=True)
        self.kinds = [self._kind(int(slot)) for slot in example]
        return kind.reshape(-1).astype(np.int64)

    def _kind(self, slot: int) -> Kind:
        recorded = tuple(Operation.from_graph(slots.graph, int(slots.op[at]))
                         for slots, at in zip(self.slots, self.partner[:, slot].tolist(), strict=True) if at >= 0)
        own = recorded[0]
        if len(recorded) < len(self.slots):
            return Kind(own.name, recorded, own)
        try:
            new = new_arguments(self.laws, own.name, [one.arguments for one in recorded])
        except NoLawError as error:
            return Kind(own.name, recorded[:1], own, str(error))
        return Kind(own.name, recorded, replace(own, arguments=new))

    def _check_lawless(self) -> None:
        """Operations without a law have no partners; too many are refused, with the one that takes longest."""
        lawless = np.array([bool(kind.lawless) for kind in self.kinds], np.bool_)[self.kind]
        time = _least_ns(self.slots[0])
        if time[lawless].sum() > MOST_ALONE * max(float(time.sum()), 1.0):
            worst = self.kinds[self.kind[int(np.flatnonzero(lawless)[np.argmax(time[lawless])])]]
            raise EditError(f"The sizes of {worst.name} differ between the captures in a way that was not understood: "
                            f"{worst.lawless}; {time[lawless].sum() / time.sum():.0%} of the step is of such "
                            "operations; trace the program again (--code), or scale one capture (leave --also out).")
        self.partner[1:, lawless] = NONE

    def collective(self, slot: int) -> tuple[int, ...] | None:
        """Elements of a slot's collective in every capture; ``None`` where it is none."""
        found = []
        for slots, at in zip(self.slots, self.partner[:, slot].tolist(), strict=True):
            table = slots.graph.collectives
            rows = np.flatnonzero(table.op == slots.op[at]).tolist() if at >= 0 else []
            if not rows:
                return None
            found.append(max(int(table.elements_in[rows[0]]), int(table.elements_out[rows[0]]), 0))
        return tuple(found)


def _least_ns(slots: Slots) -> Float64:
    """Time of every slot in the step in which it was quickest: a pause that falls into a step is no work."""
    found: Float64 = (slots.own + slots.device).min(axis=0)
    return found
