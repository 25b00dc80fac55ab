"""A recorded job as the source of times for a step traced by shapes: ``Anchors``.

Each traced operation takes the host time, the calls and the device work of the recorded one that stands for it
(``retraced_match``). Where its arguments are the same, so is the time: *measured*. Where they changed, device work (on
a CPU: computation) is measured × model(new) / model(old): *anchored*. What no recorded operation stands for is priced
by models. The time of host work itself stays, since it does not depend on sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from graph_predictor.prediction.pricing import LEAST_RATIO
from graph_predictor.prediction.scenario import EditError, Scenario
from graph_predictor.simulation.rank_view import IN_CALL_COPIES
from graph_predictor.synthesis.modelled import collective_works, modelled_works
from graph_predictor.synthesis.operation_times import DeviceWork, HostCall, OperationTimes
from graph_predictor.synthesis.origin import StandIn
from graph_predictor.synthesis.retraced_match import SlotMatch, match, names_of_both, plain_name
from graph_predictor.synthesis.retraced_slots import RecordedSlots, slots_of
from kernel_models.device import DeviceSpec
from kernel_models.launch_constants import LaunchConstants
from kernel_models.model import Source
from kernel_models.op_call import OpCall
from kernel_models.operation import Operation
from kernel_models.placed import calls_at, host_work_ns, work_on_host_ns
from kernel_models.pricing import Models, price
from kernel_models.spreads import MEASURED_KERNELS, RESIZED_ON_CPU
from tracer.arrays import Float64, Int64
from tracer.graph import NONE, ExecutionGraph, KernelKind, LaunchKind, Place
from tracer.views import Argument

MOST_UNSIZED = 0.05
"""Share of the recorded work whose sizes may be missing."""
_LAUNCH = "cudaLaunchKernel"


@dataclass(slots=True)
class _Tally:
    """What became of one rank's operations, and of its host time (ns)."""

    measured: int = 0
    anchored: int = 0
    modelled: int = 0
    left_ns: float = 0.0
    """Recorded time of operations that stand for no traced one."""
    host_ns: float = 0.0
    unsure_ns: float = 0.0
    """Host time × the size of its change (log, at most 1)."""


@dataclass(frozen=True, slots=True)
class _Change:
    """Of one pair of a recorded and a traced operation: the ratio of their times and the logs of its interval's ends;
    the ratio of their work on the host; the calls at the new size."""

    ratio: float
    low: float
    high: float
    on_host: float
    calls: tuple[OpCall, ...]
    place: int

    @property
    def source(self) -> Source:
        return Source.MEASURED if self.ratio == 1.0 else Source.ANCHORED


