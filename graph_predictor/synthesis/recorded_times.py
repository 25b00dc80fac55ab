"""A recorded job as the source of times for a step traced by shapes, and the host that its ranks would share.

Ranks on CPUs that share cores slow each other down, and their collectives take time from computation::

    two ranks on two cores     main 0  |= backward =|=== gloo ===|= backward =|    a collective's threads send, receive
                               main 1  |= backward =|=== gloo ===|= backward =|    and add up on the cores that compute
    four ranks on two cores:   each of the four has a core half of the time

A collective of gloo is work of the processor: its threads copy to and from the loopback and add up. In measurements
back to back on two cores, each of two processes spends 0.44 to 0.92 (median 0.7) of its time on a core. Each of four
spends 0.27 to 0.51 (median 0.39). So the cores are busy for four fifths of the collective. Overlapping computation
loses as much, so overlap gains nothing.

A parallel plan adds host time to a step that was recorded without it: hooks, and sharded tensors' dispatch::

    recorded        |view|        |addmm|                  one process alone
    under FSDP      hooks |all_gather| hooks |view|hooks|addmm|        what a host model knows of programs with hooks

The shipped host model was fitted to programs under DDP and FSDP too (``traces/host-parallel``). Its prediction for the
traced step less that for the recorded step is added event by event, scaled to this host's own speed.

``StandInTimes``: each traced operation takes the host time, the calls and the device work of its matching recorded
operation (``recorded_operations``). With equal arguments the time is *measured*. With other arguments, device work (on
a CPU: computation) is *anchored*: measured × model(new) / model(old). Models price traced operations without a match.
The time of host work itself stays, because it does not depend on sizes.

An edit scales the traced host's time as it scales the recorded host's (``StandIn``), operation by operation::

    recorded   addmm  100 µs → 50 µs with the edit             (×0.5)
    traced     addmm  180 µs (anchored) → 90 µs                (×0.5, from the matching recorded operation)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from graph_predictor.prediction.host_steps import named_host_step, traced_host_step
from graph_predictor.prediction.operation_costs import OperationCosts
from graph_predictor.prediction.pricing import change_ratios, prices_of, resized_on_cpu, shrinking, size_of_change
from graph_predictor.prediction.scenario import EditError, Scenario
from graph_predictor.simulation.host_slices import HostSlices
from graph_predictor.simulation.ranks import IN_CALL_COPIES
from graph_predictor.synthesis.program import DeviceWork, HostCall, OperationTimes
from graph_predictor.synthesis.recorded_operations import (
    OperationMatch,
    RecordedOperations,
    match,
    names_of_both,
    out_of_place,
    recorded_operations,
)
from graph_predictor.synthesis.step import collective_works, modelled_works
from kernel_models.cpu_units import retyped, said_of
from kernel_models.device import DeviceSpec
from kernel_models.host.model import PLANS_HOST, shipped_host
from kernel_models.host.segments import LaunchConstants
from kernel_models.op_call import Family, OpCall, Source
from kernel_models.operation import Operation, calls_at, host_work_ns, work_on_host_ns
from kernel_models.spreads import HOST_AT_CAPTURED, MEASURED_KERNELS
from tracer.arrays import Float64, Int64
from tracer.graph import NONE, ExecutionGraph, KernelKind, LaunchKind, Meta, Place
from tracer.views import Argument

BUSY = 0.8
"""Share of a collective's time in which it occupies as many cores as there are processes, or all cores."""


