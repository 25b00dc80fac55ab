"""What turns an operation into microseconds.

Operations become calls (``kernel_models.families``), calls get times (``price``) from a device's fitted models
(``DeviceProfile``, made by ``fit_profile`` from measured calls) or from formulas on its data sheet
(``kernel_models.device``). ``kernel_models.launch_constants`` holds what replay needs of a trace: launch latencies,
gaps between queued kernels, and return lags of blocking calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernel_models.collectives import CollectiveCall, CommProfile
    from kernel_models.datasets import Samples, read_samples
    from kernel_models.device import DeviceSpec, device_names, resolve_device
    from kernel_models.evaluate import evaluate_profile
    from kernel_models.fitting import fit_profile
    from kernel_models.model import KernelModel, Source, Times
    from kernel_models.op_call import Family, OpCall
    from kernel_models.pricing import PricedCalls, price
    from kernel_models.profile import DeviceProfile, ProfileError, load_profile, save_profile

_HOMES = {
    "CollectiveCall": "collectives", "CommProfile": "collectives",
    "Samples": "datasets", "read_samples": "datasets",
    "DeviceSpec": "device", "device_names": "device", "resolve_device": "device",
    "evaluate_profile": "evaluate", "fit_profile": "fitting",
    "KernelModel": "model", "Source": "model", "Times": "model", "Family": "op_call", "OpCall": "op_call",
    "PricedCalls": "pricing", "price": "pricing",
    "DeviceProfile": "profile", "ProfileError": "profile", "load_profile": "profile", "save_profile": "profile",
}

__all__ = [
    "CollectiveCall", "CommProfile", "DeviceProfile", "DeviceSpec", "Family", "KernelModel", "OpCall", "PricedCalls",
    "ProfileError", "Samples",
    "Source", "Times", "device_names", "evaluate_profile", "fit_profile", "load_profile", "price", "read_samples",
    "resolve_device", "save_profile",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that starting the command line stays quick."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"kernel_models.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'kernel_models' has no attribute {name!r}")
