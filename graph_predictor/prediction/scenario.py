"""``Scenario``: a recorded job, the work of its kernels, and what edits change of it.

Each kernel belongs to a *kernel group*: an operation's kernels, or one copy, memset or lone kernel. A group's device
work is described by calls that models can price. The ratio of their prices after and before the edits scales the
measured times of its kernels (see ``pricing``).

Edits fill in the fields of a scenario; nothing is computed until it is priced. Each field of the classes above
``Scenario`` is an independent change. Changes are applied in a fixed order, so edits of different fields commute. Two
edits that set the same field differently are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

import numpy as np

from graph_predictor.prediction.data_loading import DataLoading, Loader, data_loading_of
from graph_predictor.prediction.repeat import Cycle, Shared
from graph_predictor.simulation.build import Built
from graph_predictor.simulation.host_slices import HostSlices
from kernel_models.device import DeviceSpec, scaled_device
from kernel_models.host.segments import LaunchConstants
from kernel_models.op_call import OpCall, Source
from kernel_models.pricing import Models
from kernel_models.trace_calls import FAMILIES, Basis, graph_calls
from tracer.arrays import Bool, Float64, Int64
from tracer.errors import ForetraceError
from tracer.graph import NONE, KernelKind

COLLECTIVE = len(FAMILIES)
"""Family code of collectives."""


@dataclass(frozen=True, slots=True)
class Work:
    """Columns over the kernels of a recorded program, and over the kernel groups.

    Attributes:
        kernel_group: kernel group of each kernel; -1 for collectives.
        family: position in ``FAMILIES`` of each kernel, ``COLLECTIVE`` for collectives.
        calls: the calls of kernel group i are ``calls[call_row[i]]``; equal groups share a row.
        call_row: row of ``calls`` for each kernel group.
        rank, op: rank and operation of each kernel group; ``op`` is a row of its rank's ``ops``, -1 for none.
        sized: whether the group's sizes are known.
        measured_ns: total duration of each group's kernels.
    """

    kernel_group: Int64
    family: Int64
    calls: list[tuple[OpCall, ...]]
    call_row: Int64
    rank: Int64
    op: Int64
    sized: np.ndarray
    measured_ns: Int64

    def regrouped(self, new: Sequence[tuple[OpCall, ...]]) -> tuple[Work, dict[int, tuple[OpCall, ...]]]:
        """Give kernel groups new rows of calls: groups share a row if both their old and their new calls are equal.

        Args:
            new: calls of each kernel group after a change.

        Returns:
            The work with its new rows of calls, and by row the new calls where they differ from the old ones.
        """
        numbers: dict[tuple[int, tuple[OpCall, ...]], int] = {}
        call_row = np.array([numbers.setdefault(pair, len(numbers))
                             for pair in zip(self.call_row.tolist(), new, strict=True)], np.int64)
        calls = [self.calls[number] for number, _ in numbers]
        after = {number: wanted for (_, wanted), number in numbers.items() if wanted != calls[number]}
        return replace(self, calls=calls, call_row=call_row), after


def describe_work(built: Built) -> Work:
    """Return the calls of every kernel of a recorded job."""
    kernels = len(built.program.kernel_item)
    kernel_group, family = np.full(kernels, NONE, np.int64), np.full(kernels, COLLECTIVE, np.int64)
    numbers: dict[tuple[OpCall, ...], int] = {}
    call_row, ranks, ops, sized, times = [], [], [], [], []
    groups = 0
    for rank, graph in enumerate(built.graphs):
        low = int(built.program.kernel_ptr[rank])
        found = graph_calls(graph)
        count = np.diff(found.kernel_offset)
        of_kernel = np.repeat(np.arange(len(found)), count)
        kernel_group[low + found.kernel] = groups + of_kernel
        family[low + found.kernel] = found.family[of_kernel]
        seen: dict[bytes, int] = {}
        for row in range(len(found)):
            key = found.call_index[found.call_offset[row]:found.call_offset[row + 1]].tobytes()
            if key not in seen:
                seen[key] = numbers.setdefault(found.calls_of_row(row), len(numbers))
            call_row.append(seen[key])
        ranks.append(np.full(len(found), rank, np.int64))
        ops.append(found.op.astype(np.int64))
        sized.append(found.basis != Basis.NAME)
        times.append(found.time_ns)
        groups += len(found)
        family[low + np.flatnonzero(graph.kernels.kind == KernelKind.COLLECTIVE)] = COLLECTIVE
    none = [np.zeros(0, np.int64)]
    return Work(kernel_group, family, list(numbers), np.array(call_row, np.int64), np.concatenate(ranks or none),
                np.concatenate(ops or none), np.concatenate(sized or none).astype(np.bool_),
                np.concatenate(times or none))


@dataclass(slots=True)
class WorkUnits:
    """Units of work that edits can replace, one row each, sorted by rank, lane and time.

    Attributes:
        rank: position in the job.
        lane: the stream (on a CPU: the thread).
        row: the kernel group of ``Scenario.work`` (on a CPU: the operation).
        op: row of the rank's ``ops``, -1 for none.
        phase, step: as in ``ops``.
        start: recorded start, ns.
        kernels: number of its kernels; 1 on a CPU.
        follows: whether it runs directly after the unit before it on its lane and waits for nothing else.
        watched: whether the host, or work of another stream, waits for it.
        calls: its calls after edits of sizes and precision, and after replacements.
        alive: whether no edit has removed it.
        on_host: whether the units are a CPU's operations.
    """

    rank: Int64
    lane: Int64
    row: Int64
    op: Int64
    phase: Int64
    step: Int64
    start: Int64
    kernels: Int64
    follows: Bool
    watched: Bool
    calls: list[tuple[OpCall, ...]]
    alive: Bool
    on_host: bool

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True)
class Replacement:
    """Other work that replaces units (rows of ``WorkUnits``, in time order). The new work runs in the first unit's
    place, and the other units vanish; without calls all units vanish."""

    units: Int64
    calls: tuple[OpCall, ...]

    def carry_out(self, units: WorkUnits) -> None:
        """Put the new work into ``units``."""
        units.alive[self.units[1 if self.calls else 0:]] = False
        if self.calls:
            units.calls[int(self.units[0])] = self.calls

    @property
    def label(self) -> str:
        """Return the reports' name of the new work; "" if it replaces a single unit, whose operation names it."""
        if len(self.units) == 1 or not self.calls:
            return ""
        return f"{self.calls[0].family.value} {self.calls[0].kind}"


