"""Fitted models that a command was given."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_models import device
from kernel_models import profile as kernel_models_profile


def loaded_profiles(paths: Sequence[str] | None) -> list[kernel_models_profile.DeviceProfile]:
    """The profiles of files.

    Raises:
        ForetraceError: a file cannot be read.
    """
    if not paths:
        return []

    return [kernel_models_profile.load_profile(path) for path in paths]


def profile_of(paths: Sequence[str] | None, spec: device.DeviceSpec) -> kernel_models_profile.DeviceProfile | None:
    """The first profile of a device among files; ``None`` if none were given.

    Raises:
        ForetraceError: a file cannot be read, or all are of other devices.
    """
    found = loaded_profiles(paths)
    for profile in found:
        if profile.device.name == spec.name:
            return profile
    if not found:
        return None

    raise kernel_models_profile.unused_error(found, [spec.name])