@dataclass(slots=True)
class Anchors:
    """A recorded job whose operations stand for those of a trace.

    Args:
        scenario: the recorded job, without edits.
        recorded_spread: log half width of the 80% interval of its host time.
    """

    scenario: Scenario
    recorded_spread: float
    _tallies: list[_Tally] = field(default_factory=list)
    _stand: list[tuple[int, frozenset[str], Int64]] = field(default_factory=list)

    @property
    def device(self) -> DeviceSpec:
        """Return where it was recorded. Raises ``EditError`` where nobody knows."""
        return self.scenario.known_source()

    @property
    def on_cpu(self) -> bool:
        """Return whether operations compute on the host thread itself."""
        return self.scenario.built.computes_on_host

    @property
    def change_spread(self) -> float:
        """Return the log half width of the 80% interval of what changed in the traced step's host time."""
        total = sum(tally.host_ns for tally in self._tallies)
        unsure = sum(tally.unsure_ns for tally in self._tallies)
        return RESIZED_ON_CPU * unsure / total if unsure else 0.0

    @property
    def host_source(self) -> Source:
        """Return where most of the host's time comes from."""
        return Source.ANCHORED if any(tally.unsure_ns for tally in self._tallies) else Source.MEASURED

    @property
    def origin(self) -> StandIn:
        """Return which recorded operations stand for those of the ranks so far."""
        return StandIn(self.scenario, *(list(column) for column in zip(*self._stand, strict=True)))

    def constants(self, position: int) -> LaunchConstants:
        """Launch constants of the recorded rank that stands for a traced one."""
        return self.scenario.built.reports[self._rank(position)].constants

    def times(self, graph: ExecutionGraph, position: int, spec: DeviceSpec, models: Models | None,
              collectives: dict[int, DeviceWork], *, measured_collectives: bool = True) -> OperationTimes:
        """Return what the operations of a traced rank cost.

        Args:
            graph: traced by shapes.
            position: of the rank in its job.
            spec, models: where it runs, and fitted models of it.
            collectives: of each row of the graph's collectives what models say of it.
            measured_collectives: take recorded times of collectives; not where they run on another cluster.

        Raises:
            EditError: the recording does not say what its operations worked on.
        """
        names = names_of_both(graph)
        slots = slots_of(self.scenario, self._rank(position), names)
        pairs = match(graph, slots)
        changes = self._changes(graph, slots, pairs, spec, models)
        rank = _Rank(self, graph, slots, pairs, changes, spec, models)
        times = rank.times(rank.collectives(collectives) if measured_collectives else collectives)
        self._tallies.append(rank.tally)
        self._stand.append((self._rank(position), names, pairs.slot))
        return times

    def notes(self, device_ns: float) -> list[str]:
        """Return what was done, in sentences; ``device_ns`` is the traced step's device time."""
        measured, anchored, modelled = (sum(getattr(tally, name) for tally in self._tallies)
                                        for name in ("measured", "anchored", "modelled"))
        total = max(measured + anchored + modelled, 1)
        found = [f"The step was traced again by shapes: of its {total:,} operations {measured:,} cost what was "
                 f"recorded, {anchored:,} × the models' ratio of new to old sizes"
                 + (f", and {modelled:,}, which the recording does not have, what models say." if modelled else ".")]
        left = sum(tally.left_ns for tally in self._tallies)
        host = sum(tally.host_ns for tally in self._tallies) + device_ns
        if left > 0.01 * host:
            found.append("Recorded operations that the trace does not have "
                         f"({left / len(self._tallies) / 1e6:.3f} ms of a rank's step) were left out.")
        return found

    def _rank(self, position: int) -> int:
        return min(position, len(self.scenario.built.graphs) - 1)

    def _changes(self, graph: ExecutionGraph, slots: RecordedSlots, pairs: SlotMatch, spec: DeviceSpec,
                 models: Models | None) -> dict[tuple[int, ...], _Change]:
        """The change of every kind of pair, by ``_key``."""
        found: dict[tuple[int, ...], tuple[tuple[OpCall, ...], tuple[OpCall, ...], float, int]] = {}
        weight = np.maximum(slots.device() + slots.compute, 1.0)
        unsized = 0.0
        collective = frozenset(graph.collectives.op.tolist())
        for op, slot in enumerate(pairs.slot.tolist()):
            if slot < 0:
                continue
            key = _key(graph, op, slots, slot)
            if key not in found:
                found[key] = _calls_of_pair(graph, op, slots, slot)
            was, will = found[key][:2]
            # What is the recorded operation itself, as where DDP is added to a recording, need not be compared.
            if op not in collective and was != will and any("unsized" in call.flags for call in was):
                unsized += float(weight[slot])
        if unsized > MOST_UNSIZED * float(weight.sum()):
            raise EditError(f"The recording has no sizes for {unsized / float(weight.sum()):.0%} of its work, so that "
                            "a trace at other sizes cannot be compared with it; record with record_shapes=True "
                            "(foretrace capture does).")
        moved = spec != self.device
        changed = [key for key, (old, new, _, _) in found.items() if moved or old != new]
        before = _totals([found[key][0] for key in changed], self.device, self.scenario.devices.source_models)
        after = _totals([found[key][1] for key in changed], spec, models)
        ratios = {}
        for key, old, new in zip(changed, before, after, strict=True):
            if old[0] > 0:
                ratio = new[0] / old[0] if found[key][1] else 0.0
                size = 1.0 if moved else min(abs(np.log(max(ratio, LEAST_RATIO))), 1.0)
                ratios[key] = ratio, -size * float(np.hypot(new[1], old[2])), size * float(np.hypot(new[2], old[1]))
        return {key: _Change(*ratios.get(key, (1.0, 0.0, 0.0)), on_host, new, place)
                for key, (_, new, on_host, place) in found.items()}