@dataclass(slots=True)
class Rewriting:
    """Replacements by one edit, and its other changes.

    Attributes:
        replacements: units, and the work that replaces them (none: they are removed).
        host_weight: factor on each slice of host time (row of ``Scenario.slices``).
        removed: for each rank, operations to remove with everything in them: host time, launches, kernels and waits,
            in units or not.
    """

    replacements: list[Replacement]
    host_weight: Float64 | None = None
    removed: list[Bool] | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """Masks of the work that edits remove from a step.

    Attributes:
        operations: over each rank's ``ops``.
        kernels, items: over the rows of the recorded program.
    """

    operations: list[Bool]
    kernels: Bool
    items: Bool


def sized(calls: tuple[OpCall, ...]) -> bool:
    """Return whether calls have sizes, so that they can be priced."""
    return bool(calls) and not any("unsized" in call.flags for call in calls)


CallEdit = Callable[[OpCall], "tuple[OpCall, ...]"]


@dataclass(frozen=True)
class DeviceChange:
    """The device of the recording and the device to predict for.

    Attributes:
        source, target: their figures; ``None`` for an unknown source, or if the target is the source.
        source_models, target_models: their fitted models, if any.
        clock, bandwidth: factors on the target's clock and memory bandwidth.
    """

    source: DeviceSpec | None = None
    source_models: Models | None = None
    target: DeviceSpec | None = None
    target_models: Models | None = None
    clock: float = 1.0
    bandwidth: float = 1.0

    @property
    def elsewhere(self) -> bool:
        """Return whether the step runs on another device."""
        return self.target is not None and self.target != self.source

    @property
    def moved(self) -> bool:
        """Return whether the step runs on another device, or on the same at other rates."""
        return self.elsewhere or self.clock != 1.0 or self.bandwidth != 1.0

    @property
    def models(self) -> Models | None:
        """Return the fitted models of the device predicted for."""
        return self.target_models if self.elsewhere else self.source_models

    def scaled(self) -> DeviceSpec | None:
        """Return the figures of the device predicted for, with the factors on its clock and bandwidth."""
        spec = self.target or self.source
        return None if spec is None else scaled_device(spec, clock=self.clock, bandwidth=self.bandwidth)


