"""``predict``: the step time of a configuration that was never run.

A recorded job is built as a program (``build``), and its last steps repeat back to back until their period no longer
changes. Edits change its device work, host time or launches. Then every kernel is priced and the period is simulated
again. The result is the step time, an interval, and the critical path that explains them. Without edits, a prediction
is the replay of those steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from graph_predictor.comm.contention import Contention, Overlapping, contention
from graph_predictor.figures import signed_percent
from graph_predictor.prediction.data_loading import DataLoading, loader_of
from graph_predictor.prediction.edited_repeats import (
    HOSTS_KEPT,
    NUMBERS_KEPT,
    EditedHost,
    EditedRepeats,
    KernelRows,
    edit_host,
)
from graph_predictor.prediction.explain import HOST, Explained, bottleneck_rank, explain, path_entries, time_sources
from graph_predictor.prediction.interval import ActiveErrors, FamilyRows, KernelVariants, TimeErrors, spread_by
from graph_predictor.prediction.pricing import KernelTimes, measured_times, price_kernels
from graph_predictor.prediction.repeat import (
    KEPT,
    Cycle,
    Repeated,
    Shared,
    choose_steps,
    collect,
    results_kept,
    steps_of,
)
from graph_predictor.prediction.replay import ReplayErrors, check_recorded, replay_error
from graph_predictor.prediction.result import (
    Prediction,
    RankPrediction,
    SourceFacts,
    SteadyStep,
    lacking_memory,
    peak_memory,
)
from graph_predictor.prediction.rewriting import Rewritten, replaced_kernels, rewrite
from graph_predictor.prediction.scenario import (
    COLLECTIVE,
    OTHER_RANKS,
    BatchChange,
    DeviceChange,
    Edit,
    EditError,
    Scenario,
    Work,
    is_edit,
)
from graph_predictor.prediction.steady_state import Steady, matters, slowed, steady_shares, steady_state
from graph_predictor.prediction.step_spread import (
    StepKinds,
    drift,
    least_spread,
    mean_spread,
    step_kinds,
    step_totals,
    unprofiled_stretches,
)
from graph_predictor.prediction.unprofiled import unprofiled
from graph_predictor.recorded.counted_steps import CountedSteps, alike_steps, compared_steps, similar_steps, typical
from graph_predictor.recorded.facts import RecordedFacts, rank_number, recorded_facts
from graph_predictor.simulation.build import Built, build_program
from graph_predictor.simulation.host_slices import HostSlices, host_slices
from graph_predictor.simulation.program import MOST_FACTOR
from kernel_models.device import DeviceError, DeviceSpec, resolve_device, unknown_device
from kernel_models.device import device as device_named
from kernel_models.pricing import Models
from kernel_models.trace_calls import FAMILIES
from tracer.graph import ExecutionGraph, KernelKind

T = TypeVar("T")

CPU = "cpu"
"""The device of a step without device work."""
CONTENTION_ROUNDS = 2
"""Most rounds in which kernels' times and their overlap are recomputed from each other."""
MOST_LEFT = 0.9
"""Upper bound of the estimated share of host time that is waits for a processor."""
NOTED_STALLS = 0.02
"""Calls that stalled for more than this share of the recorded host time are reported. Chosen."""
UNLIKE_MEASURED = 0.02
"""A steady state that differs from the measured step by more than this share is reported."""


@dataclass(frozen=True, slots=True)
class Spreads:
    """Uncertainty of an unedited step.

    Attributes:
        host: log half width of the 80% interval of the mean host time.
        least: log half width that no interval of the step falls below.
        drift: log of the change of host time from the first to the last of the steps; ``None`` if there was none.
        mixed: log half width added to an edited step, for waits for a processor that may remain in its host time.
    """

    host: float
    least: float
    drift: float | None = None
    mixed: float = 0.0