@dataclass(frozen=True, slots=True)
class SharedCores:
    """Ranks that share the cores of one host.

    Attributes:
        ranks: number of ranks on the host.
        cores: number of its cores.
        threads: threads that one rank computes an operation with.
    """

    ranks: int
    cores: int
    threads: int

    @property
    def crowding(self) -> float:
        """Return the factor by which computation slows down when all ranks compute at once."""
        return max(self.ranks * self.threads / self.cores, 1.0)

    @property
    def taken(self) -> float:
        """Return the time that a collective takes from overlapping computation, as a share of the collective's time; 0
        where it has cores of its own."""
        wanted = BUSY * min(self.cores / self.ranks, 1.0)
        spare = max(self.cores / self.ranks - self.threads, 0.0)
        return BUSY * (1.0 - min(spare / wanted, 1.0))

    def apply(self, graph: ExecutionGraph, times: OperationTimes) -> OperationTimes:
        """Return one rank's times on a host shared with the other ranks. Collectives were measured on it and stay.

        Args:
            graph: the rank, traced by shapes.
            times: its times if it had the host to itself.
        """
        factor = self.crowding
        before, inside = np.append(times.before, times.tail) * factor, times.inside * factor
        at_once = {int(op) for op, beside in zip(graph.collectives.op, graph.collectives.is_async, strict=True)
                   if not beside}
        for op, calls in times.calls.items():
            # The host waits for the other, synchronous collectives: nothing overlaps them.
            if op not in at_once:
                before[op + 1] += self.taken * sum(
                    work.ns for call in calls for work in call.kernels if work.kind == KernelKind.COLLECTIVE)
        return replace(times, before=before[:-1], inside=inside, tail=float(before[-1]), fetch=times.fetch * factor)

    def note(self) -> str:
        """Return the assumption as a sentence."""
        return (f"{self.ranks} ranks share {self.cores} cores of the recorded host: their operations take "
                f"{self.crowding:.2f} times as long, and a collective takes {self.taken:.0%} of its time from "
                "overlapping computation.")


def cores_shared(meta: Meta, ranks: int) -> SharedCores | None:
    """Return how ranks share the host that one process was recorded on; ``None`` for a single rank, or if the recording
    does not state its cores or had several ranks itself."""
    if meta.host_cores < 1 or meta.world_size > 1 or ranks < 2:
        return None
    return SharedCores(ranks, meta.host_cores, min(max(meta.host_threads, 1), meta.host_cores))


def with_hooks(graph: ExecutionGraph, times: OperationTimes, recorded: RecordedOperations,
               pairs: OperationMatch) -> OperationTimes:
    """Return a traced rank's times plus the host time that its parallel plan adds.

    Args:
        graph: traced by shapes under a plan.
        times: times of its operations, from the recording.
        recorded: operations of one process without a plan.
        pairs: the match of each traced operation among them.
    """
    row = pairs.row
    mine, theirs = np.flatnonzero(row >= 0), row[row >= 0]
    computed = np.zeros(len(graph.ops))
    computed[mine] = recorded.compute[theirs]
    model = shipped_host(PLANS_HOST)
    before, inside = model.estimate(traced_host_step(graph, computed))
    was_before, was_inside = model.estimate(named_host_step(recorded.graph, recorded.op, recorded.compute))
    own = np.maximum(recorded.inside - recorded.compute, 0.0)
    speed = float(own[theirs].sum()) / max(float(was_inside[theirs].sum()), 1.0) if len(mine) else 1.0
    more_before, more_inside = speed * before, np.zeros(len(graph.ops))
    more_before[mine] = speed * np.maximum(before[mine] - was_before[theirs], 0.0)
    more_inside[mine] = speed * np.maximum(inside[mine] - was_inside[theirs], 0.0)
    tail = speed * max(float(before[-1] - was_before[-1]), 0.0)
    return replace(times, before=times.before + more_before[:-1], inside=times.inside + more_inside,
                   tail=times.tail + tail)


LANES = 32
"""Columns that a CPU's matrix products compute together: two vectors of 512 bits of fp32. A smaller dimension (a low
rank) may cost as much as this many columns, or in proportion to its size."""
MOST_UNSIZED = 0.05
"""Largest share of the recorded work whose sizes may be missing."""
_LAUNCH = "cudaLaunchKernel"