@dataclass(frozen=True)
class KernelSources:
    """Sources of kernels' times before any edit: ``Source`` codes, and the logs of both ends of their 80% intervals."""

    source: Int64
    low: Float64
    high: Float64


@dataclass(frozen=True)
class KernelChange:
    """Changes of device work, by kernel of the recorded program.

    Attributes:
        calls: new calls of the rows of ``Work.calls`` that an edit changed.
        call_edits: changes of every call that has not been replaced, by name of the edit, applied in the names' order.
        factor: factor on the duration of each kernel; ``spread`` the log half width of its 80% interval.
        change_known: the change of work was measured on one device. ``spread`` alone is then the interval of changed
            kernels, without the interval of the models' ratio.
        sources: where the times come from; ``None`` if all are measured.
    """

    calls: dict[int, tuple[OpCall, ...]] = field(default_factory=dict)
    call_edits: dict[str, CallEdit] = field(default_factory=dict)
    factor: Float64 | None = None
    spread: Float64 | None = None
    change_known: bool = False
    sources: KernelSources | None = None

    def scaled(self, factor: Float64) -> KernelChange:
        """Return the change with one more factor on each kernel's duration."""
        return replace(self, factor=factor if self.factor is None else factor * self.factor)

    def widened(self, spread: Float64) -> KernelChange:
        """Return the change with one more log half width for each kernel's interval."""
        return replace(self, spread=spread if self.spread is None else np.hypot(spread, self.spread))

    def edited(self, call: OpCall) -> tuple[OpCall, ...]:
        """Return a call after all edits of calls, in the order of their names."""
        found: tuple[OpCall, ...] = (call,)
        for name in sorted(self.call_edits):
            found = tuple(new for old in found for new in self.call_edits[name](old))
        return found


@dataclass(frozen=True)
class HostChange:
    """Changes of host time, by slice of ``Scenario.slices``.

    Attributes:
        ns: times of another host, or at other sizes; ``None`` for the recorded times.
        spread: log half width that the changes add to the interval of host time.
        factor: factor on all host time.
        weight: factor on each slice.
        constants: launch constants of another host, by rank.
        source: where the times come from before any edit.
        guessed: share of the time that comes from formulas instead of ``source``.
    """

    ns: Float64 | None = None
    spread: float = 0.0
    factor: float = 1.0
    weight: Float64 | None = None
    constants: list[LaunchConstants] | None = None
    source: Source = Source.MEASURED
    guessed: float = 0.0

    def scaled(self, weight: Float64) -> HostChange:
        """Return the change with one more factor on each slice."""
        return replace(self, weight=weight if self.weight is None else weight * self.weight)

    def widened(self, spread: float) -> HostChange:
        """Return the change with one more log half width of host time."""
        return replace(self, spread=float(np.hypot(self.spread, spread)))


@dataclass(frozen=True)
class LaunchChange:
    """Changes of launches and waits.

    Attributes:
        graphed: launches are replayed from a CUDA graph.
        cost: launch calls take host time, and kernels start a latency after their call returned.
        waits: the host waits for the device where it did in the recording.
        hidden_collectives: collectives overlap all other work, and nothing waits for them.
    """

    graphed: bool = False
    cost: bool = True
    waits: bool = True
    hidden_collectives: bool = False