class Baseline:
    """A job made ready for predictions: built, described and cut into slices once, edited any number of times.

    ``synthesis.baseline.baseline_of`` makes one of any job.

    Args:
        scenario: the job without edits.
        spreads: uncertainty of its host time.
        notes: sentences that reports add to every prediction.
        ran: whether the job was recorded.
        recorded_facts: facts about the recording; ``None`` for a step that never ran.
        origin: for a step traced by shapes, the recorded baseline whose times it takes.
        changes: a phrase for each difference from the origin.
    """

    def __init__(self, scenario: Scenario, spreads: Spreads, notes: Sequence[str] = (), *, ran: bool = True,
                 recorded_facts: RecordedFacts | None = None, origin: Baseline | None = None,
                 changes: tuple[str, ...] = ()) -> None:
        self.scenario, self.spreads, self.notes = scenario, spreads, list(dict.fromkeys(notes))
        self.ran, self.recorded_facts, self.origin, self.changes = ran, recorded_facts, origin, changes

    @classmethod
    def recorded(cls, graphs: Sequence[ExecutionGraph], steps: str | int | range | None = None, *,
                 device: DeviceSpec | None = None, models: Models | None = None, profiled: bool = False,
                 notes: Sequence[str] = (), built: Built | None = None) -> Baseline:
        """Return the baseline of a recorded job.

        Args:
            graphs: one for each rank.
            steps: which recorded steps to repeat, see ``choose_steps``; by default the last ones that launch the same
                work.
            device: the device of the recording, if the trace does not state it or states a wrong one.
            models: fitted models of that device.
            profiled: keep the time that the profiler took. By default it is removed if the capture also timed steps
                without the profiler; ``scenario.profiled`` states whether it is still included.
            notes: sentences about the job for reports.
            built: an already built program of the same graphs.

        Raises:
            ForetraceError: there is nothing to simulate, no step, or no such step.
        """
        check_recorded(graphs)
        built = built or build_program(list(graphs))
        counted = CountedSteps.of(graphs)
        similar = similar_steps(graphs, counted) if steps is None else None
        if not profiled:
            built = unprofiled(built, similar)
        cycle = steps_of(built, similar if steps is None else steps)
        slices = host_slices(built)
        scenario = Scenario(built, cycle, slices, DeviceChange(device or recorded_device(graphs[0]), models),
                            batches=BatchChange(loader_of(built, cycle)), profiled=built.profiled,
                            shared=Shared(results_kept(built.program)))
        spreads = _spreads(built, cycle, slices, similar, counted)
        # A baseline repeats at most six steps of one kind. The facts are of all steps that count, or those asked for.
        asked = None if steps is None else cycle.numbers
        return cls(scenario, spreads, notes, recorded_facts=recorded_facts(graphs, counted, asked))

    @property
    def built(self) -> Built:
        """Return the job's program and graphs."""
        return self.scenario.built

    @property
    def cycle(self) -> Cycle:
        """Return the steps that the baseline repeats."""
        return self.scenario.cycle

    @property
    def slices(self) -> HostSlices:
        """Return the job's host time in slices."""
        return self.scenario.slices

    def with_models(self, profiles: Mapping[str, Models]) -> Baseline:
        """Return the baseline with fitted models of the device it was recorded on, if there are any under its name."""
        devices = self.scenario.devices
        models = profiles.get(devices.source.name) if devices.source is not None else None
        self.scenario = replace(self.scenario, devices=replace(devices, source_models=models))
        return self

    def with_items(self, items: float | None) -> Baseline:
        """Return the baseline with a known number of samples a step and rank."""
        self.scenario = replace(self.scenario, items_per_rank=items)
        return self

    def steady_step(self) -> SteadyStep:
        """Return the steady state of the step without edits; ``predict()`` also gives an interval, prices and
        evidence."""
        run = _Run(self, self.scenario, [], once=True)
        ranks = explain(run.scenario, run.steady)
        return run.steady_step(ranks, bottleneck_rank(run.steady.period_ns, ranks))

    def predict(self, edits: Sequence[Edit] = (), *, price_per_hour: float | None = None,
                path: bool = True, evidence: bool = False) -> Prediction:
        """Predict the step with edits, applied one after another.

        Args:
            edits: changes of the step; none for the recorded step.
            price_per_hour: price of one device an hour, for ``Prediction.cost_per_step``.
            path: list the operations of the critical path; otherwise ``Prediction.critical_path`` is empty, for
                tables of many predictions that do not show it.
            evidence: compute what a host, GPU or network that takes no time would save (``Prediction.savings_us``).

        Raises:
            EditError: an edit cannot be done, or the price is out of range; nothing is changed.
        """
        if price_per_hour is not None and not 0.0 <= price_per_hour <= MOST_FACTOR:
            raise EditError(f"A price of {price_per_hour:g} is none: give what one device costs an hour, from 0 to "
                            f"{MOST_FACTOR:g}.")
        run = self._run(checked_edits(edits))
        found = run.prediction(price_per_hour, path)
        if evidence:
            found.savings_us = run.savings_us()
        return found

    @cached_property
    def facts(self) -> SourceFacts:
        """Return the facts about the job that every report of a prediction states."""
        return SourceFacts.of(self.built)

    @cached_property
    def replay_error(self) -> ReplayErrors:
        """Return the replay errors of the recording that the job rests on; zeros for a step by models alone."""
        if self.origin is not None:
            return self.origin.replay_error
        if not self.ran:
            return ReplayErrors()
        measured = self.measured_ns
        unedited_ns = self._unedited.step_ns
        apart = math.log(measured / unedited_ns) if measured and unedited_ns else 0.0
        return replace(replay_error(self.built, self.cycle), apart=apart)

    @cached_property
    def _unedited(self) -> _Run:
        return self._run([])

    @cached_property
    def contention(self) -> Contention:
        """Return how much the recorded job's computation and collectives slow each other down."""
        return contention(self.built)

    @cached_property
    def known_contention(self) -> Contention | None:
        """Return the contention if edits can change it: the job is a recording, and some slow-down is known."""
        return self.contention if self.ran and self.origin is None and self.contention.known else None

    @cached_property
    def unedited_shares(self) -> Overlapping:
        """Return the shares of each kernel's time that overlap other work, in the unedited step."""
        return steady_shares(self._unedited.steady, self._unedited.kinds)

    @cached_property
    def scatter(self) -> float:
        """Return the variation between steps that the variation of their host time does not explain, as a log half
        width (subtracted in quadrature).

        Its cause is unknown, so every edited step has it in addition to the edit's own errors.
        """
        if self.origin is not None:
            return self.origin.scatter
        if not self.ran:
            return 0.0
        beyond = max(self.spreads.least**2 - self._unedited.of_host()**2, 0.0)
        return math.sqrt(beyond + self.spreads.mixed**2)

    @property
    def measured_ns(self) -> float | None:
        """Return the measured time of the unedited step, ns: the mean of the recorded steps if ``scenario.profiled``,
        else the median without the profiler. ``None`` if not measured; the median also if steps were chosen."""
        facts = self.recorded_facts
        if facts is None:
            return None
        if self.scenario.profiled:
            return facts.step_ns
        return facts.unprofiled_ns if facts.of_all else None

    @cached_property
    def kinds(self) -> StepKinds | None:
        """Return how the recorded steps differ in their work; ``None`` if they all do the same work, or the job was not
        recorded."""
        if self.origin is not None:
            return self.origin.kinds
        return step_kinds(self.built.graphs, self.cycle.names) if self.ran else None

    @cached_property
    def unlike_measured(self) -> str | None:
        """Return a sentence on why the unedited step differs from the measured one; ``None`` if they agree or no step
        was measured. The sentence holds for edited steps too: no edit makes a recording steady."""
        measured = self.measured_ns
        if not measured or abs((step_ns := self._unedited.step_ns) / measured - 1.0) <= UNLIKE_MEASURED:
            return None
        if not self.scenario.profiled:
            facts_ms = f"{self.recorded_facts.step_ns / 1e6:,.3f}" if self.recorded_facts is not None else "?"
            return (f"The capture's steps took {measured / 1e6:,.3f} ms without the profiler, and {step_ns / 1e6:,.3f} "
                    f"ms are predicted of them as they are (under it they took {facts_ms} "
                    "ms): the two phases of the capture differ by more than the profiler's cost on the host. The "
                    "interval reaches the measured time.")
        return (f"The recorded steps took {measured / 1e6:.3f} ms: they were no steady state (a queue was filling or "
                "draining, or ranks had not met), or single pauses fell into them. The interval reaches that time.")

    def simulated(self, edits: Sequence[Edit] = ()) -> SimulatedStep:
        """Return the simulated job behind ``predict``, for reports that look at all of it. Raises as ``predict``."""
        run = self._run(edits)
        return SimulatedStep(run.scenario, run.steady, tuple(run.edits), tuple(run.said()),
                             (self.origin or self).ran)

    def _run(self, edits: Sequence[Edit]) -> _Run:
        scenario = self.scenario
        for edit in edits:
            scenario = edit.apply(scenario)
        if edits and (lacking := lacking_memory(scenario)) is not None:
            raise EditError(lacking)
        if edits and self.cycle.shared.most < KEPT:
            self._let_others_go()
        return _Run(self, scenario, [*self.changes, *(edit.describe() for edit in edits)])


    def _let_others_go(self) -> None:
        """Compute the results of the unedited step that edited steps need, then free its copies: in a large recording
        they take hundreds of MB."""
        _ = self.replay_error, self.scatter, self.unlike_measured
        if self.known_contention is not None:
            _ = self.unedited_shares
        vars(self).pop("_unedited", None)
        collect(self.built.program)


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A predicted job as it was simulated.

    Attributes:
        scenario: the simulated scenario; ``steady``: its copies and their times.
        edits: a phrase for each edit.
        notes: warnings and notes.
        ran: whether it rests on a recording.
    """

    scenario: Scenario
    steady: Steady
    edits: tuple[str, ...]
    notes: tuple[str, ...]
    ran: bool


class _Run:
    """One scenario, priced and simulated. ``once``: with recorded times; no later prediction uses its copies."""

    def __init__(self, baseline: Baseline, scenario: Scenario, edits: list[str], *, once: bool = False) -> None:
        self.rewritten = rewrite(scenario)
        self.baseline, self.scenario, self.edits, self.once = baseline, scenario, edits, once
        self.times: KernelTimes = (measured_times(scenario.built.program) if once
                                   else replaced_kernels(self.rewritten, price_kernels(scenario)))
        self.host: EditedHost = _edited_host(scenario, self.rewritten)
        self.kinds = baseline.facts.kinds
        self.steady: Steady = self._steady()
        if edits and (found := baseline.known_contention) is not None:
            self._contend(found)

    def _edited(self, repeated: Repeated) -> tuple[EditedRepeats, KernelRows]:
        copies = EditedRepeats.once(repeated, self.scenario, self.host)
        return copies, copies.kernels_once("expected", self.times, lambda: KernelVariants(
            self.times.ns[copies.rows.kernels, None]))

    def _steady(self) -> Steady:
        return steady_state(self.scenario.cycle, self._edited, once=self.once)

    def _contend(self, found: Contention) -> None:
        """Scale each kernel by its slow-down from the work that overlaps it in the edited step."""
        recorded, alone = self.baseline.unedited_shares, self.times
        for _ in range(CONTENTION_ROUNDS):
            change = found.log_factor(steady_shares(self.steady, self.kinds)) - found.log_factor(recorded)
            times = slowed(alone, np.where(self.scenario.cycle.kernel, change, 0.0), found)
            if not matters(np.log(np.maximum(times.ns, 1.0) / np.maximum(self.times.ns, 1.0)), self.times, self.steady):
                break
            self.times = times
            self.steady = self._steady()

    @property
    def step_ns(self) -> float:
        """Return the expected time of a step, of the slowest rank."""
        return float(self.steady.period_ns.max()) / self.scenario.cycle.steps

    def steady_step(self, ranks: list[Explained], bottleneck: int, *, path: bool = True) -> SteadyStep:
        """Return the step's steady state, given its ranks' critical paths and the rank that decides."""
        chosen, steps = ranks[bottleneck], self.scenario.cycle.steps
        per_rank = [self._rank(rank, explained) for rank, explained in enumerate(ranks)]
        return SteadyStep(
            self.step_ns / 1e3, max(rank.gpu_active_us for rank in per_rank), chosen.bound,
            {label: ns / steps / 1e3 for label, ns in chosen.bounds.items()},
            path_entries(self.scenario, self.steady, chosen.path()) if path else [], per_rank)

    def prediction(self, price_per_hour: float | None, path: bool) -> Prediction:
        scenario, steady = self.scenario, self.steady
        ranks = explain(scenario, steady)
        slowest, step_ns = bottleneck_rank(steady.period_ns, ranks), self.step_ns
        low, high = self.baseline.replay_error.widened(*self._interval(step_ns))
        found = self.steady_step(ranks, slowest, path=path)
        families = self._of_times("device time", slowest, lambda: self._device_time(slowest))
        sources, device_sources = time_sources(scenario, self.host, self.times)
        target = scenario.scaled_device()
        flops = self._flops(slowest)
        facts, rests_on = self.baseline.facts, self.baseline.origin or self.baseline
        world, ran = facts.world_size, rests_on.ran
        return Prediction(
            found.step_time_us, found.gpu_active_us, found.bound, found.bounds_us, found.critical_path, found.per_rank,
            interval_us=(low / 1e3, high / 1e3),
            gpu_active_interval_us=self._active_interval(found.per_rank), families_us=dict(families),
            profiled=scenario.profiled, ran=ran,
            sources=sources, kernel_sources=device_sources, recorded=rests_on.recorded_facts,
            steps=rests_on.cycle.names,
            device=target.name if target is not None else facts.device,
            recorded_on="" if not ran else scenario.devices.source.name if scenario.devices.source else facts.device,
            peak_memory_bytes=peak_memory(scenario),
            items_per_second=None if scenario.items_per_rank is None else (
                scenario.items_per_rank * world / step_ns * 1e9),
            flops_per_step=flops or None,
            mfu=None if target is None or not flops else flops / step_ns / 1e3 / self._peak(target),
            cost_per_step=None if price_per_hour is None else price_per_hour * world * step_ns / 3.6e12,
            as_measured=not self.edits and ran and self.baseline.unlike_measured is None,
            edits=self.edits, sizes=scenario.sizes, warnings=self._warnings(), notes=self._notes())

    def savings_us(self) -> dict[str, float]:
        """Return the time, µs a step, that a host, a GPU or a network that takes no time would save, by its name."""
        copies, kinds = self.steady.copies, self.kinds
        used = {HOST: True, "GPU": bool((kinds != KernelKind.COLLECTIVE).any()),
                "network": bool((kinds == KernelKind.COLLECTIVE).any())}
        ns = np.repeat(self.times.ns[copies.rows.kernels, None], 2, axis=1)
        collective = kinds[copies.rows.kernels] == KernelKind.COLLECTIVE
        ns[~collective, 0], ns[collective, 1] = 0.0, 0.0
        periods = [*copies.periods_ns(self.steady.kernels, [0.0]),
                   *copies.periods_ns(copies.kernels(KernelVariants(ns)), [1.0, 1.0])]
        now = float(self.steady.period_ns.max())
        return {name: max(now - float(period), 0.0) / self.scenario.cycle.steps / 1e3
                for (name, there), period in zip(used.items(), periods, strict=True) if there}

    def _rank(self, rank: int, explained: Explained) -> RankPrediction:
        graph, steps = self.scenario.built.graphs[rank], self.scenario.cycle.steps
        active_ns = explained.active_ns / steps
        if not self.edits and (facts := self.baseline.recorded_facts) is not None:
            # Without edits, the GPU is active for the recorded time.
            active_ns = facts.ranks[rank].gpu_active_ns or 0.0
        return RankPrediction(
            rank_number(graph, rank), float(self.steady.period_ns[rank]) / steps / 1e3,
            active_ns / 1e3, explained.bound,
            {name: ns / steps / 1e3 for name, ns in explained.bounds.items()})

    def _device_time(self, rank: int) -> dict[str, float]:
        """Return the device time a step by family, µs."""
        rows = self.scenario.cycle.kernel_rows(rank)
        ns, family = self.times.ns[rows], self.times.family[rows]
        sums = np.bincount(family, weights=ns, minlength=COLLECTIVE + 1) / self.scenario.cycle.steps / 1e3
        names = [*(f.value for f in FAMILIES), "collective"]
        return {names[i]: float(sums[i]) for i in np.argsort(-sums, kind="stable").tolist() if sums[i] > 0}

    def _active_interval(self, ranks: list[RankPrediction]) -> tuple[float, float]:
        """Return the 80% interval of the most active rank's GPU time a step, µs."""
        most = max(range(len(ranks)), key=lambda rank: ranks[rank].gpu_active_us)
        errors = self._of_times("active errors", most, lambda: self._active_errors(most))
        return errors.interval(ranks[most].gpu_active_us, self.baseline.spreads.least)

    def _active_errors(self, rank: int) -> ActiveErrors:
        cycle, family = self.scenario.cycle, self.times.family
        rows = cycle.kernel_rows(rank)
        rows = rows[self.kinds[rows] != KernelKind.COLLECTIVE]
        weight = np.zeros(len(self.times.ns))
        weight[rows] = self.times.ns[rows] / cycle.steps / 1e3
        return ActiveErrors.of(self.times, weight, self.scenario.shared.once(
            "families", (family,), lambda: FamilyRows.of(family)))

    def _of_times(self, kind: str, rank: int, make: Callable[[], T]) -> T:
        """Return ``make()``, or the result of an equal call: the result depends on the kernels' times alone."""
        return self.scenario.shared.once(kind, (self.times, self.scenario.cycle, rank), make)

    def _flops(self, rank: int) -> float:
        """Return the floating-point operations a step; 0 where sizes are not known for most of the device time. Counted
        once for all scenarios of the same sizes."""
        scenario = self.scenario
        removed = None if self.rewritten is None or not len(self.rewritten.removed()) else self.rewritten
        return scenario.shared.once("flops", (rank, scenario.built, scenario.cycle, scenario.work,
                                              scenario.kernels.calls, removed), lambda: self._counted_flops(rank))

    def _counted_flops(self, rank: int) -> float:
        work, rows = self.scenario.work, self.scenario.cycle.kernel_rows(rank)
        if self.rewritten is not None:
            rows = np.setdiff1d(rows, self.rewritten.removed())
        groups = np.unique(work.kernel_group[rows])
        groups = groups[groups >= 0]
        time = work.measured_ns[groups]
        if not len(groups) or time[~work.sized[groups]].sum() > 0.1 * time.sum():
            return 0.0
        by_group = np.array([sum(c.flops for c in self.scenario.kernels.calls.get(i, calls))
                             for i, calls in enumerate(work.calls)])
        return float(by_group[work.call_row[groups]].sum()) / self.scenario.cycle.steps

    def _peak(self, target: DeviceSpec) -> float:
        """Return the peak rate, 10¹² operations/s, of the element type of most floating-point operations."""
        work = self.scenario.work
        return target.peak_tflops(self.scenario.shared.once("most used type", (work,), lambda: _most_used_type(work)),
                                  matrix=True)

    def of_host(self) -> float:
        """Return the smaller change (log) of the step as host time goes to either end of its interval."""
        spread, step_ns, copies = self.baseline.spreads.host, self.step_ns, self.steady.copies
        periods = copies.periods_ns(self.steady.kernels, [math.exp(by) for by in (-spread, spread)])
        ends = periods / self.scenario.cycle.steps
        return min(abs(math.log(end / step_ns)) if end and step_ns else 0.0 for end in ends.tolist())

    def _errors(self) -> tuple[TimeErrors, KernelRows]:
        """Return the errors of the kernels' times, and kernels' rows for the variants of these errors. Both are kept
        for later predictions with the same times."""
        copies, cycle, family = self.steady.copies, self.scenario.cycle, self.times.family
        events = len(copies.repeated.item) + len(copies.repeated.kernel)
        rows = copies.rows.kernels
        families = cycle.shared.once("families", (family,), lambda: FamilyRows.of(family[rows]))
        errors = copies.repeated.shared.once("errors", (self.times,), lambda: TimeErrors.of(
            self.times.of_rows(rows), families, events))
        return errors, copies.kernels_once("errors", self.times, lambda: errors.variants(self.times.ns[rows]))

    def _interval(self, step_ns: float) -> tuple[float, float]:
        scenario, steps = self.scenario, self.scenario.cycle.steps
        host = scenario.host.widened(0.0 if self.rewritten is None else self.rewritten.host_spread)
        spread = math.hypot(self.baseline.spreads.host, host.spread)
        errors, kernels = self._errors()
        training = self.steady.copies.training
        alone = step_ns if training is self.steady.copies else (
            float(training.periods_ns(self.steady.kernels, [1.0])[0]) / steps)
        low, high = errors.interval(training.periods_ns(kernels, errors.of_host(spread)) / steps, alone)
        if scenario.batches.workers is not None:
            # The step is the longer of two independent times: that of the training process, and of its loader workers.
            at_least = scenario.batches.workers.step_at_least()
            low, high = max(low, at_least[0]), max(high, at_least[1])
        if scenario.batches.data_loading is not None:
            low, high = self._with_data_loading(scenario.batches.data_loading, low, high, step_ns)
        # An edited step is at least as uncertain as the recorded one: an edit that removes host time also removes the
        # variation of that time, but the new bottleneck varies too.
        least = self.baseline.spreads.least
        if self.edits and (self.baseline.origin or self.baseline).ran:
            least = max(least, self.baseline.spreads.host)
            low, high = spread_by(low, high, step_ns, self.baseline.scatter)
        low, high = min(low, step_ns * math.exp(-least)), max(high, step_ns * math.exp(least))
        if (kinds := self.baseline.kinds) is not None:
            low, high = min(low, step_ns * kinds.shortest), max(high, step_ns * kinds.longest)
        return low, high

    def _with_data_loading(self, fetching: DataLoading, low: float, high: float, step_ns: float) -> tuple[float, float]:
        """Return an interval widened by the uncertainty of the batches that the training process itself loads."""
        at = []
        for factor in (fetching.low, fetching.high):
            batches = replace(self.scenario.batches, data_loading=replace(fetching, expected=factor))
            host = edit_host(replace(self.scenario, batches=batches), self.rewritten)
            copies = EditedRepeats(self.steady.repeated, self.scenario, host)
            at.append(float(copies.periods_ns(self.steady.kernels, [1.0])[0]) / self.scenario.cycle.steps)
        return (step_ns - math.hypot(step_ns - low, max(step_ns - at[0], 0.0)),
                step_ns + math.hypot(high - step_ns, max(at[1] - step_ns, 0.0)))

    def said(self) -> list[str]:
        """Return the prediction's warnings and notes."""
        return [*(f"Warning: {text}" for text in self._warnings()), *self._notes()]

    def _warnings(self) -> list[str]:
        found = [*self.scenario.warnings]
        if (lacking := lacking_memory(self.scenario)) is not None:
            found.append(lacking)
        if not self.steady.periods.reached:
            found.append("The repeated step had reached no steady state: its period still changed.")
        if self.baseline.spreads.drift is not None and self.scenario.host.ns is None:
            found.append(f"Host time changed by {signed_percent(np.expm1(self.baseline.spreads.drift), 0)} from the "
                         f"first to the last of the {'repeated' if self.scenario.profiled else 'timed'} steps: the "
                         "machine was changing its speed, and steps to come may go on with it.")
        found += self.baseline.replay_error.warnings()
        if (kinds := self.baseline.kinds) is not None:
            found.append(f"{kinds.text} The prediction is of steps like {', '.join(self._steps())}, and its interval "
                         "covers the others; where the loop takes turns, record two whole rounds of them or more "
                         "(foretrace capture --steps N), and the round is predicted as one step.")
        if (unlike := (self.baseline.origin or self.baseline).unlike_measured) is not None:
            found.append(unlike)
        if (unrecorded := self.baseline.facts.unrecorded) and self.baseline.ran and (
                OTHER_RANKS not in self.scenario.set_by):
            found.append(unrecorded)
        return found

    def _steps(self) -> tuple[str, ...]:
        return (self.baseline.origin or self.baseline).cycle.names

    def _notes(self) -> list[str]:
        notes = [*self.baseline.notes, *self.baseline.facts.damage, *self.scenario.built.rendezvous.notes,
                 *(spec.note for spec in (self.scenario.devices.source, self.scenario.devices.target)
                   if spec is not None and spec.note), *self.scenario.notes, *self.times.notes]
        recorded = self.baseline.origin or self.baseline
        if self.scenario.profiled and recorded.ran:
            without = None if recorded.recorded_facts is None else recorded.recorded_facts.unprofiled_ns
            notes.append("Times are those under the profiler" + (
                ": nothing says what the step takes without it (foretrace capture times that too; --without-profiler "
                "takes out what its events cost)." if without is None
                else f"; without it the recorded step took {without / 1e6:,.3f} ms (median)."))
        if self.scenario.batches.workers is not None:
            notes.append(self.scenario.batches.workers.note(self.step_ns))
        left = recorded.built.without_profiler
        if left is not None and left.stalled[0] > NOTED_STALLS:
            notes.append(f"Calls were stopped in {left.stalled[0]:.0%} of the recorded host time (most in "
                         f"{left.stalled[1]}): they took three times or more what equal ones of other steps take, "
                         "which is the machine's doing and no work.")
        if not len(self.scenario.built.program.kernel_item):
            notes.append("The trace has no GPU work: the step is host time throughout.")
        return list(dict.fromkeys(notes))


