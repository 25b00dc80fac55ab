"""The optimizer's step where its state is in the host's memory, as Megatron-Core's ``--optimizer-cpu-offload`` does it:
gradients go to the host, its cores update (Adam in fp32), and parameters come back, one after another.

No measurement has tested this: the device's link to its host is the data sheet's, the host's share is assumed.
"""

from __future__ import annotations

from kernel_models.device import DeviceSpec
from kernel_models.model import Source
from planner.parallel.pieces import LayerWork

HOST_GBPS = 40.0
"""Bandwidth of the host's memory that each GPU's part of the update gets, 10⁹ bytes/s: about half of what two sockets
with eight channels of DDR5-4800 have for eight GPUs (614.4 GB/s)."""
UPDATE_BYTES = 28
"""Bytes moved by a parameter's update: parameter, gradient and both moments read, all but the gradient written, in
fp32."""
SPREAD = 2.0
"""An 80% interval is a factor of two either way."""


def offloaded_step(parameters: float, gradient_bytes: int, parameter_bytes: int, device: DeviceSpec) -> LayerWork:
    """Return the optimizer's step of so many parameters.

    Args:
        parameters: whose state the rank has.
        gradient_bytes: of a gradient as it is sent to the host; parameter_bytes: of what comes back.
    """
    link = device.host_gbps or HOST_GBPS
    us = parameters * ((gradient_bytes + parameter_bytes) / link + (UPDATE_BYTES + parameter_bytes) / HOST_GBPS) * 1e-3
    return LayerWork(others=us, low=us / SPREAD, high=us * SPREAD, sources={int(Source.HEURISTIC): us})