class _Rank:
    """One traced rank and the recorded one that stands for it."""

    def __init__(self, anchors: Anchors, graph: ExecutionGraph, slots: RecordedSlots, pairs: SlotMatch,
                 changes: dict[tuple[int, ...], _Change], spec: DeviceSpec, models: Models | None) -> None:
        self.anchors, self.graph, self.slots, self.pairs, self.changes = anchors, graph, slots, pairs, changes
        self.spec, self.models = spec, models
        self.row_of = {int(op): row for row, op in enumerate(graph.collectives.op.tolist())}
        recorded = slots.graph.collectives
        self.recorded_row = {int(kernel): row for row, kernel in enumerate(recorded.kernel.tolist()) if kernel >= 0}
        self.sync_stream = dict(zip(slots.graph.syncs.launch.tolist(), slots.graph.syncs.stream.tolist(), strict=True))
        self.tally = _Tally()

    def collectives(self, modelled: dict[int, DeviceWork]) -> dict[int, DeviceWork]:
        """Collectives as recorded, × the models' ratio where their payload changed; modelled in another group."""
        recorded = self.slots.graph
        by_model = collective_works(recorded, self.anchors.device, None)
        table, old = self.graph.collectives, recorded.collectives
        found = dict(modelled)
        for op, row in self.row_of.items():
            slot = int(self.pairs.slot[op])
            kernel = self._collective_kernel(slot)
            was = self.recorded_row.get(kernel, NONE)
            if was < 0 or int(old.group_size[was]) != int(table.group_size[row]):
                continue
            now, before = modelled[row], by_model[was]
            same = _payload(self.graph, row) == _payload(recorded, was)
            ratio = 1.0 if same or not before.ns else now.ns / before.ns
            size = min(abs(float(np.log(ratio))), 1.0)
            found[row] = replace(
                now, ns=self._kernel_ns(slot, kernel) * ratio, source=Source.MEASURED if same else Source.ANCHORED,
                low=-np.hypot(MEASURED_KERNELS, size * now.low), high=np.hypot(MEASURED_KERNELS, size * now.high),
                name=recorded.string(int(recorded.kernels.name[kernel])))
        return found

    def times(self, collectives: dict[int, DeviceWork]) -> OperationTimes:
        """Host time and calls of every operation."""
        slots, ops = self.slots, self.graph.ops
        before, inside = np.zeros(len(ops)), np.zeros(len(ops))
        calls: dict[int, list[HostCall]] = {}
        alone = {op: calls_at(Operation.from_graph(self.graph, op), int(ops.place[op]))
                 for op in np.flatnonzero(self.pairs.slot < 0).tolist() if op not in self.row_of}
        works = modelled_works(alone, self.spec, self.models)
        usual = _usual(slots)
        for op, slot in enumerate(self.pairs.slot.tolist()):
            if slot < 0:
                before[op], inside[op], own = self._unknown(op, works.get(op, []), collectives, usual)
            else:
                change = self.changes[_key(self.graph, op, slots, slot)]
                before[op], inside[op] = slots.before[slot], self._inside(slot, change)
                own = self._calls(op, slot, change, collectives)
            if own:
                calls[op] = own
        stands = np.zeros(len(slots), np.bool_)
        stands[self.pairs.slot[self.pairs.slot >= 0]] = True
        self.tally.left_ns = float((slots.host() + slots.device())[~stands].sum())
        self.tally.host_ns = float(before.sum() + inside.sum()) + slots.tail + slots.fetch + sum(
            call.ns for own in calls.values() for call in own)
        return OperationTimes(before, inside, calls, slots.tail, slots.fetch)

    def _inside(self, slot: int, change: _Change) -> float:
        """Host time in an operation; on a CPU its computation changes with the sizes."""
        slots = self.slots
        compute, total = float(slots.compute[slot]), float(slots.inside[slot])
        self.tally.measured += change.source == Source.MEASURED
        self.tally.anchored += change.source == Source.ANCHORED
        if self.anchors.on_cpu and change.ratio != 1.0:
            size = min(abs(float(np.log(max(change.ratio, LEAST_RATIO)))), 1.0)
            self.tally.unsure_ns += compute * change.ratio * size
            return total - compute + compute * change.ratio
        return total * change.on_host

    def _calls(self, op: int, slot: int, change: _Change, collectives: dict[int, DeviceWork]) -> list[HostCall]:
        slots, recorded = self.slots, self.slots.graph
        found = []
        row = self.row_of.get(op, NONE)
        for number in range(int(slots.call_ptr[slot]), int(slots.call_ptr[slot + 1])):
            launch = int(slots.call[number])
            kind = LaunchKind(int(recorded.launches.kind[launch]))
            waits_for = int(self.sync_stream.get(launch, NONE)) if kind == LaunchKind.BLOCKING_SYNC else NONE
            call = HostCall(recorded.string(int(recorded.launches.name[launch])), kind, float(slots.call_ns[number]),
                            stream=waits_for)
            for at in range(int(slots.kernel_ptr[number]), int(slots.kernel_ptr[number + 1])):
                kernel = int(slots.kernel[at])
                if recorded.kernels.kind[kernel] == KernelKind.COLLECTIVE:
                    if row >= 0:
                        call.kernels.append(self._placed(collectives[row], kernel))
                        row = NONE
                    continue
                work = self._work(kernel, float(slots.kernel_ns[at]), change, owned=bool(slots.call_owned[number]))
                work.in_call |= work.kind == KernelKind.MEMCPY and call.name in IN_CALL_COPIES
                call.kernels.append(work)
                if work.staged and work.source != Source.MEASURED:
                    # The call itself reads the pageable memory.
                    call.ns *= change.ratio
            found.append(call)
        if row >= 0 and not self.anchors.on_cpu:
            found.append(HostCall(_LAUNCH, LaunchKind.KERNEL, 0.0, [collectives[row]]))
        return found

    def _work(self, kernel: int, ns: float, change: _Change, *, owned: bool) -> DeviceWork:
        """A recorded kernel at the new size; one that was launched before the operation does not change with it."""
        graph = self.slots.graph
        table = graph.kernels
        name, moved = graph.string(int(table.name[kernel])), int(table.bytes[kernel])
        kind = KernelKind(int(table.kind[kernel]))
        ratio = change.ratio if owned else 1.0
        work = DeviceWork(
            name, kind, ns * ratio, int(table.stream[kernel]), moved if moved < 0 else round(moved * ratio),
            source=Source.MEASURED if ratio == 1.0 else Source.ANCHORED, low=-MEASURED_KERNELS, high=MEASURED_KERNELS,
            in_call="-> Pageable" in name)
        if ratio != 1.0:
            work.low, work.high = min(work.low, change.low), max(work.high, change.high)
        return work

    def _placed(self, work: DeviceWork, kernel: int) -> DeviceWork:
        """A collective on the stream it was recorded on."""
        return replace(work, stream=int(self.slots.graph.kernels.stream[kernel]))

    def _unknown(self, op: int, works: list[DeviceWork], collectives: dict[int, DeviceWork],
                 usual: tuple[float, float, float]) -> tuple[float, float, list[HostCall]]:
        """An operation the recording does not have."""
        self.tally.modelled += 1
        if op in self.row_of:
            # A recorded CPU job's collectives are in its host time; one that had none gets them beside it.
            recorded = self.anchors.on_cpu and len(self.slots.graph.collectives)
            works = [] if recorded else [collectives[self.row_of[op]]]
        elif self.anchors.on_cpu:
            ns = sum(work.ns for work in works)
            self.tally.unsure_ns += ns
            return usual[0], usual[1] + ns, []
        computed = host_work_ns(self.graph, op)
        if not works:
            return (usual[0], computed, []) if computed else (0.0, 0.0, [])
        return usual[0], usual[1] + computed, [HostCall(_LAUNCH, LaunchKind.KERNEL, usual[2], [work]) for work in works]

    def _collective_kernel(self, slot: int) -> int:
        if slot < 0:
            return NONE
        slots = self.slots
        low, high = (int(slots.kernel_ptr[slots.call_ptr[at]]) for at in (slot, slot + 1))
        own = slots.kernel[low:high]
        mine = own[slots.graph.kernels.kind[own] == KernelKind.COLLECTIVE]
        return int(mine[0]) if len(mine) else NONE

    def _kernel_ns(self, slot: int, kernel: int) -> float:
        slots = self.slots
        low, high = (int(slots.kernel_ptr[slots.call_ptr[at]]) for at in (slot, slot + 1))
        return float(slots.kernel_ns[low + int(np.flatnonzero(slots.kernel[low:high] == kernel)[0])])