@dataclass(frozen=True, slots=True)
class StandIn:
    """A recorded job, and the match of each operation of a traced job among its operations.

    Attributes:
        scenario: the recorded job, without edits.
        ranks: the recorded rank of each traced rank.
        costs: for each traced rank, the costs of its recorded rank's operations.
        row: for each traced rank, the row of these costs that matches each row of its ``ops``; -1 for none.
    """

    scenario: Scenario
    ranks: list[int]
    costs: list[OperationCosts]
    row: list[Int64]

    def host_factors(self, slices: HostSlices, ns: Float64) -> Float64:
        """Return a factor on each slice of the traced job's host time.

        Args:
            slices: slices of the traced job.
            ns: edited times of the recorded job's slices.
        """
        found: Float64 = np.ones(len(slices))
        for rank in range(len(self.row)):
            mine = slices.of_rank(rank)
            inside, before, fetch, overall = self._ratios(rank, ns)
            row = np.append(self.row[rank], NONE)
            op, following = slices.op[mine], slices.following[mine]
            ahead = np.where(following >= 0, np.append(before[:-1], overall)[row[following]], before[-1])
            found[mine] = np.where(slices.fetched[mine], fetch,
                                   np.where(op >= 0, np.append(inside, overall)[row[op]], ahead))
        return found

    def _ratios(self, rank: int, ns: Float64) -> tuple[Float64, Float64, float, float]:
        """Return the ratios of edited to recorded host time: inside each recorded operation, before each one (and after
        the last), of loading batches, and of the whole step."""
        slices, cycle, costs = self.scenario.slices, self.scenario.cycle, self.costs[rank]
        mine = (slices.rank == self.ranks[rank]) & cycle.working[slices.item]
        # Where no time was recorded, the ratio of the whole step is used.
        overall = float(_ratio(np.zeros(mine.sum(), np.int64), slices.ns[mine], ns[mine], 1, 1.0)[0])
        was, will = slices.ns[costs.slice_row], ns[costs.slice_row]
        inside, before = (_ratio(costs.row[rows], was[rows], will[rows], len(costs) + 1, overall)
                          for rows in (costs.within, ~costs.within))
        rows = mine & slices.fetched
        fetch = float(_ratio(np.zeros(rows.sum(), np.int64), slices.ns[rows], ns[rows], 1, overall)[0])
        return inside[:-1], before, fetch, overall


def _ratio(place: Int64, was: Int64, will: Float64, size: int, otherwise: float) -> Float64:
    before, after = (np.bincount(place, weights=column, minlength=size) for column in (was, will))
    return np.where(before > 0, after / np.maximum(before, 1e-9), otherwise)


@dataclass(slots=True)
class _Tally:
    """Counts of one rank's operations by the source of their times, and sums of its host time (ns)."""

    measured: int = 0
    anchored: int = 0
    modelled: int = 0
    left_ns: float = 0.0
    """Recorded time of operations that match no traced operation."""
    host_ns: float = 0.0
    computed_ns: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)
    """Times of changed computation on the host, and ratios of new to recorded time (infinite: nothing was recorded)."""
    guessed_ns: float = 0.0
    """The part of ``computed_ns`` without a measured time in its own element type."""
    doubted_ns: float = 0.0
    """Computation in an element type that was not recorded, each time × the log half width of its uncertainty."""
    types: set[str] = field(default_factory=set)
    """Element types of the computation in ``doubted_ns``."""
    narrow_ns: float = 0.0
    """Change of products with a dimension below ``LANES``, which may not change at all."""


@dataclass(frozen=True, slots=True)
class _Change:
    """The change from a recorded operation to a traced one: the ratio of their times, the logs of its interval's ends,
    and the ratio of their work on the host. ``retyping`` is the log half width that another element type (``dtype``)
    adds on a CPU. ``narrow`` states whether a dimension of products below ``LANES`` changes."""

    ratio: float
    low: float
    high: float
    on_host: float
    retyping: float = 0.0
    dtype: str = ""
    narrow: bool = False

    @property
    def source(self) -> Source:
        return Source.MEASURED if self.ratio == 1.0 else Source.ANCHORED


