"""What a rank's host does in a step that never ran, and how sure both parts of it are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from graph_predictor.synthesis.operation_times import DeviceWork


@dataclass(frozen=True, slots=True)
class HostThread:
    """Its time in a step, ns.

    Attributes:
        told_ns: what the model of hosts tells.
        computed_ns: what operations compute on it, where it is the device.
        width_ns: half width of the latter's 80% interval; calls of a family err together, families apart.
    """

    told_ns: float
    computed_ns: float
    width_ns: float

    @classmethod
    def of(cls, told_ns: float, computed: Iterable[DeviceWork]) -> HostThread:
        """Add up what is computed; a work's name begins with its family."""
        widths: dict[str, float] = {}
        total = 0.0
        for work in computed:
            family = work.name.partition(":")[0]
            widths[family] = widths.get(family, 0.0) + work.ns * (work.high - work.low) / 2.0
            total += work.ns
        return cls(told_ns, total, float(np.sqrt(sum(width * width for width in widths.values()))))

    def spread(self, law: float, host: float, device: float) -> float:
        """Return the log half width of the 80% interval of both together.

        Args:
            law: that of what the model of hosts tells of a known one.
            host, device: by how much more the host, and it as a device, may differ from those known: one machine is
                slow or quick at both.
        """
        whole = self.told_ns + self.computed_ns
        machine_ns = host * self.told_ns + device * self.computed_ns
        return float(np.sqrt((law * self.told_ns)**2 + self.width_ns**2 + machine_ns**2) / whole) if whole else law