def _key(graph: ExecutionGraph, op: int, slots: RecordedSlots, slot: int) -> tuple[int, ...]:
    """Return what decides how two operations differ."""
    new, old, row = graph.ops, slots.graph.ops, int(slots.op[slot])
    return (int(new.name[op]), int(new.shapes[op]), int(new.dtypes[op]), int(new.strides[op]), int(new.scalars[op]),
            int(new.place[op]), int(old.name[row]), int(old.shapes[row]), int(old.dtypes[row]), int(old.strides[row]),
            int(old.scalars[row]), int(slots.tf32[slot]))


def _calls_of_pair(graph: ExecutionGraph, op: int, slots: RecordedSlots, slot: int) -> tuple[
        tuple[OpCall, ...], tuple[OpCall, ...], float, int]:
    """Calls of a recorded operation and of the traced one it stands for; the ratio of their work on the host; where."""
    was = Operation.from_graph(slots.graph, int(slots.op[slot]))
    will = Operation.from_graph(graph, op)
    if plain_name(was.name) == plain_name(will.name):
        will = replace(will, name=was.name)
    old, new = _alike(was, will)
    place, tf32 = int(graph.ops.place[op]), bool(slots.tf32[slot])
    on_host = 1.0
    if place == Place.HOST:
        before, after = work_on_host_ns(old), work_on_host_ns(new)
        on_host = after / before if before > 0 and after > 0 else 1.0
    return calls_at(old, place, tf32), calls_at(new, place, tf32), on_host, place