@dataclass(slots=True)
class StandInTimes:
    """Host and device times of a recorded job, for a step traced by shapes.

    Args:
        scenario: the recorded job, without edits.
        recorded_spread: log half width of the 80% interval of the job's host time.
    """

    scenario: Scenario
    recorded_spread: float
    _tallies: list[_Tally] = field(default_factory=list)
    _planned: bool = False  # a parallel plan was added; the intervals of its collectives cover its uncertainty
    _stand: list[tuple[int, OperationCosts, Int64]] = field(default_factory=list)

    @property
    def device(self) -> DeviceSpec:
        """Return the device of the recording. Raises ``EditError`` where it is unknown."""
        return self.scenario.known_source()

    @property
    def on_cpu(self) -> bool:
        """Return whether operations compute on the host thread itself."""
        return self.scenario.built.computes_on_host

    @property
    def change_spread(self) -> float:
        """Return the log half width of the 80% interval of the changed part of the traced step's host time."""
        total = sum(tally.host_ns for tally in self._tallies)
        ns, ratio = (np.concatenate([getattr(tally, name) for tally in self._tallies])
                     for name in ("computed_ns", "ratio"))
        doubted = sum(tally.doubted_ns for tally in self._tallies) / max(total, 1.0)
        if not self.on_cpu or self._planned or not len(ratio):
            return math.hypot(resized_on_cpu(ns, ratio, total), doubted)
        # Recorded operations determine how much smaller the step gets; the capture and the step are two runs.
        known = np.isfinite(ratio) & (ratio > 0)
        after, before = float(ns[known].sum()), float((ns[known] / ratio[known]).sum())
        less = shrinking(total - float(ns.sum()), total, after / before) if before else 0.0
        narrow = math.log1p(sum(tally.narrow_ns for tally in self._tallies) / max(total, 1.0))
        return math.hypot(resized_on_cpu(ns, ratio, total), doubted, less, narrow, HOST_AT_CAPTURED)

    @property
    def host_source(self) -> Source:
        """Return the source of most of the host's time."""
        return Source.ANCHORED if any(sum(tally.computed_ns) for tally in self._tallies) else Source.MEASURED

    @property
    def guessed_share(self) -> float:
        """Return the share of host time that models predict without a measured time of the same kind."""
        total = sum(tally.host_ns for tally in self._tallies)
        return sum(tally.guessed_ns for tally in self._tallies) / max(total, 1.0)

    @property
    def origin(self) -> StandIn:
        """Return the matches of all ranks that ``times`` was called for so far."""
        return StandIn(self.scenario, *(list(column) for column in zip(*self._stand, strict=True)))

    def constants(self, position: int) -> LaunchConstants:
        """Return the launch constants of the recorded rank that a traced one takes its times from."""
        return self.scenario.built.reports[self._rank(position)].constants

    def times(self, graph: ExecutionGraph, position: int, collectives: dict[int, DeviceWork], *,
              measured_collectives: bool = True) -> OperationTimes:
        """Return the times of a traced rank's operations.

        Args:
            graph: traced by shapes.
            position: position of the rank in its job.
            collectives: modelled work of each row of the graph's collectives.
            measured_collectives: use recorded times of collectives; false if they run on another cluster.

        Raises:
            EditError: the recording lacks the sizes of its operations.
        """
        recorded = recorded_operations(self.scenario, self._rank(position), names_of_both(graph))
        pairs = match(graph, recorded)
        changes = self._changes(graph, recorded, pairs)
        rank = _Rank(self, graph, recorded, pairs, changes)
        times = rank.times(rank.collectives(collectives) if measured_collectives else collectives)
        if self.on_cpu and len(graph.collectives) and not len(recorded.graph.collectives):
            times, self._planned = with_hooks(graph, times, recorded, pairs), True
        self._tallies.append(rank.tally)
        self._stand.append((self._rank(position), recorded.costs, pairs.row))
        return times

    def notes(self, device_ns: float) -> list[str]:
        """Return notes on the sources of times; ``device_ns`` is the traced step's device time."""
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
        types = sorted({dtype for tally in self._tallies for dtype in tally.types})
        return found + [said_of(dtype, self._units, measured=self._calibrated) for dtype in types]

    @property
    def _units(self) -> tuple[str, ...]:
        return tuple(self.scenario.built.graphs[0].meta.host_units)

    @property
    def _calibrated(self) -> bool:
        return self.scenario.devices.source_models is not None

    def _rank(self, position: int) -> int:
        return min(position, len(self.scenario.built.graphs) - 1)

    def _changes(self, graph: ExecutionGraph, recorded: RecordedOperations, pairs: OperationMatch) -> dict[
            tuple[int, ...], _Change]:
        """Return the change of every kind of pair, by ``_key``."""
        found: dict[tuple[int, ...], tuple[tuple[OpCall, ...], tuple[OpCall, ...], float]] = {}
        weight = np.maximum(recorded.device() + recorded.compute, 1.0)
        unsized = 0.0
        collective = frozenset(graph.collectives.op.tolist())
        for op, row in enumerate(pairs.row.tolist()):
            if row < 0:
                continue
            key = _key(graph, op, recorded, row)
            if key not in found:
                found[key] = _calls_of_pair(graph, op, recorded, row)
            was, will, _ = found[key]
            # An operation equal to its match, as where DDP is added to a recording, needs no comparison.
            if op not in collective and was != will and any("unsized" in call.flags for call in was):
                unsized += float(weight[row])
        if unsized > MOST_UNSIZED * float(weight.sum()):
            raise EditError(f"The recording has no sizes for {unsized / float(weight.sum()):.0%} of its work, so that "
                            "a trace at other sizes cannot be compared with it; record with record_shapes=True "
                            "(foretrace capture does).")
        models = self.scenario.devices.source_models
        other = {key: retyped(was, will, self._units, measured=self._calibrated)
                 for key, (was, will, _) in found.items() if self.on_cpu and _types(was) != _types(will)}
        new = [other[key].calls if key in other else will for key, (_, will, _) in found.items()]
        ratios = change_ratios(prices_of([was for was, _, _ in found.values()], self.device, models),
                               prices_of(new, self.device, models))
        changes = {key: _Change(ratio, low, high, on_host, narrow=_narrow(was, will)) for (
            key, (was, will, on_host)), ratio, low, high in zip(
            found.items(), ratios.ratio.tolist(), ratios.low.tolist(), ratios.high.tolist(), strict=True)}
        for key, one in other.items():
            changes[key] = replace(changes[key], ratio=changes[key].ratio * one.factor, retyping=one.spread,
                                   dtype=one.dtype)
        return changes