def checked_edits(edits: Sequence[Edit]) -> Sequence[Edit]:
    """Return the edits. Raises ``EditError`` if they are anything but a sequence of edits, such as a single edit."""
    if is_edit(edits) or not all(map(is_edit, edits)):
        raise EditError("Edits are given as a list of them, such as [edits.ScaleHost(0.5)].")
    return edits


def _most_used_type(work: Work) -> str:
    """Return the element type of most floating-point operations."""
    counts: dict[str, float] = {}
    for calls in work.calls:
        for call in calls:
            counts[call.dtype] = counts.get(call.dtype, 0.0) + call.flops
    return max(counts, key=lambda name: counts[name])


def _edited_host(scenario: Scenario, rewritten: Rewritten | None) -> EditedHost:
    """Return the host after edits; without a rewritten program it is kept for all scenarios with equal host changes."""
    if rewritten is not None:
        return edit_host(scenario, rewritten)
    changes = [getattr(group, field.name) for group in (scenario.host, scenario.launches, scenario.batches)
               for field in fields(group)]
    of = (scenario.built, scenario.cycle, scenario.slices, *changes)
    most = scenario.shared.as_many(len(scenario.slices), NUMBERS_KEPT, HOSTS_KEPT)
    return scenario.shared.once("host", of, lambda: edit_host(scenario, None), most=most)


