"""Models that turn an operation into microseconds.

Operations become calls (``kernel_models.families``), calls get times (``price``) from a device's fitted models
(``DeviceProfile``, made by ``fit_profile`` from measured calls) or from formulas on its data sheet
(``kernel_models.device``). ``kernel_models.host.segments`` holds what replay needs of a trace: launch latencies,
gaps between queued kernels, and return lags of blocking calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.lazy import lazily

if TYPE_CHECKING:
    from kernel_models.collectives import CollectiveCall, CommProfile
    from kernel_models.datasets import Samples, read_samples
    from kernel_models.device import DeviceSpec, resolve_device
    from kernel_models.fitting import fit_profile
    from kernel_models.op_call import Family, KernelModel, OpCall, Source, Times
    from kernel_models.pricing import PricedCalls, price
    from kernel_models.profile import DeviceProfile, ProfileError, load_profile, save_profile
    from kernel_models.scores import evaluate_profile
    from tracer.shape_only.devices import device_names

_HOMES = {
    "CollectiveCall": "kernel_models.collectives",
    "CommProfile": "kernel_models.collectives",
    "Samples": "kernel_models.datasets",
    "read_samples": "kernel_models.datasets",
    "DeviceSpec": "kernel_models.device",
    "device_names": "tracer.shape_only.devices",
    "resolve_device": "kernel_models.device",
    "evaluate_profile": "kernel_models.scores",
    "fit_profile": "kernel_models.fitting",
    "KernelModel": "kernel_models.op_call",
    "Source": "kernel_models.op_call",
    "Times": "kernel_models.op_call",
    "Family": "kernel_models.op_call",
    "OpCall": "kernel_models.op_call",
    "PricedCalls": "kernel_models.pricing",
    "price": "kernel_models.pricing",
    "DeviceProfile": "kernel_models.profile",
    "ProfileError": "kernel_models.profile",
    "load_profile": "kernel_models.profile",
    "save_profile": "kernel_models.profile",
}

__all__ = [
    "CollectiveCall", "CommProfile", "DeviceProfile", "DeviceSpec", "Family", "KernelModel", "OpCall", "PricedCalls",
    "ProfileError", "Samples",
    "Source", "Times", "device_names", "evaluate_profile", "fit_profile", "load_profile", "price", "read_samples",
    "resolve_device", "save_profile",
]

__getattr__, __dir__ = lazily(__name__, _HOMES)