def _alike(old: Operation, new: Operation) -> tuple[Operation, Operation]:
    """Both with what both know: what only the trace says of an argument says nothing of a change."""
    pairs = [_both(one, other) for one, other in zip(old.arguments, new.arguments, strict=False)]
    more = len(pairs)
    return (replace(old, arguments=(*(a for a, _ in pairs), *old.arguments[more:])),
            replace(new, arguments=(*(b for _, b in pairs), *new.arguments[more:])))


def _both(old: Argument, new: Argument) -> tuple[Argument, Argument]:
    if new.dtype.startswith("TensorList"):
        # Profilers write no element type of lists, and leave out long ones.
        old = replace(old, dtype=new.dtype) if old.shape else new
    if old.stride is None and new.stride is not None:
        new = replace(new, stride=None)
    if not old.value and new.value:
        new = replace(new, value="")
    return old, new


def _totals(calls: list[tuple[OpCall, ...]], spec: DeviceSpec, models: Models | None) -> list[
        tuple[float, float, float]]:
    """Time of each group of calls, µs, and the logs of its interval's ends over it."""
    flat = [call for group in calls for call in group]
    if not flat:
        return [(0.0, 0.0, 0.0)] * len(calls)
    priced = price(flat, spec, models)
    owner = np.repeat(np.arange(len(calls)), [len(group) for group in calls])
    time, low, high = (np.bincount(owner, weights=column[priced.index], minlength=len(calls))
                       for column in (priced.time_us, priced.low_us, priced.high_us))
    safe: Float64 = np.maximum(time, 1e-9)
    logs = np.log(np.maximum(low, 1e-9) / safe), np.log(np.maximum(high, 1e-9) / safe)
    return list(zip(time.tolist(), logs[0].tolist(), logs[1].tolist(), strict=True))


def _payload(graph: ExecutionGraph, row: int) -> tuple[int, int, str]:
    table = graph.collectives
    return int(table.elements_in[row]), int(table.elements_out[row]), graph.string(int(table.dtype[row])).lower()


def _usual(slots: RecordedSlots) -> tuple[float, float, float]:
    """Median host time before and in an operation that does work, and of one launch, ns."""
    works = np.diff(slots.call_ptr) > 0 if len(slots.call) else slots.compute > 0
    if not works.any():
        return 0.0, 0.0, 0.0
    return (float(np.median(slots.before[works])), float(np.median((slots.inside - slots.compute)[works])),
            float(np.median(slots.call_ns)) if len(slots.call) else 0.0)


__all__ = ["Anchors"]