def _spreads(built: Built, cycle: Cycle, slices: HostSlices, similar: range | None, counted: CountedSteps) -> Spreads:
    """Return how much the steps of a cycle vary, together with the ``similar`` steps that it was chosen from. For a job
    without the profiler, return how much the steps vary that were timed without it."""
    noise = max(graph.meta.noise for graph in built.graphs)
    if not built.profiled:
        stretches, timed = unprofiled_stretches(built), np.array(built.graphs[0].meta.unprofiled_step_ns, np.int64)
        return Spreads(math.hypot(mean_spread(stretches), noise), least_spread(timed, float(np.median(timed))),
                       drift(stretches), _mixed(built))
    graphs = built.graphs
    compared = alike = cycle
    lengths = np.max([cycle.recorded_ns(rank) for rank in range(len(graphs))], axis=0)
    if similar is not None:
        # The variation of steps includes their outliers.
        compared = choose_steps(built, compared_steps(counted, similar)) or cycle
        alike = choose_steps(built, alike_steps(graphs, similar)) or cycle
        lengths = counted.longest_ns(similar.start)[counted.undamaged()[similar.start:]]
    around_ns = float(lengths[typical(lengths)].mean())
    host = math.hypot(mean_spread(step_totals(built, compared, slices)), noise)
    return Spreads(host, least_spread(lengths, around_ns),
                   drift(step_totals(built, alike, slices, unblocked=True)))


def _mixed(built: Built) -> float:
    """Return the uncertainty (log half width) of an edited step from waits for a processor in its recorded host time.

    The capture counted how long its profiled steps waited. Stalled calls were found and removed. The remaining waits
    lie at unknown places, in operations and between them.
    """
    if built.without_profiler is None or not built.computes_on_host:
        return 0.0
    waited, found = max(graph.meta.waited_share for graph in built.graphs), built.without_profiler.stalled[0]
    left = max(waited - found, 0.0) / max(1.0 - found, 1e-3)
    return -math.log1p(-min(left, MOST_LEFT))


def recorded_device(graph: ExecutionGraph) -> DeviceSpec | None:
    """Return the device that a rank ran on; for a GPU without a device file, a placeholder with its driver's figures.

    ``None`` where these figures are not enough.
    """
    meta = graph.meta
    if not meta.device:
        # Without device work the operations themselves computed: on the host.
        return device_named(CPU) if graph.computes_on_host else None
    try:
        return resolve_device(meta.device, meta.device_memory_bytes, meta.sm_count)
    except DeviceError:
        with suppress(DeviceError):
            return unknown_device(meta.device, meta.device_memory_bytes, meta.sm_count, meta.compute_capability)
        return None