class Loading(Enum):
    """The place where a step's batch is loaded."""

    INLINE = "inline"
    BACKGROUND = "background"
    NONE = "none"


@dataclass(frozen=True)
class BatchChange:
    """Changes of batches and of where they are loaded.

    Attributes:
        loader: worker processes that make batches, where there are any.
        data_loading: effect of another number of samples on loading batches in the training process.
        loading: where batches are loaded: as recorded (by the training thread), in the background, or not at all.
    """

    loader: Loader | None = None
    data_loading: DataLoading | None = None
    loading: Loading = Loading.INLINE

    @property
    def workers(self) -> Loader | None:
        """Return the worker processes that the step waits for; ``None`` without any, or if batches load elsewhere."""
        return self.loader if self.loading is Loading.INLINE else None

    def with_samples(self, factor: float) -> BatchChange:
        """Return the change with ``factor`` times the samples a batch, where worker processes make them."""
        return self if self.loader is None else replace(self, loader=self.loader.scaled(factor))


class SizeRoute(Enum):
    """The way in which a step at other sizes is predicted."""

    AS_CAPTURED = "as captured"
    SCALED = "one capture scaled"
    TRACED_AGAIN = "traced again"


@dataclass(frozen=True, slots=True)
class FollowingDimension:
    """A dimension of an input of the step that a named size changes.

    Attributes:
        name: name of the size.
        operation, argument: the operation that takes the input, and its argument.
        shape: shape of the input at the recorded size.
        dimension: counted from 0.
    """

    name: str
    operation: str
    argument: str
    shape: tuple[int, ...]
    dimension: int