class _Rank:
    """One traced rank, and the recorded rank that it takes its times from."""

    def __init__(self, source: StandInTimes, graph: ExecutionGraph, recorded: RecordedOperations,
                 pairs: OperationMatch, changes: dict[tuple[int, ...], _Change]) -> None:
        self.source, self.graph, self.recorded, self.pairs, self.changes = source, graph, recorded, pairs, changes
        self.row_of = {int(op): row for row, op in enumerate(graph.collectives.op.tolist())}
        table = recorded.graph.collectives
        self.recorded_row = {int(kernel): row for row, kernel in enumerate(table.kernel.tolist()) if kernel >= 0}
        syncs = recorded.graph.syncs
        self.sync_stream = dict(zip(syncs.launch.tolist(), syncs.stream.tolist(), strict=True))
        self.tally = _Tally()

    def collectives(self, modelled: dict[int, DeviceWork]) -> dict[int, DeviceWork]:
        """Return the work of collectives by row, with recorded time (× the models' ratio if the payload differs), or
        with modelled time if no match has the same group size."""
        recorded = self.recorded.graph
        by_model = collective_works(recorded, self.source.device, None)
        table, old = self.graph.collectives, recorded.collectives
        found = dict(modelled)
        for op, row in self.row_of.items():
            kernel, ns = self._collective(int(self.pairs.row[op]))
            was = self.recorded_row.get(kernel, NONE)
            if was < 0 or int(old.group_size[was]) != int(table.group_size[row]):
                continue
            now, before = modelled[row], by_model[was]
            same = _payload(self.graph, row) == _payload(recorded, was)
            ratio = 1.0 if same or not before.ns else now.ns / before.ns
            size = float(size_of_change(np.array(ratio)))
            found[row] = replace(
                now, ns=ns * ratio, source=Source.MEASURED if same else Source.ANCHORED,
                low=-np.hypot(MEASURED_KERNELS, size * now.low), high=np.hypot(MEASURED_KERNELS, size * now.high),
                name=recorded.string(int(recorded.kernels.name[kernel])))
        return found

    def times(self, collectives: dict[int, DeviceWork]) -> OperationTimes:
        """Return the host time and calls of every operation."""
        recorded, ops, of = self.recorded, self.graph.ops, self.pairs.row
        before, inside = np.zeros(len(ops)), np.zeros(len(ops))
        calls: dict[int, list[HostCall]] = {}
        alone = {op: calls_at(Operation.from_graph(self.graph, op), int(ops.place[op]))
                 for op in np.flatnonzero(of < 0).tolist() if op not in self.row_of}
        works = modelled_works(alone, self.source.device, self.source.scenario.devices.source_models)
        usual = _usual(recorded)
        for op, row in enumerate(of.tolist()):
            if row < 0:
                before[op], inside[op], own = self._unknown(op, works.get(op, []), collectives, usual)
            else:
                change = self.changes[_key(self.graph, op, recorded, row)]
                before[op], inside[op] = recorded.before[row], self._inside(row, change)
                own = self._calls(op, row, change, collectives)
            if own:
                calls[op] = own
        stands = np.zeros(len(recorded), np.bool_)
        stands[of[of >= 0]] = True
        fetch = recorded.costs.fetch
        self.tally.left_ns = float((recorded.host() + recorded.device())[~stands].sum())
        self.tally.host_ns = float(before.sum() + inside.sum()) + recorded.tail + fetch + sum(
            call.ns for own in calls.values() for call in own)
        return OperationTimes(before, inside, calls, recorded.tail, fetch)

    def _inside(self, row: int, change: _Change) -> float:
        """Return the host time in an operation; on a CPU its computation changes with the sizes."""
        compute, total = float(self.recorded.compute[row]), float(self.recorded.inside[row])
        self.tally.measured += change.source == Source.MEASURED
        self.tally.anchored += change.source == Source.ANCHORED
        if self.source.on_cpu and change.ratio != 1.0:
            self.tally.computed_ns.append(compute * change.ratio)
            self.tally.ratio.append(change.ratio)
            self.tally.narrow_ns += change.narrow * abs(compute * (change.ratio - 1.0))
            if change.retyping:
                self.tally.doubted_ns += compute * change.ratio * change.retyping
                self.tally.guessed_ns += compute * change.ratio
                self.tally.types.add(change.dtype)
            return total - compute + compute * change.ratio
        return total * change.on_host

    def _calls(self, op: int, row: int, change: _Change, collectives: dict[int, DeviceWork]) -> list[HostCall]:
        known, recorded, calls = self.recorded, self.recorded.graph, self.recorded.calls
        found = []
        collective = self.row_of.get(op, NONE)
        for number in range(int(calls.ptr[row]), int(calls.ptr[row + 1])):
            launch = int(calls.row[number])
            kind = LaunchKind(int(recorded.launches.kind[launch]))
            call = HostCall(recorded.string(int(recorded.launches.name[launch])), kind, float(known.call_ns[number]),
                        stream=int(self.sync_stream.get(launch, NONE)) if kind == LaunchKind.BLOCKING_SYNC else NONE)
            for at in range(int(calls.kernel_ptr[number]), int(calls.kernel_ptr[number + 1])):
                kernel = int(calls.kernel[at])
                if recorded.kernels.kind[kernel] == KernelKind.COLLECTIVE:
                    if collective >= 0:
                        call.kernels.append(self._placed(collectives[collective], kernel))
                        collective = NONE
                    continue
                work = self._work(kernel, float(known.kernel_ns[at]), change, within=bool(calls.within[number]))
                work.in_call |= work.kind == KernelKind.MEMCPY and call.name in IN_CALL_COPIES
                call.kernels.append(work)
                if work.staged and work.source != Source.MEASURED:
                    # The call itself reads the pageable memory.
                    call.ns *= change.ratio
            found.append(call)
        if collective >= 0 and not self.source.on_cpu:
            found.append(HostCall(_LAUNCH, LaunchKind.KERNEL, 0.0, [collectives[collective]]))
        return found

    def _work(self, kernel: int, ns: float, change: _Change, *, within: bool) -> DeviceWork:
        """Return a recorded kernel at the new size. One launched before the operation (not ``within``) is unchanged."""
        graph = self.recorded.graph
        table = graph.kernels
        name, moved = graph.string(int(table.name[kernel])), int(table.bytes[kernel])
        kind = KernelKind(int(table.kind[kernel]))
        ratio = change.ratio if within else 1.0
        work = DeviceWork(
            name, kind, ns * ratio, int(table.stream[kernel]), moved if moved < 0 else round(moved * ratio),
            source=Source.MEASURED if ratio == 1.0 else Source.ANCHORED, low=-MEASURED_KERNELS, high=MEASURED_KERNELS,
            in_call="-> Pageable" in name)
        if ratio != 1.0:
            work.low, work.high = min(work.low, change.low), max(work.high, change.high)
        return work

    def _placed(self, work: DeviceWork, kernel: int) -> DeviceWork:
        """Return a collective on the stream it was recorded on."""
        return replace(work, stream=int(self.recorded.graph.kernels.stream[kernel]))

    def _unknown(self, op: int, works: list[DeviceWork], collectives: dict[int, DeviceWork],
                 usual: tuple[float, float, float]) -> tuple[float, float, list[HostCall]]:
        """Price an operation that was not recorded."""
        self.tally.modelled += 1
        if op in self.row_of:
            # A recorded CPU job's collectives are in its host time; a job without collectives gets them in addition.
            recorded = self.source.on_cpu and len(self.recorded.graph.collectives)
            works = [] if recorded else [collectives[self.row_of[op]]]
        elif self.source.on_cpu:
            ns = sum(work.ns for work in works)
            self.tally.computed_ns.append(ns)
            self.tally.ratio.append(np.inf)
            self.tally.guessed_ns += ns
            return (0.0 if len(self.graph.collectives) else usual[0]), usual[1] + ns, []
        computed = host_work_ns(self.graph, op)
        if not works:
            return (usual[0], computed, []) if computed else (0.0, 0.0, [])
        return usual[0], usual[1] + computed, [HostCall(_LAUNCH, LaunchKind.KERNEL, usual[2], [work]) for work in works]

    def _collective(self, row: int) -> tuple[int, float]:
        """Return the kernel of a recorded operation's collective, and its time, ns; ``NONE`` and 0 if it has none."""
        if row < 0:
            return NONE, 0.0
        calls = self.recorded.calls
        low, high = (int(calls.kernel_ptr[calls.ptr[at]]) for at in (row, row + 1))
        kinds = self.recorded.graph.kernels.kind[calls.kernel[low:high]]
        mine = low + np.flatnonzero(kinds == KernelKind.COLLECTIVE)
        return (int(calls.kernel[mine[0]]), float(self.recorded.kernel_ns[mine[0]])) if len(mine) else (NONE, 0.0)


