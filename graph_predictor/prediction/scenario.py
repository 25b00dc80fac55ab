"""``Scenario``: a recorded job and what edits change of it. Edits fill in fields; nothing is computed until it is
priced.

Each field is one independent change, resolved in one order whatever the order of the edits: edits of different fields
therefore commute. Two edits that set the same field differently are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from graph_predictor.prediction.repeat import Cycle
from graph_predictor.prediction.shared import Shared
from graph_predictor.prediction.work import Work
from graph_predictor.simulation.build import Built
from graph_predictor.simulation.host_pieces import HostPieces
from kernel_models.device import DeviceSpec
from kernel_models.launch_constants import LaunchConstants
from kernel_models.model import Source
from kernel_models.op_call import OpCall
from kernel_models.pricing import Models
from tracer.arrays import Float64, Int64
from tracer.errors import ForetraceError

if TYPE_CHECKING:
    from graph_predictor.prediction.fetching import Fetching
    from graph_predictor.prediction.loader import Loader
    from graph_predictor.prediction.rewriting import Rewrite, Rewritten

CallEdit = Callable[[OpCall], "tuple[OpCall, ...]"]


class Loading(Enum):
    """Where a step's batch is loaded."""

    INLINE = "inline"
    BACKGROUND = "background"
    NONE = "none"


class EditError(ForetraceError):
    """An edit that cannot be done: what was asked, why not, what can be."""


class Origin(Protocol):
    """The recorded job whose times a step traced by shapes has taken."""

    @property
    def scenario(self) -> Scenario:
        """The recorded job, without edits."""

    @property
    def ranks(self) -> list[int]:
        """Of each traced rank the recorded one."""

    def host_factors(self, pieces: HostPieces, ns: Float64) -> Float64:
        """Factor on each piece of the traced job's host time, where an edit makes ``ns`` of the recorded job's."""


@dataclass(frozen=True)
class Scenario:
    """What is predicted.

    Attributes:
        built, cycle, work, pieces: the recorded job, the steps repeated, its device work and its host time.
        device, source_device: where it would run and where it was recorded; ``None`` where nobody knows.
        models, source_models: fitted models of these, if there are any.
        clock, bandwidth: factors on the device's clock and memory bandwidth.
        calls: new calls of groups of pieces (see ``Work.calls``) that an edit changed.
        call_edits: changes of every call that has not been replaced, by name of the edit, in a fixed order.
        kernel_factor: on the duration of each recorded kernel; ``kernel_spread`` the log half width of its 80%
            interval.
        host_ns: times of the host's pieces, if another host's; ``host_spread`` the log half width of their interval.
        host_factor: on all host time.
        host_weight: factor on each piece of host time.
        constants: launch constants of another host, by rank.
        graphed: launches are replayed from a CUDA graph.
        launch_cost: launch calls cost the host something, and their kernels start later than they return.
        waits: the host waits for the device where it did.
        loader: worker processes that make batches, where there are any.
        fetching: what another number of samples makes of loading batches in the training process.
        loading: where batches are loaded: by the training thread, as recorded; beside it; or nowhere.
        hidden_collectives: collectives run beside everything else, and are never waited for.
        rewrites: work replaced by other work, by name (see ``rewriting``); ``rewritten`` is what came of it.
        activation_factors: on the memory that activations take, by edit.
        origin: of a step traced by shapes, the recorded job whose times it has taken.
        items_per_rank: samples a step and rank, where known.
        profiled: host times are those under the profiler; what edits take from other captures must be alike.
        change_known: how work changes on one device was measured, so that ``kernel_spread`` alone is the interval of
            changed kernels, not that of the models whose ratio was taken.
        warnings: what makes the prediction less reliable.
        notes: what was assumed.
    """

    built: Built
    cycle: Cycle
    work: Work
    pieces: HostPieces
    device: DeviceSpec | None = None
    source_device: DeviceSpec | None = None
    models: Models | None = None
    source_models: Models | None = None
    clock: float = 1.0
    bandwidth: float = 1.0
    calls: dict[int, tuple[OpCall, ...]] = field(default_factory=dict)
    call_edits: dict[str, CallEdit] = field(default_factory=dict)
    kernel_factor: Float64 | None = None
    kernel_spread: Float64 | None = None
    host_ns: Float64 | None = None
    host_spread: float | None = None
    host_factor: float = 1.0
    host_weight: Float64 | None = None
    constants: list[LaunchConstants] | None = None
    graphed: bool = False
    launch_cost: bool = True
    waits: bool = True
    loader: Loader | None = None
    fetching: Fetching | None = None
    loading: Loading = Loading.INLINE
    hidden_collectives: bool = False
    rewrites: dict[str, Rewrite] = field(default_factory=dict)
    rewritten: Rewritten | None = None
    activation_factors: dict[str, float] = field(default_factory=dict)
    kernel_ns: Float64 | None = None
    """Durations of kernels that a fit gives instead of the recorded ones, ns; NaN where it has none."""
    base_source: Int64 | None = None
    """``Source`` of the kernels' times before any edit, and the logs of their intervals' ends; measured if left out."""
    base_low: Float64 | None = None
    base_high: Float64 | None = None
    base_host: Source = Source.MEASURED
    origin: Origin | None = None
    items_per_rank: float | None = None
    profiled: bool = True
    change_known: bool = False
    set_by: dict[str, str] = field(default_factory=dict)
    shared: Shared = field(default_factory=Shared, repr=False, compare=False)
    """What scenarios made from this one share with it."""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def claim(self, what: str, edit: str) -> Scenario:
        """Note that an edit sets something. Raises ``EditError`` if another one has."""
        if what in self.set_by and self.set_by[what] != edit:
            raise EditError(f"{edit} and {self.set_by[what]} both change {what}; leave one of them out.")
        return replace(self, set_by={**self.set_by, what: edit})

    def with_samples(self, factor: float, fetching: Fetching | None) -> Scenario:
        """The same with ``factor`` times as many samples a batch, as far as a loader's workers make them, or the
        training process itself (``fetching``, if it does)."""
        found = self if self.loader is None else replace(self, loader=self.loader.scaled(factor))
        return found if fetching is None else found.with_note(fetching.note(), fetching=fetching)

    def with_note(self, note: str, **changes: Any) -> Scenario:
        """The same with changed fields and one more sentence on what was assumed."""
        return replace(self, notes=tuple(dict.fromkeys((*self.notes, note))), **changes)

    def known_source(self) -> DeviceSpec:
        """The device of the recording. Raises ``EditError`` where nobody knows it."""
        if self.source_device is None:
            name = self.built.graphs[0].meta.device
            raise EditError((f"The trace was recorded on {name!r}, which is no known device" if name else
                             "The trace does not say on which device it was recorded")
                            + "; name it with --from-device to scale its kernels to another one.")
        return self.source_device

    def steps_kernels(self) -> Int64:
        """Rows of the recorded program's kernels in the cycle."""
        return np.flatnonzero(self.cycle.kernel)