@dataclass(frozen=True, slots=True)
class OtherSizes:
    """The requested sizes, and the parts of the step that change with them.

    Attributes:
        route: how the step at these sizes is predicted.
        changes: name, recorded size or setting (``None`` if unknown) and new one.
        following: dimensions of the step's inputs that follow a name; empty if the program was traced again, since the
            program then decides them.
    """

    route: SizeRoute
    changes: tuple[tuple[str, int | str | None, int | str], ...]
    following: tuple[FollowingDimension, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the sizes as plain values."""
        return {"route": self.route.value,
                "changes": [{"name": name, "old": old, "new": new} for name, old, new in self.changes],
                "following": [{"name": one.name, "operation": one.operation, "argument": one.argument,
                               "shape": list(one.shape), "dimension": one.dimension} for one in self.following]}


OTHER_RANKS = "the ranks that were not recorded"
"""``Scenario.claim`` of an edit that models the ranks without a recording."""


class EditError(ForetraceError):
    """An edit that cannot be done. The message states the request, the reason, and what is possible."""


class Origin(Protocol):
    """A recorded job that gives its times to a step traced by shapes."""

    @property
    def scenario(self) -> Scenario:
        """Return the recorded job, without edits."""

    @property
    def ranks(self) -> list[int]:
        """Return the recorded rank of each traced one."""

    def host_factors(self, slices: HostSlices, ns: Float64) -> Float64:
        """Return a factor on each slice of the traced job's host time; ``ns`` are the edited times of the recorded
        job's slices."""


@dataclass(frozen=True)
class Scenario:
    """A recorded job and its changes, from which a step is predicted.

    Attributes:
        built, cycle, slices: the recorded job, the steps to repeat, and its host time in slices.
        devices, kernels, host, launches, batches: the changes that edits make to each.
        rewrites: work replaced by other work, by name (see ``rewriting``).
        activation_factors: factors on the memory of activations, by edit.
        regrouped: the job's device work, if an edit groups it in another way; else ``None``.
        origin: for a step traced by shapes, the recorded job whose times it takes.
        items_per_rank: samples a step and rank, where known.
        sizes: the other sizes that were asked for, if any.
        profiled: whether host times include the profiler's cost; host times taken from other captures must match.
        set_by: the edit that set each property that only one edit may set.
        shared: results that scenarios made from this one share with it.
        warnings: reasons why the prediction is less reliable.
        notes: assumptions of the edits.
    """

    built: Built
    cycle: Cycle
    slices: HostSlices
    devices: DeviceChange = field(default_factory=DeviceChange)
    kernels: KernelChange = field(default_factory=KernelChange)
    host: HostChange = field(default_factory=HostChange)
    launches: LaunchChange = field(default_factory=LaunchChange)
    batches: BatchChange = field(default_factory=BatchChange)
    rewrites: dict[str, Rewrite] = field(default_factory=dict)
    activation_factors: dict[str, float] = field(default_factory=dict)
    regrouped: Work | None = None
    origin: Origin | None = None
    items_per_rank: float | None = None
    sizes: OtherSizes | None = None
    profiled: bool = True
    set_by: dict[str, str] = field(default_factory=dict)
    shared: Shared = field(default_factory=Shared, repr=False, compare=False)
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def work(self) -> Work:
        """Return the job's device work; it is described when it is first needed."""
        return self.regrouped or self.cycle.shared.once("work", (self.built,), lambda: describe_work(self.built))

    def claim(self, what: str, edit: str) -> Scenario:
        """Note that ``edit`` sets ``what``, which only one edit may set. Raises ``EditError`` if another has set it."""
        if what in self.set_by and self.set_by[what] != edit:
            raise EditError(f"{edit} and {self.set_by[what]} both change {what}; leave one of them out.")
        return replace(self, set_by={**self.set_by, what: edit})

    def with_samples(self, factor: float, batch: int | None = None, grown: float | None = None) -> Scenario:
        """Return the scenario whose loader workers, or training process, load ``factor`` times the samples a batch;
        for ``batch`` and ``grown`` see ``data_loading_of``."""
        recorded = self if self.origin is None else self.origin.scenario
        ranks = range(len(recorded.built.graphs)) if self.origin is None else self.origin.ranks
        data_loading = data_loading_of(recorded.built, recorded.cycle, recorded.slices, ranks, factor, batch, grown)
        batches = self.batches.with_samples(factor)
        if data_loading is None:
            return replace(self, batches=batches)
        return self.with_note(data_loading.note(), batches=replace(batches, data_loading=data_loading))

    def with_note(self, note: str, **changes: Any) -> Scenario:
        """Return the scenario with changed fields and one more sentence on an assumption."""
        return replace(self, notes=tuple(dict.fromkeys((*self.notes, note))), **changes)

    def known_source(self) -> DeviceSpec:
        """Return the device of the recording. Raises ``EditError`` where it is unknown."""
        if self.devices.source is None:
            name = self.built.graphs[0].meta.device
            raise EditError((f"The trace was recorded on {name!r}, which is no known device" if name else
                             "The trace does not say on which device it was recorded")
                            + "; name it with --from-device to scale its kernels to another one.")
        return self.devices.source

    def known_target(self) -> DeviceSpec:
        """Return the device predicted for, with the factors on its rates. Raises as ``known_source``."""
        source = self.known_source()
        return self.scaled_device() or source

    def scaled_device(self) -> DeviceSpec | None:
        """Return the device predicted for, with the factors on its rates; kept for scenarios with equal factors."""
        devices = self.devices
        return self.shared.once("scaled device", (devices.target or devices.source, devices.clock, devices.bandwidth),
                                devices.scaled)

    def host_times(self) -> Float64:
        """Return a time for each slice of host time before any factor, ns."""
        return (self.slices.ns if self.host.ns is None else self.host.ns).astype(np.float64)


Rewrite = Callable[[Scenario, WorkUnits], Rewriting]
"""Makes the replacements of one edit from a scenario's units, as the edits before it left them."""


class Edit(Protocol):
    """A change of a recorded step. The docstring of each edit's class states its assumptions."""

    def describe(self) -> str:
        """Return one phrase for reports."""
        ...

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with the change.

        Raises:
            EditError: it cannot be done; the scenario stays as it is.
        """
        ...


def is_edit(value: object) -> bool:
    """Return whether something is an edit; a class of edits is not one."""
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in ("describe", "apply"))