def _types(calls: tuple[OpCall, ...]) -> frozenset[str]:
    return frozenset(call.dtype for call in calls)


def _key(graph: ExecutionGraph, op: int, recorded: RecordedOperations, row: int) -> tuple[int, ...]:
    """Return a key for a pair of operations; pairs of equal keys differ in the same way."""
    new, old, was = graph.ops, recorded.graph.ops, int(recorded.op[row])
    return (int(new.name[op]), int(new.shapes[op]), int(new.dtypes[op]), int(new.strides[op]), int(new.scalars[op]),
            int(new.place[op]), int(old.name[was]), int(old.shapes[was]), int(old.dtypes[was]), int(old.strides[was]),
            int(old.scalars[was]), int(recorded.tf32[row]))


def _calls_of_pair(graph: ExecutionGraph, op: int, recorded: RecordedOperations, row: int) -> tuple[
        tuple[OpCall, ...], tuple[OpCall, ...], float]:
    """Return the calls of a recorded operation and of its traced match, and the ratio of their work on the host."""
    was = Operation.from_graph(recorded.graph, int(recorded.op[row]))
    will = Operation.from_graph(graph, op)
    if out_of_place(was.name) == out_of_place(will.name):
        will = replace(will, name=was.name)
    old, new = _alike(was, will)
    place, tf32 = int(graph.ops.place[op]), bool(recorded.tf32[row])
    on_host = 1.0
    if place == Place.HOST:
        before, after = work_on_host_ns(old), work_on_host_ns(new)
        on_host = after / before if before > 0 and after > 0 else 1.0
    return calls_at(old, place, tf32), calls_at(new, place, tf32), on_host


