"""``ServingModel``: the time of any step of a served decoder, from prices of its operations on a grid.

    step ──StepOperations──▶ calls ──price, price_calls──▶ parts, µs ──CorrectionFactors──▶ time ± interval

Prices come from the same models as for training steps (``kernel_models.pricing``, ``power``,
``collectives.price_calls``), factors and spreads from planned steps (``parallel.corrections``). All terms of steps are
priced on grids at once (``step_grids``). ``operations`` prices one step exactly, for reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from kernel_models.collectives import CollectiveBatch, CollectiveCall, CollectiveModel, CommTimes, price_calls
from kernel_models.collectives.price import with_engine_kernels
from kernel_models.device import DeviceSpec
from kernel_models.heuristics.roofline import heuristic_models
from kernel_models.op_call import OpCall, Source
from kernel_models.pricing import Models, PricedCalls, price, sustained
from planner.parallel.corrections import Z80, CorrectionFactors
from planner.parallel.layer_costs import PRODUCTS
from planner.serving.setup import ServingSetup
from planner.serving.step_grids import (
    BETWEEN,
    CALLS,
    COLUMNS,
    COMPANY,
    CONTEXTS,
    LAUNCHES,
    OTHER,
    PASTS,
    PIECES,
    PRODUCT,
    SEQUENCES,
    TOKENS,
    WITHIN,
    PrefillChunk,
    StepSurface,
    alone,
    between,
    in_square,
    together,
)
from planner.serving.step_operations import StepExchange, StepOperation, StepOperations, layer_in_order
from tracer.arrays import Float64
from tracer.shape_only.transformer import TransformerShape

GRAPH_LAUNCH_US = 15.0
"""Host time of launching a CUDA graph of a whole step; an assumption (a launch of the trace vllm-cuda-graph takes the
host 6 to 60 µs)."""


LEFT_MB = 1.0
"""MiB of a processor's last cache in which an operation finds its operands. A layer's weights would fit the whole
cache, unlike on a GPU, and would wrongly be priced as read from it."""
UNMEASURED_PROCESSOR, EMULATING_PROCESSOR = 2.0, 12.0
"""Factors on the spread of published GPU steps, for a processor with units for the model's dtype, and for one without.
Set, not measured: the sustained share of a socket's bandwidth depends on clocks, NUMA and the placement of threads. The
second is as wide as ``cpu_units.EMULATED``."""


@dataclass(frozen=True, slots=True)
class ServedStep:
    """The work of one step on all GPUs of a replica.

    Attributes:
        sequences: number of decoding sequences.
        context: mean tokens in the cache of a decoding sequence, including its new tokens.
        pieces: pieces of prompts that are read.
        finished: number of prompts that end in this step and get their first token.
    """

    sequences: float
    context: float = 0.0
    pieces: tuple[PrefillChunk, ...] = ()
    finished: float = 0.0


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step's time, µs, and its parts, whose sum is the time.

    Attributes:
        us, low, high: time of the step and its 80% interval.
        products, others, collectives: device time.
        host: time that the host takes in addition to the device.
        engine: scheduling and other work around the step.
    """

    us: float
    low: float
    high: float
    products: float
    others: float
    collectives: float
    host: float
    engine: float


@dataclass(frozen=True, slots=True)
class ServedOperation:
    """All operations of one name in a step.

    Attributes:
        name: their name.
        count: their number.
        us: their time on one GPU, µs.
        bound: what takes most of that time: compute, memory, launch, or network.
        flops, moved_bytes: their FLOPs and bytes.
        sources: µs by source.
    """

    name: str
    count: float
    us: float
    bound: str
    flops: float
    moved_bytes: float
    sources: dict[str, float]


SomeModel = TypeVar("SomeModel", bound="ServingModel")


