"""``Scenario``: a recorded job and what edits change of it. Edits fill in fields; nothing is computed until it is
priced.

Each field of its groups (``changes``) is one independent change, resolved in one order whatever the order of the edits:
edits of different fields therefore commute. Two edits that set the same field differently are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from graph_predictor.prediction.changes import BatchChange, DeviceChange, HostChange, KernelChange, LaunchChange
from graph_predictor.prediction.fetching import fetching_of
from graph_predictor.prediction.repeat import Cycle
from graph_predictor.prediction.replacement import Rewriting, Units
from graph_predictor.prediction.shared import Shared
from graph_predictor.prediction.work import Work, describe_work
from graph_predictor.simulation.build import Built
from graph_predictor.simulation.host_pieces import HostPieces
from kernel_models.device import DeviceSpec
from tracer.arrays import Float64
from tracer.errors import ForetraceError

OTHER_RANKS = "the ranks that were not recorded"
"""The claim of an edit that says how they behave."""


class EditError(ForetraceError):
    """An edit that cannot be done: what was asked, why not, what can be."""


class Origin(Protocol):
    """The recorded job whose times a step traced by shapes has taken."""

    @property
    def scenario(self) -> Scenario:
        """Return the recorded job, without edits."""

    @property
    def ranks(self) -> list[int]:
        """Return the recorded rank of each traced one."""

    def host_factors(self, pieces: HostPieces, ns: Float64) -> Float64:
        """Return a factor on each piece of the traced job's host time, where an edit makes ``ns`` of the recorded
        job's."""


@dataclass(frozen=True)
class Scenario:
    """A recorded job and its changes, from which a step is predicted.

    Attributes:
        built, cycle, pieces: the recorded job, the steps repeated and its host time.
        devices, kernels, host, launches, batches: what edits change of each.
        rewrites: work replaced by other work, by name (see ``rewriting``).
        activation_factors: on the memory that activations take, by edit.
        regrouped: the job's device work, where an edit groups it anew.
        origin: of a step traced by shapes, the recorded job whose times it has taken.
        items_per_rank: samples a step and rank, where known.
        profiled: host times are those under the profiler; what edits take from other captures must be alike.
        set_by: which edit set what only one may set.
        shared: results that scenarios made from this one share with it.
        warnings: what makes the prediction less reliable.
        notes: what was assumed.
    """

    built: Built
    cycle: Cycle
    pieces: HostPieces
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
        """Note that an edit sets something that only one may set. Raises ``EditError`` if another one has."""
        if what in self.set_by and self.set_by[what] != edit:
            raise EditError(f"{edit} and {self.set_by[what]} both change {what}; leave one of them out.")
        return replace(self, set_by={**self.set_by, what: edit})

    def with_samples(self, factor: float, batch: int | None = None, grown: float | None = None) -> Scenario:
        """Return the same with ``factor`` times as many samples a batch, as far as a loader's workers make them, or the
        training process itself; ``batch`` and ``grown`` as of ``fetching_of``."""
        recorded = self if self.origin is None else self.origin.scenario
        ranks = range(len(recorded.built.graphs)) if self.origin is None else self.origin.ranks
        fetching = fetching_of(recorded.built, recorded.cycle, recorded.pieces, ranks, factor, batch, grown)
        batches = self.batches.with_samples(factor)
        if fetching is None:
            return replace(self, batches=batches)
        return self.with_note(fetching.note(), batches=replace(batches, fetching=fetching))

    def with_note(self, note: str, **changes: Any) -> Scenario:
        """Return the same with changed fields and one more sentence on what was assumed."""
        return replace(self, notes=tuple(dict.fromkeys((*self.notes, note))), **changes)

    def known_source(self) -> DeviceSpec:
        """Return the device of the recording. Raises ``EditError`` where nobody knows it."""
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
        """Return the device predicted for, with the factors on its rates; made once for all with the same."""
        devices = self.devices
        return self.shared.once("scaled device", (devices.target or devices.source, devices.clock, devices.bandwidth),
                                devices.scaled)

    def host_times(self) -> Float64:
        """Return a time for each piece of host time before any factor, ns."""
        return (self.pieces.ns if self.host.ns is None else self.host.ns).astype(np.float64)


Rewrite = Callable[[Scenario, Units], Rewriting]
"""Makes the replacements of one edit, of a scenario's units as the edits before left them."""