def _alike(old: Operation, new: Operation) -> tuple[Operation, Operation]:
    """Return both operations with only the facts that both state: a fact that only the trace states is no change."""
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


def _narrow(was: tuple[OpCall, ...], will: tuple[OpCall, ...]) -> bool:
    """Return whether a dimension of a matrix product changes and is below ``LANES`` before or after."""
    return any(old.family is new.family is Family.GEMM and any(
        a != b and min(a, b) < LANES for a, b in zip(old.dims[1:], new.dims[1:], strict=True))
        for old, new in zip(was, will, strict=False))


def _payload(graph: ExecutionGraph, row: int) -> tuple[int, int, str]:
    table = graph.collectives
    return int(table.elements_in[row]), int(table.elements_out[row]), graph.string(int(table.dtype[row])).lower()


def _usual(recorded: RecordedOperations) -> tuple[float, float, float]:
    """Return the median host time before and in an operation that does work, and of one launch, ns."""
    calls = len(recorded.call_ns)
    works = np.diff(recorded.calls.ptr) > 0 if calls else recorded.compute > 0
    if not works.any():
        return 0.0, 0.0, 0.0
    return (float(np.median(recorded.before[works])), float(np.median((recorded.inside - recorded.compute)[works])),
            float(np.median(recorded.call_ns)) if calls else 0.0)
