"""Another size from two or more captures at different sizes: the law of every dimension, and of every time.

    32 ─┐                     shapes   [32, 128] and [64, 128]  →  [batch, 128]  →  [128, 128]
    64 ─┴─▶ laws ─▶ 128       time     1.1 ms and 2.0 ms        →  a fixed cost and a linear part

Operations of the captures are aligned in program order (``size_kinds``). What each number among an operation's
arguments follows from the named sizes is solved exactly (``number_laws``); how its time follows the work is a trend
through the captured times (``prediction.anchoring``, ``size_times``), where the work is what the device's models say of
the shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from graph_predictor.prediction.data_loading import data_loading_between, data_loading_ns
from graph_predictor.prediction.memory import with_sizes
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.scenario import EditError, Scenario
from graph_predictor.sizes.number_laws import NumberLaws
from graph_predictor.sizes.size_kinds import PairedRank
from graph_predictor.sizes.size_times import BATCH, at_new_sizes
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.operation import Operation
from tracer.arrays import Int64

if TYPE_CHECKING:
    from tracer.job import Job

FAR = 2.0
"""A size beyond this many times the largest captured one, or below the smallest over this, is reported as far
outside."""


class SizeLaws:
    """Other sizes, from captures of the same program at two or more.

    Assumes that the same operations run at every size, that numbers follow exact laws in the named sizes, and that
    nothing else differs between the captures. Numbers that no law explains, or several, are refused with the
    operation's name, unless such operations hardly take time: those stay as they are. Kernels (on a CPU: operations
    that compute) get the time that their trend through the captures gives at the new work; so does the rest of the
    host's time, which is expected to stay. Times are under the profiler, or without it, as those of all captures are.

    Args:
        captures: prepared or read jobs, two or more. The one that is edited must be among them.
        sizes: of each capture, by name; all name the same ones.
        new: the sizes that are asked for; names left out stay as in the edited capture.
    """

    def __init__(self, captures: Sequence[Baseline | Job], sizes: Sequence[Mapping[str, int]],
                 new: Mapping[str, int]) -> None:
        self.captures = [one if isinstance(one, Baseline) else baseline_of(one) for one in captures]
        self.sizes, self.new = [dict(one) for one in sizes], dict(new)
        self._check()

    def _check(self) -> None:
        if not self.new:
            raise EditError("Captures at several sizes say nothing alone: name the size to predict, as in "
                            "--set batch=128.")
        if len(self.captures) < 2 or len(self.sizes) != len(self.captures):
            raise EditError("Laws of sizes need two captures or more, and the sizes of each.")
        names = list(dict.fromkeys(name for one in (*self.sizes, self.new) for name in one))
        for name in names:
            values = [one.get(name) for one in self.sizes]
            if None in values:
                raise EditError(f"One of the captures does not say its {name}: name it, as in --also PATH:{name}=64, "
                                f"or --set {name}=32:128 for the one that is predicted from.")
            bad = next((v for v in (*values, self.new.get(name, 1)) if v is not None and not 1 <= v < 2**40), None)
            if bad is not None:
                raise EditError(f"{name}={bad} is no size: give a whole number of 1 or more.")
            if name in self.new and len(set(values)) == 1 and self.new[name] != values[0]:
                raise EditError(f"{name} is {values[0]} in every capture: they do not say what depends on it; capture "
                                f"the step at another {name} too.")
        if len({one.scenario.profiled for one in self.captures}) > 1:
            raise EditError("Only some of the captures say what their step takes without the profiler, so that their "
                            "times cannot be compared; predict the step under the profiler (--profiled), or record "
                            "all of them with foretrace capture.")
        if len({tuple(one[name] for name in names) for one in self.sizes}) < len(self.sizes):
            raise EditError("Two of the captures have the same sizes; they say no more than one of them does.")

    def describe(self) -> str:
        """One phrase."""
        return ", ".join(f"{name} → {size} from captures at {' and '.join(str(one[name]) for one in self.sizes)}"
                         for name, size in self.new.items())

    def apply(self, scenario: Scenario) -> Scenario:
        """See ``Edit``."""
        if scenario.profiled != self.captures[0].scenario.profiled:
            raise EditError("The captures' times are not on the clock of the step that is predicted; make all with the "
                            "profiler, or all without it.")
        base = self._base(scenario)
        if all(self.sizes[base].get(name) == size for name, size in self.new.items()):
            return scenario
        scenario = scenario.claim("the sizes", f"--set {self.describe()}").claim("the host", "--also")
        laws = NumberLaws(self.sizes, {**self.sizes[base], **self.new})
        order = [base, *(i for i in range(len(self.captures)) if i != base)]
        ordered = NumberLaws([laws.sizes[i] for i in order], laws.new)
        captures = [self.captures[i].scenario for i in order]
        ranks = [PairedRank(captures, rank, ordered) for rank in range(len(scenario.built.graphs))]
        grown = math.prod(laws.new[name] / size for name, size in self.sizes[base].items())
        samples = next((laws.new[name] / size for name, size in self.sizes[base].items() if name.lower() in BATCH), 1.0)
        fetched = [data_loading_ns(one.cycle, one.slices) for one in captures]
        followed = _followed_by_fetches(ordered)
        scenario = scenario.with_data_loading(samples, data_loading_between(
            fetched, [followed(one) for one in ordered.sizes], followed(laws.new)))
        return self._warned(with_sizes(at_new_sizes(scenario, ranks, ordered), grown))

    def _warned(self, scenario: Scenario) -> Scenario:
        found = []
        for name, size in self.new.items():
            captured = sorted({one[name] for one in self.sizes})
            far = max(size / captured[-1], captured[0] / size)
            if far > FAR and len(captured) > 1:
                found.append(f"{name}={size} is {far:.3g} times outside what was captured ({captured[0]} to "
                             f"{captured[-1]}): the laws may bend there, as at a cache's edge, and the interval is "
                             "widened; capture a size nearer to it.")
        return replace(scenario, warnings=(*scenario.warnings, *found))

    def operations_of(self, rows: Sequence[int] | Int64, rank: int = 0) -> list[Operation]:
        """Operations at the new sizes, of rows of the first capture's ``ops`` that lie in its last repeated step."""
        found = PairedRank([one.scenario for one in self.captures], rank,
                           NumberLaws(self.sizes, {**self.sizes[0], **self.new}))
        place = {int(op): row for row, op in enumerate(found.costs[0].op.tolist())}
        return [found.kinds[int(found.kind[place[int(row)]])].new for row in rows]

    def operations(self, rank: int = 0) -> list[Operation]:
        """Every operation of one step at the new sizes, in program order, threads in order of their first one."""
        found = PairedRank([one.scenario for one in self.captures], rank,
                           NumberLaws(self.sizes, {**self.sizes[0], **self.new}))
        return [found.kinds[k].new for k in found.kind.tolist()]

    def _base(self, scenario: Scenario) -> int:
        for number, one in enumerate(self.captures):
            graphs = one.scenario.built.graphs
            if len(graphs) != len(scenario.built.graphs):
                raise EditError("The captures are of jobs with different numbers of ranks.")
            if graphs[0] is scenario.built.graphs[0]:
                return number
        raise EditError("The capture that is predicted from is not among those the laws are taken from.")


def _followed_by_fetches(laws: NumberLaws) -> Callable[[Mapping[str, int]], float]:
    """Return what the time of loading a batch goes with: the samples where they differ between captures, else all
    sizes."""
    batch = next((name for name in laws.names if name.lower() in BATCH), None)
    if batch is not None and len({one[batch] for one in laws.sizes}) > 1:
        return lambda sizes: float(sizes[batch])
    return lambda sizes: float(math.prod(sizes[name] for name in laws.names))