class ServingModel:
    """Prices steps of one replica.

    Args:
        shape: the decoder.
        setup: how it is served.
        device: the device of each GPU.
        collectives: prices of collectives on the cluster.
        models: models fitted for the device.
        rates: correction factors; by default those of the engine (``rates_of``).
    """

    def __init__(self, shape: TransformerShape, setup: ServingSetup, device: DeviceSpec, collectives: CollectiveModel,
                 models: Models | None = None, rates: CorrectionFactors | None = None) -> None:
        setup.check(shape)
        if device.vendor == "host":
            # All other weights of a step pass through the cache before a weight is read again.
            device = replace(device, l2_mb=min(device.l2_mb, LEFT_MB), l3_mb=0.0)
        self.shape, self.setup, self.device, self.collectives = shape, setup, device, collectives
        self.rates = rates or rates_of(setup)
        self.models = models
        self._factors: Mapping[str, float] = {}
        self._make = StepOperations(shape, setup, device, collectives.topology)
        layers: dict[TransformerShape, int] = {}
        for run in shape.runs:
            layers[run.one_layer()] = layers.get(run.one_layer(), 0) + run.layers
        self._layers = layers
        self._grids: list[tuple[Float64, ...]] = []

    def _other(self: SomeModel, **changed: object) -> SomeModel:
        other = type(self).__new__(type(self))
        other.__dict__.update({name: value for name, value in self.__dict__.items() if name != "surface"} | changed)
        return other

    def with_rates(self: SomeModel, rates: CorrectionFactors) -> SomeModel:
        """Return this model with other rates; prices are shared."""
        return self._other(rates=rates)

    def with_factors(self: SomeModel, factors: Mapping[str, float]) -> SomeModel:
        """Return this model with factors on the times of operations, by name, in addition to the rates."""
        return self._other(_factors=dict(factors), _grids=[])

    def with_chunk(self: SomeModel, chunk: int) -> SomeModel:
        """Return this model with another ``chunk`` of its setup; prices are shared."""
        return self._other(setup=replace(self.setup, chunk=chunk))

    @property
    def wider(self) -> float:
        """Factor on the spread: above 1 for a processor without measurements."""
        if self.device.vendor != "host" or self.models is not None:
            return 1.0
        own = self.shape.dtype == "fp32" or self.shape.dtype in self.device.matrix_tflops
        return UNMEASURED_PROCESSOR if own else EMULATING_PROCESSOR

    waits = True
    """Whether the engine waits for a step before it prepares the next step."""
    hides = False
    """Whether collectives overlap all other work."""
    graph_us = GRAPH_LAUNCH_US
    """Host time of launching a step's CUDA graph."""

    def time(self, step: ServedStep) -> StepTime:
        """Return the time of a step."""
        rates, parts = self.rates, self.parts(step)
        products, others = float(parts[PRODUCT] * rates.products), float(parts[OTHER] * rates.others)
        waits = float(parts[WITHIN] * rates.collectives + parts[BETWEEN] * rates.network)
        device = float(parts[PRODUCT] * rates.products + parts[OTHER] * rates.others
                       + parts[WITHIN] * rates.collectives + parts[BETWEEN] * rates.network)
        host = self.graph_us * self.setup.pp if self.captured(step) else float(
            parts[LAUNCHES] * rates.host_us + parts[CALLS] * rates.host_collective_us)
        engine = self.engine_us(step)
        work = together(device, host, rates.meet)
        total = work + engine
        if not self.waits:
            total = together(device, host + engine, rates.meet)
            engine = total - work
        spread = Z80 * self.wider * rates.spreads.of(products / total, others / total, waits / total,
                                        (work - device + engine) / total)
        return StepTime(total, total * float(np.exp(-spread)), total * float(np.exp(spread)), products, others, waits,
                        work - device, engine)

    @cached_property
    def surface(self) -> StepSurface:
        """The model of step times as plain numbers, for the many steps of a simulated server."""
        rates = self.rates
        device = np.array([rates.products, rates.others, rates.collectives, rates.network, 0.0, 0.0])
        host = np.array([0.0, 0.0, 0.0, 0.0, rates.host_us, rates.host_collective_us])
        tokens, rows, decoding, pieces, company = (
            ((grid @ device).tolist(), (grid @ host).tolist()) for grid in self.grids)
        return StepSurface(tokens, rows, decoding, pieces, company, self.setup, rates, layers=self.shape.layers,
                           graph_us=self.graph_us, waits=self.waits)

    def parts(self, step: ServedStep) -> Float64:
        """Return the parts of a step on one GPU of each stage, summed over stages [6], without correction factors.

        A pipeline's stages work on different parts of the batch at the same time; every token passes all stages.
        """
        setup = self.setup
        share = 1.0 / (setup.attention_dp * setup.pp)
        sequences = step.sequences * share
        prompts = [(piece.prompts * share, piece.new, piece.past) for piece in step.pieces]
        tokens = sequences * setup.drafted + sum(count * new for count, new, _ in prompts)
        rows = sequences * setup.drafted + step.finished * share
        by_tokens, by_rows, by_caches, by_pieces, by_company = self.grids
        found = between(by_tokens, TOKENS, tokens) + between(by_rows, SEQUENCES, rows)
        if tokens <= setup.piecewise_tokens:
            found[LAUNCHES], found[CALLS] = self.shape.layers, 0.0
        if sequences > 0:
            decoding = in_square(by_caches, SEQUENCES, CONTEXTS, sequences, step.context)
            found = found + decoding
            if setup.speculation is not None:
                # Each token of a draft costs about one more block and logits (EAGLE, multi-token prediction).
                block = (between(by_tokens, TOKENS, sequences) + decoding) / self.shape.layers
                found = found + setup.speculation.tokens * (block + between(by_rows, SEQUENCES, sequences))
        for count, new, past in prompts:
            found = found + count * in_square(by_company, PIECES, PASTS, new, past)
        if step.pieces:
            first, count = alone(step.pieces, share)
            found = found + count * (in_square(by_pieces, PIECES, PASTS, first.new, first.past)
                                     - in_square(by_company, PIECES, PASTS, first.new, first.past))
        return found

    def operations(self, step: ServedStep) -> list[ServedOperation]:
        """Return a step's operations by name, longest first, priced at the exact sizes of this step."""
        counted = Counter(self.in_order(step))
        found = [(each, float(count)) for each, count in counted.items() if isinstance(each, StepOperation)]
        exchanges = [(each, float(count)) for each, count in counted.items() if isinstance(each, StepExchange)]
        return sorted((*self._named(found), *self._exchanged(exchanges)), key=lambda each: -each.us)

    def in_order(self, step: ServedStep) -> list[StepOperation | StepExchange]:
        """Return the operations of a step on one GPU of each stage, layer by layer as they run, without drafts."""
        setup, make = self.setup, self._make
        share = 1.0 / (setup.attention_dp * setup.pp)
        sequences = max(round(step.sequences * share), 1) if step.sequences else 0
        prompts = [(max(round(piece.prompts * share), 1), piece.new, piece.past) for piece in step.pieces]
        tokens = sequences * setup.drafted + sum(count * new for count, new, _ in prompts)
        rows = max(sequences * setup.drafted + round(step.finished * share), 1)
        layers: dict[TransformerShape, list[StepOperation | StepExchange]] = {}
        for kind in self._layers:
            attention = [*make.of_decoding(kind, sequences, max(round(step.context), 1))] if sequences else []
            for number, new, past in prompts:
                attention += make.of_prompts(kind, number, new, past)
            layers[kind] = layer_in_order([*make.of_tokens(kind, tokens)], attention, [*make.exchanges(kind, tokens)])
        ends = [*make.end_exchanges(tokens, rows)]
        found: list[StepOperation | StepExchange] = [*make.embedded(tokens), *ends[:1]]
        for run in self.shape.runs:
            found += run.layers * layers[run.one_layer()]
        return [*found, *make.of_rows(rows), *ends[1:]]

    def prices_of(self, found: Sequence[StepOperation | StepExchange]) -> tuple[Float64, Float64, Float64]:
        """Return the time of each operation with the rates, and the ends of its 80% interval, µs."""
        times = np.zeros((3, len(found)))
        calls = [row for row, each in enumerate(found) if isinstance(each, StepOperation)]
        if calls:
            priced = self._prices([each.call for each in found if isinstance(each, StepOperation)])
            rate = np.array([self.rates.products if call.family in PRODUCTS else self.rates.others
                             for call in priced.calls])
            known = np.array([self._factor(found[row].name) for row in calls])
            for row, us in enumerate((priced.time_us, priced.low_us, priced.high_us)):
                times[row, calls] = (us * rate)[priced.index] * known
        rest = [row for row, each in enumerate(found) if isinstance(each, StepExchange)]
        if rest:
            exchanges = [each.call for each in found if isinstance(each, StepExchange)]
            there = self._exchange_times(exchanges)
            rate = np.array([self.rates.network if call.placement.nodes > 1 else self.rates.collectives
                             for call in exchanges]) * np.array([self._factor(found[row].name) for row in rest])
            for row, us in enumerate((there.time_us, there.low_us, there.high_us)):
                times[row, rest] = us * rate
        return times[0], times[1], times[2]

    def captured(self, step: ServedStep) -> bool:
        """Return whether a step runs as a CUDA graph."""
        return self.setup.graphs and not step.pieces and step.sequences <= self.setup.engine.graph_batch

    def engine_us(self, step: ServedStep) -> float:
        """Return the engine's host time around a step, µs."""
        engine = self.setup.engine
        if not self.rates.step_us:
            return 0.0
        each = engine.sequence_us * self.rates.step_us / engine.step_us if engine.step_us else 0.0
        return self.rates.step_us + each * (step.sequences + step.finished) + (engine.begin_us if step.pieces else 0.0)

    @property
    def grids(self) -> tuple[Float64, ...]:
        """Parts on grids: by tokens; by rows of logits; by sequences and contexts; by pieces and earlier tokens of
        prompts. The last grid exists for a piece alone, and for one of ``COMPANY`` pieces, which adds no launches."""
        if not self._grids:
            self._grids.append(self._price_grids())
        return self._grids[0]

    def _price_grids(self) -> tuple[Float64, ...]:
        make, layers = self._make, self._layers.items()
        tokens = self._priced([[(each, count) for kind, count in layers for each in make.of_tokens(kind, number)]
                               + [(each, 1) for each in make.embedded(number)] for number in TOKENS],
                              [[(each, count) for kind, count in layers for each in make.exchanges(kind, number)]
                               for number in TOKENS])
        rows = self._priced([[(each, 1) for each in make.of_rows(number)] for number in SEQUENCES],
                            [[(each, 1) for each in make.end_exchanges(number, number)] for number in SEQUENCES])
        decoding = self._priced([[(each, count) for kind, count in layers
                                  for each in make.of_decoding(kind, sequences, context)]
                                 for sequences in SEQUENCES for context in CONTEXTS])
        pieces, company = self._priced([[(each, count) for kind, count in layers
                                         for each in make.of_prompts(kind, number, new, past)]
                                        for number in (1, COMPANY) for new in PIECES for past in PASTS]).reshape(
                                            2, len(PIECES), len(PASTS), COLUMNS)
        company = np.minimum(company / COMPANY, pieces)
        company[..., LAUNCHES:] = 0.0
        return (np.maximum.accumulate(tokens, axis=0), rows, decoding.reshape(len(SEQUENCES), len(CONTEXTS), COLUMNS),
                pieces, company)

    def _priced(self, points: Sequence[Sequence[tuple[StepOperation, int]]],
                exchanges: Sequence[Sequence[tuple[StepExchange, int]]] = ()) -> Float64:
        """Return the parts of every point of a grid [n, 6]; all points are priced at once."""
        calls = [each.call for point in points for each, _ in point]
        found: Float64 = np.zeros((len(points), COLUMNS))
        place = np.repeat(np.arange(len(points)), [len(point) for point in points])
        counts = np.array([count for point in points for _, count in point], np.float64)
        if calls:
            priced = self._prices(calls)
            product = np.array([call.family in PRODUCTS for call in priced.calls])[priced.index]
            known = np.array([self._factor(each.name) for point in points for each, _ in point])
            us = priced.times_us * counts * known
            for column, rows in ((PRODUCT, product), (OTHER, ~product)):
                np.add.at(found[:, column], place[rows], us[rows])
            np.add.at(found[:, LAUNCHES], place, counts)
        for row, point in enumerate(exchanges):
            times = self._exchange_times([each.call for each, _ in point])
            for (each, count), us in zip(point, times.time_us.tolist(), strict=True):
                column = BETWEEN if each.call.placement.nodes > 1 else WITHIN
                found[row, column] += count * us * self._factor(each.name)
                found[row, CALLS] += count
            if self.hides:
                # The part that exceeds the overlapping work is exposed.
                left = max(found[row, WITHIN] + found[row, BETWEEN] - found[row, PRODUCT] - found[row, OTHER], 0.0)
                found[row, WITHIN], found[row, BETWEEN] = left, 0.0
        return found

    def _factor(self, name: str) -> float:
        return self._factors.get(name, 1.0)

    def _prices(self, calls: Sequence[OpCall]) -> PricedCalls:
        return sustained(price(calls, self.device, self.models), self.device)

    def _exchange_times(self, calls: Sequence[CollectiveCall]) -> CommTimes:
        times = price_calls(calls, self.collectives)
        if self.collectives.profile is not None or not calls:
            return times
        return with_engine_kernels(times, CollectiveBatch.from_calls(calls), self.collectives.topology,
                                   self.setup.engine.all_reduce_us)

    def _named(self, found: Sequence[tuple[StepOperation, float]]) -> Iterable[ServedOperation]:
        priced = self._prices([each.call for each, _ in found])
        bounds = _bounds(priced.calls, self.device)
        rows: dict[str, list[tuple[int, float]]] = {}
        for number, (each, count) in enumerate(found):
            rows.setdefault(each.name, []).append((int(priced.index[number]), count))
        for name, mine in rows.items():
            by_bound: dict[str, float] = {}
            sources: dict[str, float] = {}
            for row, count in mine:
                us = float(priced.time_us[row]) * count * self._factor(name)
                by_bound[bounds[row]] = by_bound.get(bounds[row], 0.0) + us
                source = Source.ANCHORED if name in self._factors else Source(int(priced.source[row]))
                label = source.label
                sources[label] = sources.get(label, 0.0) + us
            rate = self.rates.products if all(priced.calls[row].family in PRODUCTS for row, _ in mine) else (
                self.rates.others)
            yield ServedOperation(
                name, sum(count for _, count in mine), rate * sum(by_bound.values()),
                max(by_bound, key=lambda word: by_bound[word]),
                sum(priced.calls[row].flops * count for row, count in mine),
                sum(priced.calls[row].bytes_moved * count for row, count in mine), sources)

    def _exchanged(self, found: Sequence[tuple[StepExchange, float]]) -> Iterable[ServedOperation]:
        times = self._exchange_times([each.call for each, _ in found])
        rows: dict[str, list[int]] = {}
        for number, (each, _) in enumerate(found):
            rows.setdefault(each.name, []).append(number)
        for name, mine in rows.items():
            us = sum(found[row][1] * float(times.time_us[row]) for row in mine) * self.rates.collectives
            us *= self._factor(name)
            yield ServedOperation(name, sum(found[row][1] for row in mine), us, "network", 0.0,
                                sum(found[row][1] * found[row][0].call.payload_bytes for row in mine),
                                {Source.ANCHORED.label if name in self._factors else "collectives": us})


def rates_of(setup: ServingSetup) -> CorrectionFactors:
    """Return the usual correction factors with an engine's host times."""
    engine = setup.engine
    return CorrectionFactors(host_us=engine.launch_us, host_collective_us=engine.launch_us, step_us=engine.step_us)


def _bounds(calls: Sequence[OpCall], device: DeviceSpec) -> list[str]:
    """Return the bound of each call by its family's roofline: compute, memory or launch."""
    models = heuristic_models(device)
    found = []
    for call in calls:
        parts, _ = models[call.family].parts([call])
        by = {"compute": float(parts.compute_us[0]), "memory": float(parts.memory_us[0]),
              "launch": float(parts.fixed_us[0])}
        found.append(max(by, key=lambda word: by[word]))
    return found
