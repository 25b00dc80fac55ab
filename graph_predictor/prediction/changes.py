"""The groups of a ``Scenario``'s fields: each says what edits change of one part of a step.

Each field is one independent change. Groups know how two changes of the same field compose: factors multiply, half
widths add in quadrature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from graph_predictor.prediction.fetching import Fetching
from graph_predictor.prediction.loader import Loader
from kernel_models.device import DeviceSpec
from kernel_models.device_choice import scaled_device
from kernel_models.launch_constants import LaunchConstants
from kernel_models.model import Source
from kernel_models.op_call import OpCall
from kernel_models.pricing import Models
from tracer.arrays import Float64, Int64

CallEdit = Callable[[OpCall], "tuple[OpCall, ...]"]


@dataclass(frozen=True)
class DeviceChange:
    """The device of the recording and the one predicted for; ``None`` where nobody knows, or where it is the same.

    Attributes:
        source, target: their figures.
        source_models, target_models: fitted models of them, if there are any.
        clock, bandwidth: factors on the device's clock and memory bandwidth.
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
    """The sources of kernels' times before any edit: a ``Source`` each, and the logs of their 80% intervals' ends."""

    source: Int64
    low: Float64
    high: Float64


@dataclass(frozen=True)
class KernelChange:
    """Device work, by kernel of the recorded program.

    Attributes:
        calls: new calls of groups of pieces (see ``Work.calls``) that an edit changed.
        call_edits: changes of every call that has not been replaced, by name of the edit, applied in the names' order.
        factor: on the duration of each kernel; ``spread`` the log half width of its 80% interval.
        change_known: how work changes on one device was measured, so that ``spread`` alone is the interval of changed
            kernels, not that of the models whose ratio was taken.
        sources: where the times come from; ``None`` where all are measured.
    """

    calls: dict[int, tuple[OpCall, ...]] = field(default_factory=dict)
    call_edits: dict[str, CallEdit] = field(default_factory=dict)
    factor: Float64 | None = None
    spread: Float64 | None = None
    change_known: bool = False
    sources: KernelSources | None = None

    def scaled(self, factor: Float64) -> KernelChange:
        """Return the same with one more factor on each kernel's duration."""
        return replace(self, factor=factor if self.factor is None else factor * self.factor)

    def widened(self, spread: Float64) -> KernelChange:
        """Return the same with one more log half width for each kernel's interval."""
        return replace(self, spread=spread if self.spread is None else np.hypot(spread, self.spread))

    def edited(self, call: OpCall) -> tuple[OpCall, ...]:
        """Return a call after all edits of calls, in the order of their names."""
        found: tuple[OpCall, ...] = (call,)
        for name in sorted(self.call_edits):
            found = tuple(new for old in found for new in self.call_edits[name](old))
        return found


@dataclass(frozen=True)
class HostChange:
    """Host time, by piece of ``Scenario.pieces``.

    Attributes:
        ns: times of another host, or at other sizes; ``None`` for those recorded.
        spread: log half width of what changes add to the interval of the host's time.
        factor: on all host time.
        weight: factor on each piece.
        constants: launch constants of another host, by rank.
        source: where the times come from before any edit.
    """

    ns: Float64 | None = None
    spread: float = 0.0
    factor: float = 1.0
    weight: Float64 | None = None
    constants: list[LaunchConstants] | None = None
    source: Source = Source.MEASURED

    def scaled(self, weight: Float64) -> HostChange:
        """Return the same with one more factor on each piece."""
        return replace(self, weight=weight if self.weight is None else weight * self.weight)

    def widened(self, spread: float) -> HostChange:
        """Return the same with one more log half width of host time."""
        return replace(self, spread=float(np.hypot(self.spread, spread)))


@dataclass(frozen=True)
class LaunchChange:
    """Launches, and what is waited for.

    Attributes:
        graphed: launches are replayed from a CUDA graph.
        cost: launch calls cost the host something, and their kernels start later than they return.
        waits: the host waits for the device where it did.
        hidden_collectives: collectives run beside everything else, and are never waited for.
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
    """Batches, and where they are loaded.

    Attributes:
        loader: worker processes that make batches, where there are any.
        fetching: what another number of samples makes of loading batches in the training process.
        loading: where batches are loaded: by the training thread, as recorded; beside it; or nowhere.
    """

    loader: Loader | None = None
    fetching: Fetching | None = None
    loading: Loading = Loading.INLINE

    @property
    def workers(self) -> Loader | None:
        """Return the worker processes that the step waits for, if it does."""
        return self.loader if self.loading is Loading.INLINE else None

    def with_samples(self, factor: float) -> BatchChange:
        """Return the same with ``factor`` times as many samples a batch, as far as workers make them."""
        return self if self.loader is None else replace(self, loader=self.loader.scaled(factor))
