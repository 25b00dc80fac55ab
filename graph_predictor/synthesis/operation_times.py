"""Host and device times of the operations of a step that never ran."""

from __future__ import annotations

from dataclasses import dataclass, field

from graph_predictor.simulation.ranks import STAGED_BYTES
from tracer.arrays import Float64
from tracer.graph import NONE, KernelKind, LaunchKind

COMPUTE_STREAM, COMMUNICATION_STREAM = 7, 20


@dataclass(slots=True)
class DeviceWork:
    """A piece of device work: what, where, how long (ns), how much it moves, and how sure that is.

    Attributes:
        collective: row of the rank's collectives; ``NONE`` for none.
        source: a ``Source``.
        low, high: logs of the 80% interval's ends over the time.
        in_call: whether the call waits for it (a copy to pageable memory).
    """

    name: str
    kind: KernelKind
    ns: float
    stream: int = COMPUTE_STREAM
    moved: int = NONE
    collective: int = NONE
    source: int = 0
    low: float = 0.0
    high: float = 0.0
    in_call: bool = False

    @property
    def staged(self) -> bool:
        """Return whether the call feeds it piece by piece (a large copy from pageable memory, see ``ranks``)."""
        return (self.kind == KernelKind.MEMCPY and not self.in_call and "Pageable ->" in self.name
                and self.moved > STAGED_BYTES)


@dataclass(slots=True)
class HostCall:
    """A runtime call of an operation: what it is, its own cost (ns), and the device work it starts.

    ``stream`` is, of a call that waits, the stream it waits for (``NONE``: all of them).
    """

    name: str
    kind: LaunchKind
    ns: float
    kernels: list[DeviceWork] = field(default_factory=list)
    stream: int = NONE


@dataclass(slots=True)
class OperationTimes:
    """Times of one rank's operations, ns by row of ``ops``.

    Attributes:
        before: host time before each.
        inside: host time in each, its calls apart.
        calls: of the operations that have any.
        tail: host time after the last one.
        fetch: host time in which the batch is loaded, before the first one.
    """

    before: Float64
    inside: Float64
    calls: dict[int, list[HostCall]]
    tail: float = 0.0
    fetch: float = 0.0
