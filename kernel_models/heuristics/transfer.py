"""Copies between host and device and between devices."""

from __future__ import annotations

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.call_table import CallTable
from kernel_models.heuristics.curves import link_us, memory_us
from kernel_models.heuristics.work import KernelWork, one, work_of
from kernel_models.op_call import Family

HALF_SPEED_BYTES = 64e3
"""b½ of a link: where a copy reaches two thirds of its speed. Assumed, of the order bandwidthTest shows."""


@work_of(Family.TRANSFER)
def transfer_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Bytes over PCIe or NVLink, or twice over the memory for a copy within the device, µs (``curves.link_us``).

    A copy to a peer uses all of a device's links, as behind a switch.

    Source: one-way link rates of the data sheet; Hockney's latency–bandwidth model.
    """
    moved = np.maximum(table.dim("bytes"), table.bytes_moved / 2.0)
    peer_gbps = device.peer_gbps or device.host_gbps
    within = table.by_kind(lambda kind: float("dtod" in _plain(kind))) > 0
    peer = table.by_kind(lambda kind: float("ptop" in _plain(kind) or "peer" in kind)) > 0
    host = link_us(moved, device.host_gbps, HALF_SPEED_BYTES)
    other = np.where(peer, link_us(moved, peer_gbps, HALF_SPEED_BYTES), memory_us(2.0 * moved, device))
    return KernelWork(np.zeros(len(table)), np.where(within | peer, other, host), one(table))


def _plain(kind: str) -> str:
    """ "d2d", "DtoD", "device_to_device" → "dtod"; "p2p" → "ptop"."""
    kind = kind.lower().split(":")[0]
    return kind.replace("device", "d").replace("host", "h").replace("_", "").replace("2", "to")
